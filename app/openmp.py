"""How the threads of a product wait for each other; loads nothing heavy, since it is read when torch is loaded.

Between two small products a thread that sleeps is woken too late: with threads that spin for a twentieth of a
millisecond first, SmolLM2 computes answers 1.6 times faster on two idle cores. Beside another busy process a thread
spins in the place of the one it waits for: there sleeping at once is twice as fast, and torch's own default, some
milliseconds, ten times slower. So threads spin where there is a core for each.
"""

import os
from pathlib import Path

SPINS = "4000"  # of GNU OpenMP, which torch brings on Linux


def set_thread_spinning(load: Path = Path("/proc/loadavg")) -> None:
    """Before torch is imported; what the environment says already stays. load: where Linux counts running threads."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if _has_a_core_for_each(load):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _has_a_core_for_each(load: Path) -> bool:
    """Whether as many cores have nothing to do, at this moment, as torch takes threads."""
    import psutil  # type: ignore[import-untyped]

    try:
        running = int(load.read_text().split()[3].partition("/")[0])
        cores = len(os.sched_getaffinity(0))
        threads = int(os.environ.get("OMP_NUM_THREADS") or psutil.cpu_count(logical=False) or cores)
    except (OSError, ValueError, IndexError, AttributeError):
        return False
    return running - 1 + min(threads, cores) <= cores
