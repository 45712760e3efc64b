"""`ragblend demo`: answer one question about the sample documents by full prefill and by fusion, side by side."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ragblend.app.answering.answer import Answer
from ragblend.app.cli.ask import sources_text
from ragblend.app.cli.common import Cli

if TYPE_CHECKING:
    from ragblend.app.answering.conversation import Conversations
    from ragblend.app.workspace import Workspace

ROUNDS = 3
ANSWER_TOKENS = 24
SAME_ANSWERS = "The two answers are the same."
DIFFERENT_ANSWERS = (
    "The two answers differ: fusing recomputes only a part of the prompt, so its result is close, not equal."
)


def demo(cli: Cli) -> None:
    """Ingest the sample documents and answer one question by full prefill and by fusion."""
    from ragblend.app import samples
    from ragblend.app.answering.conversation import Conversations
    from ragblend.app.cli.bars import progress_bars
    from ragblend.app.library.ingest import ingest

    question = samples.questions()[0].question
    with cli.open(max_new_tokens=ANSWER_TOKENS) as workspace:
        workspace.check_engine()
        with progress_bars(cli.terminal) as show:
            report = ingest(workspace, [samples.documents_folder()], show)
        if report.interrupted:
            raise KeyboardInterrupt
        cli.note(
            f"Sample documents: {len(report.added)} ingested now, {len(report.unchanged)} were there already."
        )
        cli.note(f"Asking {question!r} by full prefill and by fusion, {ROUNDS} times each ...")
        full, fused = compare(Conversations(workspace.workspaces), question)
        text = _comparison_text(workspace, question, full, fused)
        value = {"question": question, "full": full.to_json(), "fused": fused.to_json()}
        cli.result({**value, "speedup": speedup(full, fused)}, text)


def compare(conversations: "Conversations", question: str) -> tuple[Answer, Answer]:
    """The answer by full prefill and the fused one, each with its median time to first token, after a warm-up."""
    from ragblend.app.answering.conversation import AskOptions

    fused_options, full_options = AskOptions(), AskOptions(method="full")
    conversations.warm_up()
    conversations.answer(question, fused_options).whole()
    full, fused = [], []
    for _ in range(ROUNDS):  # alternating, so that a slower minute of the machine affects both
        full.append(conversations.answer(question, full_options).whole())
        fused.append(conversations.answer(question, fused_options).whole())
    full_median, fused_median = (
        sorted(each, key=lambda answer: answer.ttft_ms)[ROUNDS // 2] for each in (full, fused)
    )
    return full_median, fused_median


def speedup(full: Answer, fused: Answer) -> float:
    return round(full.ttft_ms / fused.ttft_ms, 2)


def _comparison_text(workspace: "Workspace", question: str, full: Answer, fused: Answer) -> str:
    tokens = fused.report.tokens
    computed = tokens.fresh + tokens.missing + tokens.not_loaded
    home = workspace.home.root
    ratio = "" if fused.report.ratio is None else f", ratio {fused.report.ratio:.2f}"
    note = workspace.settings.style.note
    verdict = SAME_ANSWERS if full.text == fused.text else DIFFERENT_ANSWERS
    return f"""
Question: {question}

Full prefill, first token after {full.ttft_ms:,.0f} ms:
{_indented(full)}
Fused ({fused.report.method}{ratio}), first token after {fused.ttft_ms:,.0f} ms:
{_indented(fused)}
{verdict}
The fused one starts {speedup(full, fused):.1f} times faster: of {tokens.prompt:,} prompt tokens,
{tokens.reused:,} came from disk and were not computed, {tokens.recomputed:,} were recomputed, {computed:,} were new.
Both are medians of {ROUNDS} runs on this machine ({fused.device}), retrieval included, models loaded.
{note}
{sources_text(fused.sources)}

Next:
{_next_steps(home)}
"""


def _next_steps(home: Path) -> str:
    program = _program()
    steps = {
        f'{program} ask --home {home} "your question"': "ask more about the samples",
        f"{program} ingest PATH...": "read documents of your own",
        f"{program} doctor": "check this installation",
    }
    if find_spec("gradio"):
        steps = {f"{program} ui --home {home}": "open the page over the samples"} | steps
    width = max(map(len, steps))
    return "\n".join(f"  {step:{width}}  {what}" for step, what in steps.items())


def _program() -> str:
    """How to start this program: by its name if the shell finds it, else by its path."""
    script = Path(sys.executable).parent / "ragblend"
    if not script.exists() or shutil.which("ragblend") == str(script):
        return "ragblend"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def _indented(answer: Answer) -> str:
    from ragblend.app.answering.citations import with_marks

    lines = with_marks(answer.text, answer.sources).strip().splitlines()
    return "\n".join(f"  {line}" for line in lines) + "\n"
