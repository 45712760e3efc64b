"""How far a run is, for whoever shows it: three stages, each with a total that grows as documents are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Stage = Literal["parse", "recognise", "embed", "encode", "measure"]
OnProgress = Callable[
    [Stage, int, int], None
]  # stage, done, total: documents, a scan's pages, passages, passages


def silent(stage: Stage, done: int, total: int) -> None:
    """Show nothing."""


class Meter:
    """Adds the progress of single documents up to that of the run."""

    def __init__(self, show: OnProgress) -> None:
        self._show = show
        self._done: dict[Stage, int] = {"parse": 0, "embed": 0, "encode": 0}
        self._total: dict[Stage, int] = {"parse": 0, "embed": 0, "encode": 0}

    def show(self, stage: Stage, done: int, total: int) -> None:
        """How far one document is, where there is nothing to add up."""
        self._show(stage, done, total)

    def expect(self, stage: Stage, count: int) -> None:
        """So much more is to be done."""
        self._total[stage] += count
        self._show(stage, self._done[stage], self._total[stage])

    def add(self, stage: Stage, count: int) -> None:
        """So much more is done."""
        self._done[stage] += count
        self._show(stage, self._done[stage], self._total[stage])

    @contextmanager
    def stage(self, stage: Stage, count: int) -> Iterator[Callable[[int, int], None]]:
        """One document's share of a stage; gives the callback (done, total) for it."""
        self.expect(stage, count)
        before = self._done[stage]

        def progress(done: int, total: int) -> None:
            self._show(stage, before + done, self._total[stage])

        yield progress
        self.add(stage, count)
