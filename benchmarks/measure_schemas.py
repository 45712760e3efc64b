"""Measures which JSON schemas are kept to: those of the public test suite, and generated ones answered by a model.

    pip download --no-deps --no-binary jsonschema jsonschema==4.25.1 && tar xf jsonschema-4.25.1.tar.gz
    python -m benchmarks.measure_schemas --suite jsonschema-4.25.1/json/tests/draft2020-12 --home HOME [--generated 200]
    pip install xgrammar outlines-core    # --libraries xgrammar,outlines-core asks these as well, if installed

The suite's `optional` and `optional/format` are folders of their own; formats that are not kept to are left out. A
schema of the suite is refused before the first token, or its grammar is asked which of the suite's values it allows.
Wrong: it allows an invalid one. Narrower: it allows no invalid one, and not all valid ones (another order of keys, keys
that the schema does not name). A generated schema is valid if its answer parses and keeps to it, formats included.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Annotated, Any

import jsonschema
import typer

from benchmarks.common import Home, Model, markdown, run
from ragblend.engine.decoding import grammar as kept
from ragblend.engine.decoding.constrained import token_grammars
from ragblend.engine.decoding.grammar import json_grammar, load_llguidance
from ragblend.engine.engine import Engine
from ragblend.engine.interface import EngineInterface

OUTCOMES = ("right", "narrower", "wrong", "refused")
WORDS = ("name", "code", "when", "where", "price", "tags", "parts", "owner", "state", "note")
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
FORMATS = ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
PATTERNS = (
    "^[A-Z]{2}-[0-9]+-x$",
    r"\.pdf$",
    "^(north|south)-[a-f]{3,5}$",
    "^[0-9a-f]{40}$",
    r"^\+[1-9][0-9 ]{6,12}$",
)


Allows = Callable[[str], bool]  # whether this can be the whole answer


def measure(
    suite: Annotated[Path, typer.Option(help="The folder of one draft's JSON files.")],
    home: Home,
    model: Model = "default",
    libraries: Annotated[str, typer.Option(help="Others to compare, separated by commas.")] = "",
    generated: Annotated[
        int, typer.Option(min=0, help="How many generated schemas the model answers.")
    ] = 200,
) -> None:
    """Print the tables."""
    with closing(Engine.open(model, home=home)) as engine:
        tokenizer = engine.tokenizer
        tables = token_grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        ours = _of_suite(lambda schema: _ours(tables, schema), suite)
        rows = [
            [name, *(str(list(found.values()).count(each)) for each in OUTCOMES)]
            for name, found in ours.items()
        ]
        rows.append(["all", *(str(sum(int(row[place]) for row in rows)) for place in range(1, 5))])
        print(markdown(["keyword", *OUTCOMES], rows))
        if chosen := [name for name in libraries.split(",") if name]:
            print(_comparison(ours, {name: _of_suite(LIBRARIES[name], suite) for name in chosen}))
        valid = 0
        for number, schema in enumerate(random_schemas(generated), 1):
            valid += _is_answered(engine, schema)
            print(f"{valid} of {number} valid", file=sys.stderr)
        print(f"\ngenerated schemas answered validly: {valid} of {generated}")


Outcomes = dict[str, dict[str, str]]  # keyword -> schema's description -> one of OUTCOMES


def _of_suite(grammar_of: Callable[[Any], Allows], suite: Path) -> Outcomes:
    return {
        file.stem: {
            case["description"]: _outcome(grammar_of, case["schema"], case["tests"])
            for case in json.loads(file.read_text())
        }
        for file in sorted(suite.glob("*.json"))
        if suite.name != "format" or file.stem in kept.FORMATS
    }


def _outcome(grammar_of: Callable[[Any], Allows], schema: Any, tests: list[dict[str, Any]]) -> str:
    try:
        allows = grammar_of(schema)
    except Exception as error:  # each library has its own
        print(f"{json.dumps(schema)}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return "refused"
    allowed = [allows(json.dumps(test["data"], ensure_ascii=False)) for test in tests]
    if any(is_allowed and not test["valid"] for is_allowed, test in zip(allowed, tests, strict=True)):
        return "wrong"
    return "right" if sum(allowed) == sum(test["valid"] for test in tests) else "narrower"


def _ours(tables: Any, schema: Any) -> Allows:
    grammar = json_grammar(schema)

    def allows(text: str) -> bool:
        matcher = load_llguidance().LLMatcher(tables, grammar.text, log_level=0)
        ids = tables.tokenize_str(text)
        return bool(
            matcher.validate_tokens(ids) == len(ids)
            and matcher.consume_tokens(ids)
            and matcher.is_accepting()
        )

    return allows


def _xgrammar(schema: Any) -> Allows:
    import xgrammar  # type: ignore[import-not-found]

    tokens = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<end>"], stop_token_ids=[256])
    grammar = xgrammar.GrammarCompiler(tokens).compile_json_schema(json.dumps(schema))

    def allows(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    return allows


def _outlines_core(schema: Any) -> Allows:
    from outlines_core import json_schema  # type: ignore[import-not-found]

    pattern = re.compile(json_schema.build_regex_from_schema(json.dumps(schema)), re.DOTALL)
    return lambda text: pattern.fullmatch(text) is not None


LIBRARIES = {"xgrammar": _xgrammar, "outlines-core": _outlines_core}


def _comparison(ours: Outcomes, others: dict[str, Outcomes]) -> str:
    """Totals, and the keywords of the schemas that are wrong, or that only the other keeps to exactly."""
    rows = []
    for name, found in {"ragblend": ours, **others}.items():
        cases = [
            (word, each, outcome) for word, each_of in found.items() for each, outcome in each_of.items()
        ]
        totals = Counter(outcome for *_, outcome in cases)
        wrong = Counter(word for word, _, outcome in cases if outcome == "wrong")
        more = Counter(
            word for word, each, outcome in cases if outcome == "right" and ours[word][each] == "refused"
        )
        counted = (", ".join(f"{word} {count}" for word, count in each.items()) for each in (wrong, more))
        rows.append([name, *(str(totals[each]) for each in OUTCOMES), *counted])
    return markdown(["library", *OUTCOMES, "wrong in", "right where ragblend refuses"], rows)


def random_schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Objects of up to three levels, with formats, patterns, bounds, choices and lists."""
    random = Random(seed)
    return [_object(random, 2) for _ in range(count)]


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(WORDS, random.randint(1, 4))
    parts = {name: _part(random, depth) for name in names}
    return {"type": "object", "properties": parts, "required": names[: random.randint(1, len(names))]}


def _part(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(0, 3)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "format": random.choice(FORMATS)},
        {"type": "string", "pattern": random.choice(PATTERNS)},
        {"type": "string", "minLength": low, "maxLength": low + 20},
        {"type": "integer", "minimum": low, "maximum": low + 50},
        {"type": "number", "exclusiveMinimum": low},
        {"enum": ["open", "closed", None, 3]},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "format": "date"}]},
    ]
    if depth:
        kinds += [
            _object(random, depth - 1),
            {"type": "array", "items": _part(random, depth - 1), "minItems": low, "maxItems": low + 2},
        ]
    return random.choice(kinds)


def _is_answered(engine: EngineInterface, schema: dict[str, Any]) -> bool:
    prompt = engine.chat_prompt(None, [], f"Make up an example. Keys: {', '.join(schema['properties'])}.")
    answer = engine.generate(prompt, method="full", grammar=json_grammar(schema), max_new_tokens=400)
    try:
        jsonschema.validate(
            json.loads(answer.text), schema, jsonschema.Draft202012Validator, format_checker=CHECKER
        )
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        print(f"{json.dumps(schema)}: {answer.text!r}: {str(error).partition(chr(10))[0]}")
        return False
    return True


if __name__ == "__main__":
    run(measure, __doc__)
