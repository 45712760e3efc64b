"""Event streams without a server: what happens when a client disconnects."""

import asyncio

import pytest

from ragblend.app.serve.service import Events


@pytest.mark.parametrize("steps", range(1, 9))
async def test_a_disconnect_while_an_event_is_sent_ends_the_stream(steps) -> None:
    """`asyncio.wait_for` of Python 3.11 drops a cancellation that arrives as sending ends: all was computed."""
    left, made, closed = asyncio.Event(), [], []

    async def values():
        try:
            for number in range(5000):
                made.append(number)
                yield {"number": number}
        finally:
            closed.append(True)

    async def receive():
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if len(made) == 10:
            left.set()
        for _ in range(steps):
            await asyncio.sleep(0)

    rest = values()
    await Events(await anext(rest), rest, str)({}, receive, send)
    assert len(made) < 5000 and closed == [True]
