"""Triton kernels for CUDA devices. Each has an equivalent in plain torch, which is used if Triton is absent or fails.

Triton comes with torch for CUDA. Its interpreter (TRITON_INTERPRET=1) runs the same kernels on a CPU, for tests.
"""

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import util
from typing import Any

import torch

log = logging.getLogger("ragblend")


@functools.cache
def available(device: torch.device) -> bool:
    """Whether Triton's kernels run there: on CUDA, or on a CPU if Triton's interpreter is on (then only there)."""
    if device.type not in ("cpu", "cuda") or util.find_spec("triton") is None:
        return False
    try:
        from triton import knobs
    except ImportError:  # before 3.4, or broken
        return False
    return bool(knobs.runtime.interpret) == (device.type == "cpu")


def passes_self_test(check: Callable[[], float], what: str, allowed: float) -> bool:
    """Run a kernel's self-test, which also compiles it; False, with a warning, if it fails or its error is too large.

    It fails, for example, on a GPU with little shared memory, without a compiler, or with another version of Triton.
    """
    try:
        error = check()
    except Exception as failure:  # whatever compiling and launching raise
        log.warning("%s runs without its Triton kernel: %.300r", what, failure)
        return False
    if error <= allowed:
        return True
    log.warning("%s runs without its Triton kernel, whose error is %.1e", what, error)
    return False


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context for launching there: Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
