"""A hub model on its way here, in a thread of its own, so that whoever asked for it can watch and stop it."""

import threading
import time

from ragblend.engine.hub import download, is_hub_id, local_copy
from ragblend.kvstore.errors import DownloadStoppedError


def must_be_fetched(model: str) -> bool:
    """Whether a model's name in the settings is a hub id of which no whole copy is here."""
    return model != "default" and is_hub_id(model) and local_copy(model) is None


class ModelDownload:
    """Begins at once. done, total: bytes, 0 until the hub has answered."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.total = name, 0, 0
        self._begun = time.monotonic()
        self._stop, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="model download", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, after at most so long. Raises what ended it: ModelNotFoundError, DownloadStoppedError.

        Who stops it need not wait for the thread, which ends with its next bytes, or the network's own time limit.
        """
        if not self._over.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End it; what has come is kept for the next time."""
        self._stop.set()
        if not self._over.is_set():
            self._error = DownloadStoppedError(
                f"The download of {self.name} was stopped; what has come is kept for the next time."
            )
            self._over.set()

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None before there is one."""
        passed = time.monotonic() - self._begun
        return (self.total - self.done) * passed / self.done if self.done else None

    def _run(self) -> None:
        def progress(done: int, total: int) -> None:
            self.done, self.total = done, total

        try:
            download(self.name, progress, self._stop)
        except Exception as error:  # of any kind: what is not here must not pass for a model that is
            self._error = self._error or error
        finally:
            self._over.set()
