"""How fast files come in, and how long the rest will take: from the last ones that were worked on."""

from collections import deque

REMEMBERED = 40
SECONDS_A_MINUTE = 60.0


class Pace:
    """Fed with how long each file took; pauses do not count, as nothing is fed meanwhile."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        """One more file took that long."""
        self._seconds.append(seconds)

    @property
    def files_per_minute(self) -> float | None:
        """None before the first file."""
        total = sum(self._seconds)
        return len(self._seconds) * SECONDS_A_MINUTE / total if total > 0 else None

    def seconds_left(self, files: int) -> float | None:
        """For so many more files like the last ones; None before the first."""
        speed = self.files_per_minute
        if files == 0:
            return 0.0
        return files * SECONDS_A_MINUTE / speed if speed else None
