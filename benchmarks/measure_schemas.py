"""Measures how well answers can be held to the JSON schemas of the public test suite.

    pip download --no-deps --no-binary jsonschema jsonschema==4.25.1 && tar xf jsonschema-4.25.1.tar.gz
    python -m benchmarks.measure_schemas --suite jsonschema-4.25.1/json/tests/draft2020-12 --home HOME

The suite's `optional` and `optional/format` are folders of their own; formats that we do not enforce are left out. A
schema is refused before the first token, or its grammar is checked with the suite's values. Wrong: it allows an invalid
one. Narrower: it allows no invalid one, and not all valid ones (another order of keys, keys that the schema does not
name).
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import Home, Model, markdown_table, open_engine, run
from ragblend.engine.decoding import grammar
from ragblend.engine.decoding.constrained import token_grammars
from ragblend.engine.decoding.grammar import json_grammar, load_llguidance
from ragblend.kvstore.errors import UsageError

OUTCOMES = ("right", "narrower", "wrong", "refused")
Allows = Callable[[str], bool]  # whether this can be the whole answer


def main(
    suite: Annotated[Path, typer.Option(help="The folder of one draft's JSON files.")],
    home: Home,
    model: Model = "default",
) -> None:
    """Print a table by keyword."""
    with open_engine(model, home) as engine:
        tokenizer = engine.tokenizer
        tables = token_grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        rows, total = list[list[str]](), Counter[str]()
        for keyword, cases in cases_of(suite):
            found = Counter(_outcome(tables, case["schema"], case["tests"]) for case in cases)
            rows.append([keyword, *(str(found[each]) for each in OUTCOMES)])
            total += found
    print(markdown_table(["keyword", *OUTCOMES], [*rows, ["all", *(str(total[each]) for each in OUTCOMES)]]))


def cases_of(suite: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each keyword's schemas, with valid and invalid values."""
    for file in sorted(suite.glob("*.json")):
        if suite.name != "format" or file.stem in grammar.FORMATS:
            yield file.stem, json.loads(file.read_text())


def _outcome(tables: Any, schema: Any, tests: list[dict[str, Any]]) -> str:
    try:
        allows = _acceptor(tables, schema)
    except UsageError as error:
        print(f"{json.dumps(schema)}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return "refused"
    allowed = [allows(json.dumps(test["data"], ensure_ascii=False)) for test in tests]
    if any(is_allowed and not test["valid"] for is_allowed, test in zip(allowed, tests, strict=True)):
        return "wrong"
    return "right" if sum(allowed) == sum(test["valid"] for test in tests) else "narrower"


def _acceptor(tables: Any, schema: Any) -> Allows:
    schema_grammar = json_grammar(schema)

    def allows(text: str) -> bool:
        matcher = load_llguidance().LLMatcher(tables, schema_grammar.text, log_level=0)
        ids = tables.tokenize_str(text)
        return bool(
            matcher.validate_tokens(ids) == len(ids)
            and matcher.consume_tokens(ids)
            and matcher.is_accepting()
        )

    return allows


if __name__ == "__main__":
    run(main, __doc__)
