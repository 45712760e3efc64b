"""What both adapters share: tasks that wait for one device, stop it when they are cancelled, and one engine for all."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
import tiny_models
from waiting import SOON_S

from ragblend.engine.results import Result
from ragblend.integrations.backend import Backend, ChatTurn, placeholders, split_at_placeholders
from ragblend.integrations.calls import Call, PreparedCall
from ragblend.integrations.passages import Passage

MANY = 16
STORIES = [
    Passage(f"Ledger {n}: {n * 7} barrels of herring went out by the tide of the ninth.", f"l{n}")
    for n in range(MANY)
]


@pytest.fixture
def backend(place):
    made = Backend(**place)
    made.remember(STORIES, encode=True)
    return made


def prepared(backend, story, **options):
    """A call that asks about that story."""
    call, turns = Call.of(backend, (), True, options), [ChatTurn("user", (story.text, " How many?"))]
    return PreparedCall(call, lambda: call.chat_prompt(turns))


@pytest.fixture
def short(backend):
    """A short answer about each story."""
    return [prepared(backend, story, max_new_tokens=6) for story in STORIES]


async def collect(prepared):
    *pieces, result = [item async for item in await prepared.astream()]
    assert isinstance(result, Result)
    assert "".join(pieces) == result.text
    return result


WAYS = {"astream": collect, "agenerate": PreparedCall.agenerate}


@pytest.mark.parametrize("way", WAYS)
def test_many_requests_wait_for_the_device_without_blocking_other_threads(backend, short, way):
    """In the loop's default pool (here of one thread) the first waiting request blocked all others."""
    expected = [each.generate().text for each in short]

    async def ask_all():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        with backend.engine.runtime.queue.turn():
            tasks = [asyncio.create_task(WAYS[way](each)) for each in short]
            while backend.engine.runtime.queue.request_count <= MANY:
                await asyncio.sleep(0)
            free = await asyncio.wait_for(asyncio.to_thread(lambda: "free"), SOON_S)
        return free, await asyncio.gather(*tasks)

    free, results = asyncio.run(asyncio.wait_for(ask_all(), SOON_S))
    assert free == "free"
    assert [result.text for result in results] == expected
    chunks = [[chunk.node_id for chunk in result.prompt.chunks] for result in results]
    assert chunks == [[story.node_id] for story in STORIES]
    assert [result.report.misses for result in results] == [0] * MANY


class Held:
    """Hooks that hold the device in one module until it is released, and count the modules called after that."""

    def __init__(self, modules, at):
        self.started, self.released, self.after = threading.Event(), threading.Event(), []
        self.hooks = [module.register_forward_pre_hook(self.count) for module in modules]
        self.hooks.append(modules[at].register_forward_pre_hook(self.hold))

    def count(self, *_):
        if self.released.is_set():
            self.after.append(1)

    def hold(self, *_):
        self.started.set()
        assert self.released.wait(SOON_S)

    async def until_started(self):
        while not self.started.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def hold(backend):
    made = []

    def at(number):
        model = backend.engine.runtime.loaded.model
        made.append(Held([*model.model.layers, model.lm_head], number))
        return made[-1]

    yield at
    for hook in made[0].hooks:
        hook.remove()


def is_free(backend):
    """Waits for the device; it is granted in turn, so no earlier request is still running."""
    with backend.engine.runtime.queue.turn():
        return True


@pytest.mark.parametrize(("way", "layer"), [("astream", 0), ("agenerate", 2)])
def test_cancelling_a_task_stops_the_device_within_a_layer(backend, short, hold, way, layer):
    device = hold(layer)

    async def cancel():
        task = asyncio.create_task(WAYS[way](short[0]))
        await device.until_started()
        task.cancel()
        for _ in range(20):  # as far as the task comes without the device
            await asyncio.sleep(0)
        device.released.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert is_free(backend)
    assert len(device.after) == 0


def test_closing_a_stream_stops_the_device_within_a_token(backend, hold):
    async def close():
        endless = prepared(backend, STORIES[0], max_new_tokens=1000)
        async with aclosing(await endless.astream()) as items:
            assert await anext(items)
            device = hold(-1)  # the head, which is called for every token
            await device.until_started()
        device.released.set()
        assert await asyncio.to_thread(is_free, backend)  # here: an answer also ends when its loop does
        return device

    assert len(asyncio.run(close()).after) < tiny_models.LAYERS


def test_a_request_that_is_cancelled_in_the_queue_leaves_it(backend, short):
    async def cancel():
        queue = backend.engine.runtime.queue
        with queue.turn():
            task = asyncio.create_task(collect(short[0]))
            while queue.request_count < 2:
                await asyncio.sleep(0)
            task.cancel()
            while queue.request_count > 1:
                await asyncio.sleep(0.001)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(cancel(), SOON_S))
    assert is_free(backend)


def test_adapters_command_line_and_page_share_one_engine(place):
    """One model in memory; the command line and the page both use a `Workspace`."""
    pytest.importorskip("langchain_core", reason="the langchain extra is not installed")
    from ragblend.app.workspace import Workspace
    from ragblend.integrations.langchain import ChatRAGBlend
    from ragblend.integrations.langchain import RAGBlendLLM as LangChainLLM
    from ragblend.integrations.llama_index import RAGBlendLLM

    engine = Backend(**place).engine
    assert all(make(**place).backend.engine is engine for make in (RAGBlendLLM, ChatRAGBlend, LangChainLLM))
    with Workspace.open(**place) as workspace:
        assert workspace.engine is engine


def test_a_placeholder_without_a_value_is_text():
    first, second = placeholders(2)
    assert split_at_placeholders(f"a{first}b{second}c", ["one"]) == ["a", "one", f"b{second}c"]
    assert split_at_placeholders(first, []) == [first]
