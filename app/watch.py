"""Following one file's way in, and leaving it early: what a queue hands to ingest."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from ragblend.kvstore.errors import Cancelled

Phase = Literal["parsing", "embedding", "encoding"]
POLL_S = 0.05
T = TypeVar("T")


def _nobody(phase: Phase, done: int, total: int) -> None:
    """Nobody looks."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Watch:
    """phase(name, done, total) is called as a file comes in; done and total count passages (0, 0: not known), while it
    is parsed pages whose text has to be recognised.

    interrupted() says whether to leave it: asked between two passages or pages, and while a parser works.
    """

    phase: Callable[[Phase, int, int], None] = _nobody
    interrupted: Callable[[], bool] = _never

    def check(self) -> None:
        """Raises Cancelled if the file is to be left."""
        if self.interrupted():
            raise Cancelled("the file was left on request; what is done of it stays")

    def follow(
        self, phase: Phase, total: int, progress: Callable[[int, int], None]
    ) -> Callable[[int, int], None]:
        """A progress callback that also tells the phase, and leaves the work where it may be left."""
        self.check()
        self.phase(phase, 0, total)

        def both(done: int, total: int) -> None:
            progress(done, total)
            self.phase(phase, done, total)
            self.check()

        return both

    def leavable(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises. Parsers cannot be asked to stop: one that is left ends by itself, unheard."""
        if self.interrupted is _never:
            return work()
        outcome: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=run, name="ragblend-parse", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_S)
            if thread.is_alive():
                self.check()
        value, error = outcome[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
