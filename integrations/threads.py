"""Blocking work awaited in an event loop, each piece of it in a thread of its own.

The loop's default pool has few threads (6 on two cores), and a request that waits for the device holds one for as long:
with `asyncio.to_thread` a handful of open streams would keep the others, and everything else in the program that uses
that pool, from going on. Here there are as many threads as requests under way; all but one of them wait.
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
    """What `work` returns or raises. A cancelled wait is abandoned: the work goes on until it ends by itself."""
    future: Future[Last] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(without_frames(error))

    _start(run)
    return await asyncio.wrap_future(future)


async def items_of_thread(
    work: Callable[[Callable[[Item], None]], Last],
    stop: Callable[[], None] | None = None,
) -> AsyncGenerator[Item | Last, None]:
    """What `work` hands to the function that it is given, as it comes, and then what it returns.

    An item waits in memory until it is asked for; the work never waits. In a loop that is closed the function raises
    RuntimeError, which ends the work. stop: has the work end; called where nobody wants more, and the end waited for.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[tuple[bool, Item | Last | BaseException]] = asyncio.Queue()

    def tell(item: Item | Last | BaseException, last: bool = False) -> None:
        loop.call_soon_threadsafe(items.put_nowait, (last, item))

    def run() -> None:
        try:
            result: Last | BaseException = work(tell)
        except BaseException as error:
            result = without_frames(error)
        with suppress(RuntimeError):  # the loop was closed, and nobody waits
            tell(result, last=True)

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
    """With the caller's context, as `asyncio.to_thread` has it. Joined when the process ends: torch, stopped in the
    middle by that, aborts it."""
    threading.Thread(target=copy_context().run, args=(run,), name=NAME).start()
