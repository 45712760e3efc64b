"""Ends a process in which a model hangs: nothing else frees a driver that does not come back (RAGCache §6).

Whoever runs the server starts it again (systemd's `Restart=on-failure`, compose's `restart: on-failure`); what was
acknowledged is on the disk.
"""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Iterable

from ragblend.engine.scheduling.queue import DeviceQueue

log = logging.getLogger("ragblend")
EX_TEMPFAIL = 75  # of sysexits.h: it may work the next time


def watch(
    queues: Callable[[], Iterable[DeviceQueue]], limit_s: float, end: Callable[[int], object] = os._exit
) -> threading.Event:
    """Look after what computes, in a thread, until the event that this gives is set.

    limit_s: how long a request may have a model without coming to the end of a layer, token or batch.
    """
    stopped = threading.Event()

    def look() -> None:
        while not stopped.wait(limit_s / 4):
            if any(queue.still_s > limit_s for queue in queues()):
                log.critical(
                    "a model has not moved for %.0f s: the process ends, to be started again", limit_s
                )
                faulthandler.dump_traceback()
                end(EX_TEMPFAIL)
                return

    threading.Thread(target=look, name="ragblend-watchdog", daemon=True).start()
    return stopped
