"""`ragblend demo`: the sample documents, one question, both ways, side by side."""

from typing import TYPE_CHECKING

import typer

from ragblend.app.answer import Answer
from ragblend.app.cli_ask import sources_text
from ragblend.app.cli_common import Cli, command

if TYPE_CHECKING:
    from ragblend.app.rag import Rag
    from ragblend.app.workspace import Workspace

ROUNDS = 3
ANSWER_TOKENS = 24
SAME = "The two answers are the same."
DIFFERENT = (
    "The two answers differ: fusing computes only a part of the prompt again, so it comes close to it."
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "demo")(demo)


def demo(cli: Cli) -> None:
    """Ingest the sample documents and answer one question by full prefill and by fusion."""
    from ragblend.app import samples
    from ragblend.app.cli_progress import progress_bars
    from ragblend.app.ingest import ingest
    from ragblend.app.rag import Rag

    question = samples.questions()[0].question
    with cli.open(max_new_tokens=ANSWER_TOKENS) as workspace:
        with progress_bars() as show:
            report = ingest(workspace, [samples.documents_folder()], show)
        cli.note(
            f"Sample documents: {len(report.added)} ingested now, {len(report.unchanged)} were there already."
        )
        cli.note(f"Asking {question!r} by full prefill and by fusion, {ROUNDS} times each ...")
        full, fused = compare(Rag(workspace), question)
        text = _text(workspace, question, full, fused)
        value = {"question": question, "full": full.to_json(), "fused": fused.to_json()}
        cli.result({**value, "speedup": speedup(full, fused)}, text)


def compare(rag: "Rag", question: str) -> tuple[Answer, Answer]:
    """Both answers, each from the round with the median time to first token, after one round to warm up."""
    rag.ask(question)
    full, fused = [], []
    for _ in range(ROUNDS):  # in turn, so that a slower minute of the machine hits both
        full.append(rag.ask(question, method="full"))
        fused.append(rag.ask(question))
    return _median(full), _median(fused)


def speedup(full: Answer, fused: Answer) -> float:
    """How many times sooner the fused answer starts."""
    return round(full.ttft_ms / fused.ttft_ms, 2)


def _median(answers: list[Answer]) -> Answer:
    return sorted(answers, key=lambda answer: answer.ttft_ms)[len(answers) // 2]


def _text(workspace: "Workspace", question: str, full: Answer, fused: Answer) -> str:
    tokens = fused.report.tokens
    new = tokens.fresh + tokens.missing
    home = workspace.home.root
    verdict = SAME if full.text == fused.text else DIFFERENT
    return f"""
Question: {question}

Full prefill, first token after {full.ttft_ms:,.0f} ms:
{_indented(full.text)}
Fused ({fused.report.method}, ratio {fused.report.ratio}), first token after {fused.ttft_ms:,.0f} ms:
{_indented(fused.text)}
{verdict}
The fused one starts {speedup(full, fused):.1f} times sooner: of {tokens.prompt:,} prompt tokens,
{tokens.reused:,} came from disk as they were, {tokens.recomputed:,} were stored but computed again, {new:,} were new.
Both are medians of {ROUNDS} runs on this machine ({fused.device}), retrieval included, models loaded.
The bundled model is small (135M parameters): it shows the speed. For better answers name a larger one with --model.
{sources_text(fused)}

Next:
  ragblend ask --home {home} "your question"      ask more about the samples
  ragblend ingest PATH...                          read documents of your own
  ragblend doctor                                  check this installation
"""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()) + "\n"
