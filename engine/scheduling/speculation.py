"""Reading a prompt before it is known to be the right one, while a slow retrieval goes on.

RAGCache (arXiv 2404.12457) §5.3, Algorithm 2: what retrieval has found so far is read if nobody needs the device, goes
on while the next stages find the same, and is dropped at a layer's end when one does not. Kept is a prefill of exactly
the last prompt, or nothing.
"""

import logging
import math
import threading
from contextlib import suppress

from ragblend.engine.prefill import Request, claim_of, prefill
from ragblend.engine.results import Prefilled
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.files import Closing

log = logging.getLogger("ragblend")


class Speculation(Closing):
    """Of one request, by one thread: `offer` each prompt as it comes, then `settle` for the last one."""

    def __init__(self, runtime: Runtime, client: str) -> None:
        self._runtime, self._client = runtime, client
        self._reading: _Reading | None = None

    def offer(self, request: Request) -> None:
        """Begin to read it if the model is here and nobody has the device; what was begun of another one is dropped."""
        if self._reading is not None and self._reading.request == request:
            return
        self.close()
        if self._runtime.loaded_now is not None and not self._runtime.queue.inside:
            self._reading = _Reading(self._runtime, request, self._client)

    def settle(self, cancel: Cancel | None) -> Prefilled | None:
        """The last prompt, read, when it is; None where it was not begun, or was left for somebody else or by `cancel`.
        Once.
        """
        reading, self._reading = self._reading, None
        return None if reading is None else reading.result(cancel)

    def close(self) -> None:
        """Drop what was begun, and wait until the device is free of it."""
        if self._reading is not None:
            self._reading.drop()
        self._reading = None


class _Reading:
    """A prefill on its way, in a thread of its own. Until its result is asked for it is left for whoever comes."""

    def __init__(self, runtime: Runtime, request: Request, client: str) -> None:
        self.request, self._runtime = request, runtime
        self._is_wanted = self._is_dropped = False
        self._cancel: Cancel | None = None
        self._prefilled: Prefilled | None = None
        self._thread = threading.Thread(
            target=self._read, args=(client,), name="ragblend-speculation", daemon=True
        )
        self._thread.start()

    def is_set(self) -> bool:
        """Whether to leave it: what the queue and each layer ask."""
        left = self._is_dropped or (self._cancel is not None and self._cancel.is_set())
        return left or (self._runtime.queue.wanted and not self._is_wanted)

    def drop(self) -> None:
        self._is_dropped = True
        self._thread.join()

    def result(self, cancel: Cancel | None) -> Prefilled | None:
        self._cancel, self._is_wanted = cancel, True
        self._thread.join()
        return self._prefilled

    def _read(self, client: str) -> None:
        try:
            claim = claim_of(self._runtime, self.request, client, math.inf)
            with suppress(Cancelled), self._runtime.queue.turn(self, claim=claim) as turn:
                self._prefilled = prefill(self._runtime, self.request, turn, answering=True)
        except Exception:  # whoever reads the prompt in earnest meets it again
            log.info("reading ahead failed; the prompt is read when it is known", exc_info=True)
