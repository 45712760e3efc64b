"""What holds files or connections ends with its `with` block."""

from types import TracebackType
from typing import Self


class Closing:
    """Closed when the block ends, however it ends."""

    def close(self) -> None:
        """Give back what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
