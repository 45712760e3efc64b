"""Retries a request on a reloaded model after its device failed, unless part of the answer was shown.

So a temporary lack of memory or device fault loses no request (RAGCache §6).
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from ragblend.engine.results import OnText
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import DeviceError

T = TypeVar("T")
C = TypeVar("C", bound=Cancel)
log = logging.getLogger("ragblend")
# Errors that torch raises for a device, its memory or driver; our own are RagBlendErrors.
FAILURES = (RuntimeError, MemoryError)
NOT_THE_DEVICE = (RecursionError, NotImplementedError)  # RuntimeErrors caused by bugs, which would fail again


class _TextWatcher:
    """Passes text on to `on_text`, and records whether there was any, and the error that `on_text` raised."""

    def __init__(self, on_text: OnText) -> None:
        self._on_text, self.has_text = on_text, False
        self.raised: BaseException | None = None

    def __call__(self, text: str) -> None:
        self.has_text = True
        try:
            self._on_text(text)
        except BaseException as error:
            self.raised = error
            raise


def retry_after_device_failure(
    runtime: Runtime,
    work: Callable[[OnText | None, C | None], T],
    on_text: OnText | None = None,
    cancel: C | None = None,
) -> T:
    """Run `work(on_text, cancel)`, and again if the device failed before any text. Raises DeviceError."""
    before, watcher = runtime.loaded_ref, _TextWatcher(on_text) if on_text is not None else None
    try:
        return work(watcher, cancel)
    except FAILURES as error:
        _check_retry(error, watcher)
        summary = _summary(error)
    log.warning("the device failed (%s); the model is reloaded, and the request repeated", summary)
    runtime.rebuild(before or runtime.loaded_ref, cancel)
    try:
        return work(watcher, cancel)
    except FAILURES as error:
        _check_retry(error, watcher)
        log.error("the device failed again (%s)", _summary(error))
        raise DeviceError(
            f"the device failed twice ({type(error).__name__}). Stored KV is kept. If memory is short, use fewer or "
            "shorter passages, a smaller model, or --device cpu"
        ) from error


def _check_retry(error: BaseException, watcher: _TextWatcher | None) -> None:
    """Raise the error if `on_text` or a bug caused it, and not the device; DeviceError if text was shown."""
    if (watcher is not None and error is watcher.raised) or isinstance(error, NOT_THE_DEVICE):
        raise error
    if watcher is not None and watcher.has_text:
        raise DeviceError(
            f"the device failed in the middle of an answer ({type(error).__name__}); ask again"
        ) from error


def _summary(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first:.200}" if first else type(error).__name__
