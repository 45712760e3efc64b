"""Measures which JSON schemas are kept to: those of the public test suite, and generated ones answered by a model.

    pip download --no-deps --no-binary jsonschema jsonschema==4.25.1 && tar xf jsonschema-4.25.1.tar.gz
    python -m benchmarks.measure_schemas --suite jsonschema-4.25.1/json/tests/draft2020-12 --home HOME [--generated 200]

The suite's `optional` and `optional/format` are folders of their own; formats that are not kept to are left out. A
schema of the suite is refused before the first token, or its grammar is asked which of the suite's values it allows.
Wrong: it allows an invalid one. Narrower: it allows no invalid one, and not all valid ones (another order of keys, keys
that the schema does not name). A generated schema is valid if its answer parses and keeps to it, formats included.
"""

import json
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Annotated, Any

import jsonschema
import typer

from benchmarks.common import Home, Model, markdown, run
from ragblend.engine.decoding import grammar as kept
from ragblend.engine.decoding.constrained import token_grammars
from ragblend.engine.decoding.grammar import Grammar, json_grammar, load_llguidance
from ragblend.engine.engine import Engine
from ragblend.engine.interface import EngineInterface
from ragblend.kvstore.errors import UsageError

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


def measure(
    suite: Annotated[Path, typer.Option(help="The folder of one draft's JSON files.")],
    home: Home,
    model: Model = "default",
    generated: Annotated[
        int, typer.Option(min=0, help="How many generated schemas the model answers.")
    ] = 200,
) -> None:
    """Print both tables."""
    with closing(Engine.open(model, home=home)) as engine:
        tokenizer = engine.tokenizer
        tables = token_grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        counts = {file.stem: _of_suite(tables, file) for file in sorted(suite.glob("*.json"))}
        total = sum(counts.values(), Counter[str]())
        rows = [
            [name, *(str(count[each]) for each in OUTCOMES)]
            for name, count in (*counts.items(), ("all", total))
        ]
        print(markdown(["keyword", *OUTCOMES], rows))
        valid = 0
        for number, schema in enumerate(random_schemas(generated), 1):
            valid += _is_answered(engine, schema)
            print(f"{valid} of {number} valid", file=sys.stderr)
        print(f"\ngenerated schemas answered validly: {valid} of {generated}")


def _of_suite(tables: Any, file: Path) -> Counter[str]:
    if file.parent.name == "format" and file.stem not in kept.FORMATS:
        return Counter()
    return Counter(_outcome(tables, case["schema"], case["tests"]) for case in json.loads(file.read_text()))


def _outcome(tables: Any, schema: Any, tests: list[dict[str, Any]]) -> str:
    try:
        grammar = json_grammar(schema)
    except UsageError:
        return "refused"
    allowed = [_allows(tables, grammar, test["data"]) for test in tests]
    if any(is_allowed and not test["valid"] for is_allowed, test in zip(allowed, tests, strict=True)):
        return "wrong"
    return "right" if sum(allowed) == sum(test["valid"] for test in tests) else "narrower"


def _allows(tables: Any, grammar: Grammar, value: Any) -> bool:
    matcher = load_llguidance().LLMatcher(tables, grammar.text, log_level=0)
    ids = tables.tokenize_str(json.dumps(value, ensure_ascii=False))
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


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
