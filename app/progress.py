"""How far work is and how fast it goes, for whoever shows it; and leaving it early."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, Protocol

from ragblend.kvstore.errors import Cancelled

Stage = Literal["parse", "recognise", "embed", "encode", "digest", "measure"]
REMEMBERED = 40
SECONDS_A_MINUTE = 60.0


class OnProgress(Protocol):
    """Told how far a stage is. done and total count documents, a scan's pages, passages, parts of a summary.

    name: the file in hand.
    """

    def __call__(self, stage: Stage, done: int, total: int, name: str = "") -> None: ...


def silent(*_: object, **__: object) -> None:
    """Show nothing."""


class ProgressCounter:
    """Adds the progress of single documents up to that of the run, and leaves the work where it may be left.

    name: the file in hand; leave() says whether to leave it: asked between two passages or pages, and some times a
    second while a parser works. Cancelled is raised then.
    """

    def __init__(self, show: OnProgress, leave: Callable[[], bool] = lambda: False) -> None:
        self._show, self._leave = show, leave
        self.name = ""
        self._done, self._total = Counter[Stage](), Counter[Stage]()

    def show(self, stage: Stage, done: int, total: int) -> None:
        """How far one document is, where there is nothing to add up."""
        self._show(stage, done, total, self.name)
        self.check()

    def check(self) -> None:
        """Raises Cancelled if the file is to be left."""
        if self._leave():
            raise Cancelled("the file was left on request; what is done of it stays")

    def count(self, stage: Stage, more: int = 0, done: int = 0) -> None:
        """So much more is to be done, or is done."""
        self._total[stage] += more
        self._done[stage] += done
        self.show(stage, self._done[stage], self._total[stage])

    def within(self, stage: Stage) -> Callable[[int, int], None]:
        """The callback (done, total) for one document's share of a stage."""
        before = self._done[stage]
        return lambda done, _: self.show(stage, before + done, self._total[stage])


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
