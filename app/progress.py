"""Progress of long work: stages, counts, pace, and cancelling it early."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, Protocol

from ragblend.kvstore.errors import Cancelled

Stage = Literal["parse", "recognise", "embed", "encode", "digest", "measure"]
PIECES_REMEMBERED = 40
SECONDS_A_MINUTE = 60.0


class OnProgress(Protocol):
    """A callback with the progress of a stage. done and total count documents, pages, passages or parts of a summary.

    name: the current file.
    """

    def __call__(self, stage: Stage, done: int, total: int, name: str = "") -> None: ...


def silent(*_: object, **__: object) -> None:
    """A progress callback that shows nothing."""


class ProgressCounter:
    """Adds the progress of single documents to that of the run, and raises Cancelled when the work is cancelled.

    name: the current file; is_cancelled() is called between two passages or pages, and several times a second while a
    parser works.
    """

    def __init__(self, show: OnProgress, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        self._show, self._is_cancelled = show, is_cancelled
        self.name = ""
        self._done, self._total = Counter[Stage](), Counter[Stage]()

    def show(self, stage: Stage, done: int, total: int) -> None:
        """Show the progress of one document, without adding it up. Raises Cancelled."""
        self._show(stage, done, total, self.name)
        self.check()

    def check(self) -> None:
        """Raise Cancelled if the work is cancelled."""
        if self._is_cancelled():
            raise Cancelled("the file was cancelled; what is done of it is kept")

    def count(self, stage: Stage, more: int = 0, done: int = 0) -> None:
        """Add `more` to the total of a stage and `done` to its finished part, and show both sums."""
        self._total[stage] += more
        self._done[stage] += done
        self.show(stage, self._done[stage], self._total[stage])

    def within(self, stage: Stage) -> Callable[[int, int], None]:
        """A callback (done, total) that adds one document's progress to what the stage has already done."""
        before = self._done[stage]
        return lambda done, _: self.show(stage, before + done, self._total[stage])


class Pace:
    """The speed of the last pieces of work (files, or passages by their tokens); pauses are not counted."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, float]] = deque(maxlen=PIECES_REMEMBERED)

    def add(self, seconds: float, amount: float = 1.0) -> None:
        """Record one piece of work. amount: 1 for a file, else its tokens."""
        self._done.append((seconds, amount))

    @property
    def per_second(self) -> float | None:
        """The amount of work per second; None before the first piece."""
        seconds = sum(each for each, _ in self._done)
        return sum(amount for _, amount in self._done) / seconds if seconds > 0 else None

    @property
    def files_per_minute(self) -> float | None:
        return self.per_second * SECONDS_A_MINUTE if self.per_second else None

    def seconds_left(self, amount: float) -> float | None:
        """Seconds for that amount at this pace; None before the first piece."""
        if amount == 0:
            return 0.0
        return amount / self.per_second if self.per_second else None
