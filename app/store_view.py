"""The store's numbers for a page that stays open: now, and how often a passage was found over time."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragblend.kvstore.uses import StoreStats

MOST_SAMPLES = 500


@dataclass(frozen=True)
class Sample:
    """What this process had asked for and found by then. at_s: of a monotonic clock."""

    at_s: float
    hits: int
    misses: int


class StoreHistory:
    """Samples of a store's counts, the last few hundred, one for each change. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._mutex = clock, threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def note(self, stats: "StoreStats") -> None:
        """Keep the counts if anything was asked for since the last time."""
        with self._mutex:
            last = self._samples[-1] if self._samples else None
            if last is None or (last.hits, last.misses) != (stats.hits, stats.misses):
                self._samples.append(Sample(self._clock(), stats.hits, stats.misses))

    @property
    def samples(self) -> tuple[Sample, ...]:
        with self._mutex:
            return tuple(self._samples)
