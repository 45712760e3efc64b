"""Awaiting threads in an event loop: errors, order, and what is left behind (many at once: `test_backend.py`)."""

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing, suppress

import pytest
from waiting import SOON_S

from ragblend.engine.results import Stream
from ragblend.integrations.threads import THREAD_NAME, in_thread, iterate_in_thread
from ragblend.kvstore.errors import Cancelled, UsageError


def test_work_that_outlives_its_loop_is_ended_by_the_next_item():
    """The generator was not closed, as when a loop is dropped, and nothing reads the items."""
    started, closed, errors = threading.Event(), threading.Event(), []

    def work(put):
        put("first")
        started.set()
        assert closed.wait(SOON_S)
        try:
            put("second")
        except RuntimeError as error:
            errors.append(str(error))
            raise

    loop = asyncio.new_event_loop()
    items = iterate_in_thread(work)
    assert loop.run_until_complete(anext(items)) == "first"
    [thread] = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    assert started.wait(SOON_S)
    loop.close()
    closed.set()
    thread.join(SOON_S)
    assert errors == ["Event loop is closed"]


class Context:
    """What a request holds while it is computed."""


@pytest.mark.parametrize("kind", [Cancelled, UsageError])
@pytest.mark.parametrize("way", ["awaited", "iterated", "closed", "stream"])
def test_an_error_keeps_nothing_of_its_request_alive(way, kind):
    """A context's KV is large and garbage collection rare, so nothing may be left with the collector off."""
    held, proceed = [], threading.Event()

    def work(*put):
        context = Context()
        held.append(weakref.ref(context))

        def within():  # a closure: its cells live as long as its frame
            assert context is not None
            assert proceed.wait(SOON_S)
            raise kind("failed")

        if way in ("iterated", "closed"):
            put[0]("piece")
        within()

    async def ask():
        if way == "awaited":
            proceed.set()
            await in_thread(work)
        async with aclosing(iterate_in_thread(work)) as items:
            async for _ in items:
                if way == "closed":
                    break
                proceed.set()
        proceed.set()

    gc.disable()
    try:
        with suppress(kind):
            if way == "stream":
                proceed.set()
                list(Stream(work))
            else:
                asyncio.run(ask())
        for thread in threading.enumerate():
            if thread.name in (THREAD_NAME, "ragblend-stream"):
                thread.join(SOON_S)
        assert [each() for each in held] == [None]
    finally:
        gc.enable()
