"""A device that failed: an answer of which nobody has seen a word is computed once more on an engine loaded anew.

So a request is lost neither to a lack of memory that others have given back since, nor to a device's passing fault
(RAGCache §6). Whoever has read a part of his answer is told.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from ragblend.engine.decoding.loop import OnText
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import DeviceError

T = TypeVar("T")
log = logging.getLogger("ragblend")
# What torch raises of a device, its memory, its driver; ours are RagBlendErrors.
FAILURES = (RuntimeError, MemoryError)
NOT_THE_DEVICE = (RecursionError, NotImplementedError)  # RuntimeErrors of programs, which would fail again


class Shown:
    """Passes text on, and knows whether there was any and what its receiver raised."""

    def __init__(self, on_text: OnText) -> None:
        self._on_text, self.any = on_text, False
        self.raised: BaseException | None = None

    def __call__(self, text: str) -> None:
        self.any = True
        try:
            self._on_text(text)
        except BaseException as error:
            self.raised = error
            raise


def twice(
    runtime: Runtime,
    work: Callable[[OnText | None], T],
    on_text: OnText | None,
    cancel: Cancel | None = None,
) -> T:
    """What `work` gives, at the second time where the device failed before any text was shown. Raises DeviceError."""
    before, shown = runtime.loaded_ref, Shown(on_text) if on_text is not None else None
    try:
        return work(shown)
    except FAILURES as error:
        _reraise(error, shown)
        said = _said(error)
    log.warning("the device failed (%s); the model is loaded again, and the prompt read once more", said)
    runtime.rebuild(before or runtime.loaded_ref, cancel)
    try:
        return work(shown)
    except FAILURES as error:
        _reraise(error, shown)
        log.error("the device failed again (%s)", _said(error))
        raise DeviceError(
            f"the device failed twice ({type(error).__name__}). What is stored is kept. Where memory is short: fewer "
            "or shorter passages, a smaller model, or --device cpu"
        ) from error


def _reraise(error: BaseException, shown: Shown | None) -> None:
    """What the receiver of the text raised is his, a program's fault nobody's device's; and what somebody has read
    cannot be begun again.
    """
    if (shown is not None and error is shown.raised) or isinstance(error, NOT_THE_DEVICE):
        raise error
    if shown is not None and shown.any:
        raise DeviceError(
            f"the device failed in the middle of an answer ({type(error).__name__}); ask again"
        ) from error


def _said(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first:.200}" if first else type(error).__name__
