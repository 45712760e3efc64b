"""How far work is and how fast it goes, for whoever shows it; and leaving it early."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from ragblend.kvstore.errors import Cancelled

Stage = Literal["parse", "recognise", "embed", "encode", "measure"]
REMEMBERED = 40
SECONDS_A_MINUTE = 60.0


class OnProgress(Protocol):
    """Told how far a stage is. done and total count documents, a scan's pages, passages; name: the file in hand."""

    def __call__(self, stage: Stage, done: int, total: int, name: str = "") -> None: ...


def silent(*_: object, **__: object) -> None:
    """Show nothing."""


class Meter:
    """Adds the progress of single documents up to that of the run, and leaves the work where it may be left.

    name: the file in hand; leave() says whether to leave it: asked between two passages or pages, and some times a
    second while a parser works. Cancelled is raised then.
    """

    def __init__(self, show: OnProgress = silent, leave: Callable[[], bool] | None = None) -> None:
        self._show, self._leave = show, leave
        self.name = ""
        self._done: dict[Stage, int] = {"parse": 0, "embed": 0}
        self._total: dict[Stage, int] = {"parse": 0, "embed": 0}

    def show(self, stage: Stage, done: int, total: int) -> None:
        """How far one document is, where there is nothing to add up."""
        self._show(stage, done, total, self.name)
        self.check()

    def check(self) -> None:
        """Raises Cancelled if the file is to be left."""
        if self._leave is not None and self._leave():
            raise Cancelled("the file was left on request; what is done of it stays")

    def expect(self, stage: Stage, count: int) -> None:
        """So much more is to be done."""
        self._total[stage] += count
        self.show(stage, self._done[stage], self._total[stage])

    def add(self, stage: Stage, count: int) -> None:
        """So much more is done."""
        self._done[stage] += count
        self.show(stage, self._done[stage], self._total[stage])

    @contextmanager
    def stage(self, stage: Stage, count: int) -> Iterator[Callable[[int, int], None]]:
        """One document's share of a stage; gives the callback (done, total) for it."""
        self.expect(stage, count)
        before = self._done[stage]

        def progress(done: int, total: int) -> None:
            self.show(stage, before + done, self._total[stage])

        yield progress
        self.add(stage, count)


class Pace:
    """Fed with how long each piece took (a file, a passage's tokens); pauses do not count: nothing is fed then."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float, amount: float = 1.0) -> None:
        """So much more was done, in that time."""
        self._done.append((seconds, amount))

    @property
    def per_second(self) -> float | None:
        """None before the first piece."""
        seconds = sum(each for each, _ in self._done)
        return sum(amount for _, amount in self._done) / seconds if seconds > 0 else None

    @property
    def files_per_minute(self) -> float | None:
        return self.per_second * SECONDS_A_MINUTE if self.per_second else None

    def seconds_left(self, amount: float) -> float | None:
        """For so much more like the last pieces; None before the first."""
        if amount == 0:
            return 0.0
        return amount / self.per_second if self.per_second else None
