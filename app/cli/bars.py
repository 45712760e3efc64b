"""Progress bars on stderr: for documents, embeddings, KV encoding, and downloads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ragblend.app.cli.common import Cli, Terminal
from ragblend.app.progress import OnProgress, Stage
from ragblend.app.words import plural, size

if TYPE_CHECKING:
    from ragblend.app.library.encoding import KvProgress

LABELS: dict[Stage, str] = {
    "parse": "Documents",
    "recognise": "Pages",
    "embed": "Embedding",
    "encode": "Encoding KV",
    "digest": "Summarising",
    "measure": "Measuring",
}
PREPARING = {
    "converting": "The model is being converted for its first use: seconds for a small one, else minutes ...",
    "loading": "Loading the model ...",
}


@contextmanager
def progress_bars(terminal: Terminal) -> Iterator[OnProgress]:
    """One bar per stage, drawn only on a terminal; yields a callback (stage, done, total, file)."""
    with _bars(terminal) as bars:
        tasks = {
            stage: bars.add_task(f"{label:<11}", total=None, visible=False, name="")
            for stage, label in LABELS.items()
        }

        def show(stage: Stage, done: int, total: int, name: str = "") -> None:
            bars.update(tasks[stage], completed=done, total=total, visible=total > 0, name=name)

        yield show


@contextmanager
def encoding_bar(cli: Cli) -> Iterator[Callable[["KvProgress"], None]]:
    """A bar for encoding KV, with speed and remaining time; each phase is noted once. Yields its callback."""
    with _bars(cli.terminal) as bars:
        task = bars.add_task(f"{LABELS['encode']:<11}", total=None, visible=False, name="")
        noted: set[str] = set()

        def show(kv: "KvProgress") -> None:
            if kv.phase not in noted:
                noted.add(kv.phase)
                cli.note(PREPARING.get(kv.phase) or _encoding_note(kv))
            if kv.phase == "encoding":
                speed = f"{kv.tokens_per_s:,.0f} tokens/s" if kv.tokens_per_s else ""
                name = f"{speed}  {kv.document.rpartition('/')[2]}"
                bars.update(task, completed=kv.done, total=kv.total, visible=True, name=name)

        yield show


def _encoding_note(kv: "KvProgress") -> str:
    """How much disk the KV needs, and how much the budget has left."""
    fits = kv.nbytes <= kv.room_bytes
    room = "all of it fits" if fits else f"the first {kv.room_bytes / kv.nbytes:.0%} fit"
    return (
        f"Encoding KV for {plural(kv.total, 'passage')} ({kv.tokens:,} tokens): it needs {size(kv.nbytes)} of disk, "
        f"the budget has {size(kv.room_bytes)} left; {room}. Questions can be asked meanwhile; Ctrl-C keeps what is "
        "done."
    )


@contextmanager
def progress_bar(what: str, of_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """One bar; yields a callback (done, total)."""
    with _bars(Terminal(), of_bytes) as bars:
        task = bars.add_task(what, total=None, name="")
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def _bars(terminal: Terminal, of_bytes: bool = False) -> Iterator[Any]:
    """Bars with counts and remaining time; `name` is shown after them."""
    from rich import progress
    from rich.console import Console

    counts: list[Any] = [progress.MofNCompleteColumn()]
    if of_bytes:
        counts = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *counts,
        progress.TimeRemainingColumn(elapsed_when_finished=not of_bytes),
        progress.TextColumn("{task.fields[name]}", markup=False),
    )
    console = Console(stderr=True)
    if terminal.environment is not None:
        console = Console(file=terminal.err, _environ=terminal.environment)
    # A bench's steps differ in length (full prefill against reuse), so speed is averaged over some minutes.
    with progress.Progress(
        *columns,
        console=console,
        redirect_stdout=False,
        redirect_stderr=False,
        speed_estimate_period=30 if of_bytes else 300,
    ) as bars:
        yield bars
