"""Progress bars on stderr: documents read, passages embedded, passages encoded, a model's bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragblend.app.progress import OnProgress, Stage

LABELS: dict[Stage, str] = {
    "parse": "Documents",
    "recognise": "Scans",
    "embed": "Embedding",
    "encode": "Encoding KV",
    "measure": "Measuring",
}


@contextmanager
def progress_bars() -> Iterator[OnProgress]:
    """Three bars, drawn only where a person is watching; gives what to call with (stage, done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<11}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False
    ) as bars:
        tasks = {stage: bars.add_task(label, total=None, visible=False) for stage, label in LABELS.items()}

        def show(stage: Stage, done: int, total: int) -> None:
            bars.update(tasks[stage], completed=done, total=total, visible=total > 0)

        yield show


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """One bar of bytes; gives what to call with (done, total)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
