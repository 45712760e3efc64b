"""Watchdog: ends the process if a model hangs, because nothing else ends a driver call that hangs (RAGCache §6).

The supervisor restarts the server (systemd's `Restart=on-failure`, compose's `restart: on-failure`); acknowledged
requests are on disk.
"""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Iterable

from ragblend.engine.scheduling.queue import DeviceQueue

log = logging.getLogger("ragblend")
EX_TEMPFAIL = 75  # sysexits.h: "temporary failure; the user is invited to retry"


def watch(
    queues: Callable[[], Iterable[DeviceQueue]], limit_s: float, end: Callable[[int], object] = os._exit
) -> threading.Event:
    """Watch the device queues in a thread until the returned event is set.

    limit_s: how long a request may hold a queue without completing a layer, token or batch.
    """
    stopped = threading.Event()

    def check_queues() -> None:
        while not stopped.wait(limit_s / 4):
            if any(queue.stalled_s > limit_s for queue in queues()):
                log.critical(
                    "a model has made no progress for %.0f s: ending the process, to be restarted", limit_s
                )
                faulthandler.dump_traceback()
                end(EX_TEMPFAIL)
                return

    threading.Thread(target=check_queues, name="ragblend-watchdog", daemon=True).start()
    return stopped
