"""Speculative prefill: prefills a prompt before retrieval has ended, although it may not be the final one.

RAGCache (arXiv 2404.12457) §5.3, Algorithm 2: the prompt of the passages found so far is prefilled if the device is
idle, continued while later stages find the same passages, and otherwise dropped at the end of a layer. The result is a
prefill of exactly the last prompt, or none.
"""

import logging
import threading
from contextlib import suppress

from ragblend.engine.prefill import prefill
from ragblend.engine.request import Request, claim_of
from ragblend.engine.results import Prefilled
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.files import Closing

log = logging.getLogger("ragblend")


class Speculation(Closing):
    """For one answer, in one thread: `offer` each request as it comes, then `take_result` for the last one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._running: _PrefillThread | None = None

    def offer(self, request: Request) -> None:
        """Start to prefill the prompt if the model is loaded and the device is free; drops the prefill of another
        prompt.
        """
        if self._running is not None and self._running.request == request:
            return
        self.close()
        if self._runtime.loaded_now is not None and not self._runtime.queue.request_count:
            self._running = _PrefillThread(self._runtime, request)

    def take_result(self, cancel: Cancel | None) -> Prefilled | None:
        """Wait for the last prompt's prefill and return it, once; None if it did not begin, or was stopped by another
        request or `cancel`.
        """
        running, self._running = self._running, None
        return None if running is None else running.result(cancel)

    def close(self) -> None:
        """Drop the prefill, and wait until it has left the device."""
        if self._running is not None:
            self._running.drop()
        self._running = None


class _PrefillThread:
    """A prefill in its own thread. It stops for any other request, unless `result` waits for it."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self.request, self._runtime = request, runtime
        self._is_awaited = self._is_cancelled = False
        self._cancel: Cancel | None = None
        self._prefilled: Prefilled | None = None
        self._thread = threading.Thread(target=self._prefill, name="ragblend-speculation", daemon=True)
        self._thread.start()

    def is_set(self) -> bool:
        """Whether to stop: this object is the cancel token for the queue and the layers."""
        cancelled = self._is_cancelled or (self._cancel is not None and self._cancel.is_set())
        return cancelled or (self._runtime.queue.has_waiting and not self._is_awaited)

    def drop(self) -> None:
        self._is_cancelled = True
        self._thread.join()

    def result(self, cancel: Cancel | None) -> Prefilled | None:
        self._cancel, self._is_awaited = cancel, True
        self._thread.join()
        return self._prefilled

    def _prefill(self) -> None:
        try:
            claim = claim_of(self._runtime, self.request)
            with suppress(Cancelled), self._runtime.queue.turn(self, claim=claim) as turn:
                self._prefilled = prefill(self._runtime, self.request, turn, answering=True)
        except Exception:  # it is raised again when the final prompt is prefilled
            log.info(
                "speculative prefill failed; the final prompt is prefilled when it is known", exc_info=True
            )
