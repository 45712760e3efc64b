"""Blocking work awaited in an event loop, each call in a thread of its own.

The loop's default pool has few threads (6 on two cores), and a request that waits for the device holds one: with
`asyncio.to_thread` a few open streams would block all other users of that pool. Here every request has its
own thread; all but one of them wait.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from ragblend.kvstore.errors import without_traceback

Item = TypeVar("Item")
Returned = TypeVar("Returned")
THREAD_NAME = "ragblend-request"


async def in_thread(work: Callable[[], Returned]) -> Returned:
    """Return or raise what `work` does. Cancelling stops only the wait; the work continues to its end."""
    future: Future[Returned] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(without_traceback(error))

    _start(run)
    return await asyncio.wrap_future(future)


async def iterate_in_thread(
    work: Callable[[Callable[[Item], None]], Returned],
    stop: Callable[[], None] | None = None,
) -> AsyncGenerator[Item | Returned, None]:
    """Yield the items that `work` passes to its argument, and then its result.

    Items queue in memory; the work never waits. Once the loop is closed the argument raises RuntimeError, which ends
    the work. stop: ends the work; called when the generator is closed, which then waits for the work's end.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[bool, Item | Returned | BaseException]] = asyncio.Queue()

    def put(item: Item | Returned | BaseException, is_last: bool = False) -> None:
        loop.call_soon_threadsafe(items.put_nowait, (is_last, item))

    def run() -> None:
        try:
            result: Returned | BaseException = work(put)
        except BaseException as error:
            result = without_traceback(error)
        with suppress(RuntimeError):  # the loop was closed, so nothing waits
            put(result, is_last=True)

    _start(run)
    is_last = False
    try:
        while not is_last:
            is_last, item = await items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        if stop is not None:
            stop()
            while not is_last:
                is_last, _ = await items.get()


def _start(run: Callable[[], None]) -> None:
    """Run in a new thread with the caller's context. Not a daemon: torch, interrupted at exit, aborts the process."""
    threading.Thread(target=copy_context().run, args=(run,), name=THREAD_NAME).start()
