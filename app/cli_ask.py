"""`ragblend ask` and `ragblend chat`: questions, answers as they come, sources, times."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ragblend.app.answer import Answer
from ragblend.app.cli_common import Cli, command
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO


def ratio_of(text: str) -> float | str:
    """A number, or a word for the settings to judge."""
    try:
        return float(text)
    except ValueError:
        return text


Method = Annotated[
    str | None, typer.Option(help=f"How to prefill: full, reuse, cacheblend, ... [{DEFAULT_METHOD}].")
]
Ratio = Annotated[
    str | None,
    typer.Option(
        help=f"Share of the stored tokens to compute again, or `auto`: what loading hides [{DEFAULT_RATIO}].",
        parser=ratio_of,
    ),
]
TopK = Annotated[int | None, typer.Option(help="How many passages to read [6].")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Longest answer, in tokens [256].")]
KeepTokens = Annotated[
    int | None,
    typer.Option(help="Of the passages keep so many tokens a head after the first token [all]."),
]
Temperature = Annotated[
    float | None, typer.Option(help="0 for the likeliest answer, higher for variety [0].")
]
Collection = Annotated[str | None, typer.Option(help="Which collection to ask.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write what was loaded and computed when: .json (ui.perfetto.dev) or .png."),
]
REMEMBERED_TURNS = 3


def register(app: typer.Typer) -> None:
    """Add both commands."""
    command(app, "ask")(ask)
    command(app, "chat")(chat)


def ask(
    cli: Cli,
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    method: Method = None,
    ratio: Ratio = None,
    top_k: TopK = None,
    max_new_tokens: MaxNewTokens = None,
    keep_tokens: KeepTokens = None,
    temperature: Temperature = None,
    collection: Collection = None,
    trace: Trace = None,
) -> None:
    """Answer a question from the ingested documents; the answer is printed as it comes."""
    from ragblend.app.rag import Rag
    from ragblend.app.timeline import check_timeline

    if trace is not None:
        check_timeline(trace)
    changes = {
        "method": method,
        "ratio": ratio,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "keep_tokens": keep_tokens,
        "temperature": temperature,
    }
    with cli.open(**changes, collection=collection) as workspace:
        answer = _stream(cli, Rag(workspace), question, ())
        cli.result(answer.to_json(), sources_text(answer))
        if trace is not None:
            _write_trace(cli, answer, trace)
        _keep_missing(cli, workspace.engine, answer)


def chat(
    cli: Cli,
    method: Method = None,
    ratio: Ratio = None,
    top_k: TopK = None,
    max_new_tokens: MaxNewTokens = None,
    keep_tokens: KeepTokens = None,
    temperature: Temperature = None,
    collection: Collection = None,
) -> None:
    """Ask one question after another in the terminal; an empty line or Ctrl-D ends it. Nothing is kept.

    With --json: one object an answer.
    """
    from ragblend.app.rag import Rag

    changes = {
        "method": method,
        "ratio": ratio,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "keep_tokens": keep_tokens,
        "temperature": temperature,
    }
    turns: list[tuple[str, str]] = []
    with cli.open(**changes, collection=collection) as workspace:
        rag = Rag(workspace)
        while question := _read_question():
            answer = _stream(cli, rag, question, turns[-REMEMBERED_TURNS:])
            cli.result(answer.to_json(), sources_text(answer))
            turns.append((question, answer.text))


def sources_text(answer: Answer) -> str:
    """The sources, numbered, a line each."""
    lines = (f"  [{n}] {source_line(source)}" for n, source in enumerate(answer.sources, start=1))
    return "\n".join(["", "Sources:", *lines])


def source_line(source: Any) -> str:
    """Where a passage is from: document, place, similarity."""
    place = f", {source.location}" if source.location else ""
    return f"{source.document}{place} ({source.score:.2f})"


def timing_line(answer: Answer) -> str:
    """What the answer cost, for people."""
    report = answer.report
    tokens = report.tokens
    return (
        f"{report.method}: first token after {answer.ttft_ms:.0f} ms; of {tokens.prompt} prompt tokens "
        f"{tokens.reused} reused, {tokens.recomputed} recomputed, {tokens.fresh + tokens.missing} fresh; "
        f"{report.timings.tokens_per_s:.1f} tokens/s"
    )


def _stream(cli: Cli, rag: Any, question: str, history: Any) -> Answer:
    """The answer; printed piece by piece unless it is for a program."""
    with rag.stream(question, history=history) as stream:
        for piece in stream:
            if not cli.json:
                print(piece, end="", file=cli.out, flush=True)
        answer: Answer = stream.answer
    if not cli.json:
        print(file=cli.out)
    for line in (answer.notice, timing_line(answer)):
        if line:
            cli.note(line)
    return answer


def _write_trace(cli: Cli, answer: Answer, path: Path) -> None:
    from ragblend.app.timeline import write_timeline

    if answer.report.trace is None:
        cli.note(f"No trace was written: {answer.report.warning}")
        return
    write_timeline(answer.report.trace, f"{answer.model}, {timing_line(answer)}", path)
    cli.note(f"What was done when: {path}")


def _keep_missing(cli: Cli, engine: Any, answer: Answer) -> None:
    """Passages whose KV was missing are encoded in the background; a process that ends at once would lose that."""
    if answer.report.misses:
        cli.note(f"Encoding {answer.report.misses} passages for the next question (Ctrl-C skips it) ...")
        engine.finish_background()


def _read_question() -> str:
    try:
        print("\n> ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        return ""
