"""Writes question files for `ragblend bench quality --data` and `ragblend tune --data`: generated, or converted.

python -m benchmarks.questions --generate ruler:multi_value,tokens=4000,n=20 --generate two_hop --out made.json
python -m benchmarks.questions --data dev-v2.0.json --format squad --out squad.json
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import tasks
from benchmarks.common import product_app, run_product_app
from benchmarks.formats import PASSAGES, convert
from ragblend.app.cli.common import Cli
from ragblend.app.quality.cli import engine_arguments
from ragblend.app.words import plural
from ragblend.kvstore.errors import UsageError

Generate = Annotated[
    list[str] | None,
    typer.Option(
        "--generate",
        help="Made-up questions with exact answers: `ruler:multi_value,tokens=4000,n=20`; `ruler` for all of its "
        "tasks, or `two_hop`. More settings: chunk, seed, items, hops, chains, depth. May be given several times.",
    ),
]
Form = Annotated[
    str | None,
    typer.Option(
        "--format", help="longbench or squad: what --data is. summary: its passages are to be summarised."
    ),
]
Data = Annotated[Path | None, typer.Option(help="A file in another format: see --format.")]


def questions(
    cli: Cli,
    out: Annotated[Path, typer.Option(help="Where they go.")],
    generate: Generate = None,
    data: Data = None,
    form: Form = None,
    passages: Annotated[
        int, typer.Option(min=1, help="A question, where the format does not say.")
    ] = PASSAGES,
) -> None:
    """Write questions in the product's format."""
    write_questions(cli, out, generate or [], data, form, passages)


def write_questions(
    cli: Cli, out: Path, generated: list[str], data: Path | None, form: str | None, passages: int = PASSAGES
) -> None:
    """As the command, for other command lines. Raises UsageError."""
    if bool(generated) == (data is not None) or bool(form) != (data is not None):
        raise UsageError("give --generate, or --data with its --format, and not both")
    entries = convert(data, form, passages) if data and form else made(cli, generated)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(entries, ensure_ascii=False, indent=1), encoding="utf-8")
    cli.note(f"wrote {plural(len(entries), 'question')} to {out}")


def made(cli: Cli, texts: list[str]) -> list[dict[str, Any]]:
    """Generate entries, with lengths counted by the model's tokenizer."""
    specs = tasks.parse_specs(texts)
    from ragblend.engine.engine import Engine  # heavy, so only after the specs were checked

    return tasks.generate(specs, Engine.open(**engine_arguments(cli)).count_tokens)


if __name__ == "__main__":
    run_product_app(product_app(questions))
