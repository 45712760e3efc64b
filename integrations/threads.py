"""Blocking work awaited in an event loop, each call in a thread of its own.

The loop's default pool has few threads (6 on two cores), and a request that waits for the device holds one: with
`asyncio.to_thread` a few open streams would block all other users of that pool. Here there are as many threads as
requests; all but one of them wait.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from ragblend.kvstore.errors import without_frames

Item = TypeVar("Item")
Last = TypeVar("Last")
NAME = "ragblend-request"


async def in_thread(work: Callable[[], Last]) -> Last:
    """Return or raise what `work` does. Cancelling stops only the wait; the work continues to its end."""
    future: Future[Last] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(without_frames(error))

    _start(run)
    return await asyncio.wrap_future(future)


async def iterate_in_thread(
    work: Callable[[Callable[[Item], None]], Last],
    stop: Callable[[], None] | None = None,
) -> AsyncGenerator[Item | Last, None]:
    """Yield the items that `work` passes to its argument, and then its result.

    Items queue in memory; the work never waits. Once the loop is closed the argument raises RuntimeError, which ends
    the work. stop: ends the work; called when the generator is closed, which then waits for the work's end.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[bool, Item | Last | BaseException]] = asyncio.Queue()

    def put(item: Item | Last | BaseException, last: bool = False) -> None:
        loop.call_soon_threadsafe(items.put_nowait, (last, item))

    def run() -> None:
        try:
            result: Last | BaseException = work(put)
        except BaseException as error:
            result = without_frames(error)
        with suppress(RuntimeError):  # the loop was closed, so nothing waits
            put(result, last=True)

    _start(run)
    last = False
    try:
        while not last:
            last, item = await items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        if stop is not None:
            stop()
            while not last:
                last, _ = await items.get()


def _start(run: Callable[[], None]) -> None:
    """Run in a new thread with the caller's context. Not a daemon: torch, interrupted at exit, aborts the process."""
    threading.Thread(target=copy_context().run, args=(run,), name=NAME).start()
