"""Work in threads, and waiting for what comes later. Not a test file."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

SOON_S = (
    200.0  # an upper limit for waiting; a loaded machine is slow, and each test has a time limit of its own
)


def until(condition, timeout_s=SOON_S):
    """What it gave, once that is true."""
    limit = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.005)
    return found


def idle(jobs, timeout_s=SOON_S):
    """The queue has nothing left to do, KV included."""
    return until(lambda: jobs.overview().is_idle, timeout_s)


def started(work, *arguments):
    """A thread that does this, and that does not keep the process alive."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def at_once(*work):
    """What each of these gives, called in threads that begin together; raises what one of them raised."""
    begin = threading.Barrier(len(work))
    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(lambda one: (begin.wait(), one())[1], work))
