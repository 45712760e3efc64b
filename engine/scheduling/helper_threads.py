"""Ends OpenMP's helper threads: GNU OpenMP keeps a team of them for each thread that ever computed in parallel."""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

OMP_PAUSE_HARD = 2  # the team ends; the next parallel loop starts another in a tenth of a millisecond


def end_helper_threads() -> None:
    """End the calling thread's team, so that another thread's team can spin between two matrix products.

    With more helper threads than cores, all of them sleep at once: a fused prompt of SmolLM2 took 1.7 times as long
    beside the idle team of a thread that had embedded a question.
    """
    pause = _pause() if "torch" in sys.modules else None
    if pause is not None:
        pause(OMP_PAUSE_HARD)


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` (OpenMP 5.0) of the GNU library that torch has loaded, if it has."""
    if sys.platform != "linux":
        return None
    try:
        pause: Callable[[int], int] = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return pause
