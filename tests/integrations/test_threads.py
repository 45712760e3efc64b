"""Waiting in an event loop for threads of our own: errors, order, context and end (many at once: `test_backend.py`)."""

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing, suppress

import pytest

from ragblend.engine.results import Stream
from ragblend.integrations.threads import NAME, in_thread, items_of_thread
from ragblend.kvstore.errors import Cancelled, UsageError

TOO_LONG_S = 60  # only what is broken takes it


def test_items_come_before_the_work_is_done():
    read = threading.Event()

    def work(tell):
        tell("first")
        assert read.wait(TOO_LONG_S)
        return "last"

    async def main():
        items = items_of_thread(work)
        assert await anext(items) == "first"
        read.set()
        return [item async for item in items]

    assert asyncio.run(main()) == ["last"]


def test_errors_come_out_behind_what_came_before_them():
    def fail(tell=None):
        if tell is not None:
            tell("first")
        raise LookupError("nothing there")

    async def main():
        with pytest.raises(LookupError, match="nothing there"):
            await in_thread(fail)
        items = items_of_thread(fail)
        assert await anext(items) == "first"
        with pytest.raises(LookupError, match="nothing there"):
            await anext(items)

    asyncio.run(main())


def test_work_that_outlives_its_loop_is_ended_by_the_next_item():
    """Nobody closed the generator, as when a loop is dropped: there is nobody to read what the work makes."""
    begun, closed, ended = threading.Event(), threading.Event(), []

    def work(tell):
        tell("first")
        begun.set()
        assert closed.wait(TOO_LONG_S)
        try:
            tell("second")
        except RuntimeError as error:
            ended.append(str(error))
            raise

    loop = asyncio.new_event_loop()
    items = items_of_thread(work)
    assert loop.run_until_complete(anext(items)) == "first"
    [thread] = [thread for thread in threading.enumerate() if thread.name == NAME]
    assert begun.wait(TOO_LONG_S)
    loop.close()
    closed.set()
    thread.join(TOO_LONG_S)
    assert ended == ["Event loop is closed"]


class Held:
    """What a request holds while it is computed."""


@pytest.mark.parametrize("kind", [Cancelled, UsageError])
@pytest.mark.parametrize("way", ["awaited", "iterated", "left", "a stream"])
def test_an_error_holds_nothing_of_the_request_that_it_ended(way, kind):
    """A context's KV is large, and garbage is looked for seldom: with the collector off nothing may be left."""
    held, go = [], threading.Event()

    def work(*tell):
        mine = Held()
        held.append(weakref.ref(mine))

        def within():  # a closure: its cells live as long as its frame
            assert mine is not None
            assert go.wait(60)
            raise kind("left")

        if way in ("iterated", "left"):
            tell[0]("piece")
        within()

    async def ask():
        if way == "awaited":
            go.set()
            await in_thread(work)
        async with aclosing(items_of_thread(work)) as items:
            async for _ in items:
                if way == "left":
                    break
                go.set()
        go.set()

    gc.collect()
    gc.disable()
    try:
        with suppress(kind):
            if way == "a stream":
                go.set()
                list(Stream(work))
            else:
                asyncio.run(ask())
        for thread in threading.enumerate():
            if thread.name in (NAME, "ragblend-stream"):
                thread.join(60)
        assert [each() for each in held] == [None]
    finally:
        gc.enable()
