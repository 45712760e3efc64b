"""Sets how OpenMP's threads wait, before torch is imported; imports nothing heavy itself.

Between two small matrix products a sleeping thread wakes too late: if threads first spin for a twentieth of a
millisecond, SmolLM2 answers 1.6 times faster on two idle cores. But next to another busy process a spinning thread
occupies the core of the thread that it waits for: there sleeping at once is twice as fast, and torch's default,
spinning for milliseconds, ten times slower. So threads spin only if there is a core for each.
"""

import os
import sys
import time
from pathlib import Path

SPIN_COUNT = "4000"  # for GNU OpenMP, which torch brings on Linux
SAMPLES, SAMPLE_INTERVAL_S = 8, 0.005  # of the number of running threads


def set_thread_spinning(load: Path = Path("/proc/loadavg")) -> None:
    """Set OpenMP's variables for this process and its children, unless one is set or torch was imported, which has read
    them. load: the file in which Linux counts running threads.
    """
    if "torch" in sys.modules or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if _has_idle_core_per_thread(load):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def _has_idle_core_per_thread(load: Path) -> bool:
    """Whether as many cores are idle as torch uses threads, in at least one of several samples.

    A shell that starts the next program of a pipe is busy only for a moment: with a single sample, answers took three
    times as long.
    """
    import psutil  # type: ignore[import-untyped]

    try:
        cores = len(psutil.Process().cpu_affinity())
        threads = int(os.environ.get("OMP_NUM_THREADS") or psutil.cpu_count(logical=False) or cores)
        for _ in range(SAMPLES):
            running = int(load.read_text("ascii").split()[3].partition("/")[0])
            if running - 1 + min(threads, cores) <= cores:
                return True
            time.sleep(SAMPLE_INTERVAL_S)
    except (OSError, ValueError, IndexError, AttributeError):
        pass
    return False
