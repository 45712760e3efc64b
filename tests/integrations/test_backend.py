"""What both adapters stand on: tasks that share one device, stop it when they are cancelled, and one engine for all."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest
import tiny_models

from ragblend.engine.results import Result
from ragblend.integrations.backend import Backend, Turn, marks, parts_of
from ragblend.integrations.calls import Call
from ragblend.integrations.passages import Passage

MANY = 16
TOO_LONG_S = 60  # only what is broken takes it
STORIES = [
    Passage(
        f"Ledger {number}: {number * 7} barrels of herring went out by the tide of the ninth.", f"l{number}"
    )
    for number in range(MANY)
]


@pytest.fixture
def backend(place):
    made = Backend(**place)
    made.remember(STORIES, encode=True)
    return made


@pytest.fixture
def prompts(backend):
    return [backend.chat_prompt([Turn("user", (story.text, " How many?"))]) for story in STORIES]


@pytest.fixture
def short(backend):
    return Call.of(backend, (), True, {"max_new_tokens": 6})


async def collect(call, prompt):
    *pieces, result = [item async for item in call.astream(prompt)]
    assert isinstance(result, Result)
    assert "".join(pieces) == result.text
    return result


WAYS = {"astream": collect, "agenerate": Call.agenerate}


@pytest.mark.parametrize("way", WAYS)
def test_many_requests_wait_for_the_device_and_for_nothing_else(backend, short, prompts, way):
    """With threads of the loop's default pool, here of one, the first to wait kept everybody from going on."""
    expected = [short.generate(prompt).text for prompt in prompts]

    async def all_of_them():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        with backend.engine.runtime.queue.turn():
            asked = [asyncio.create_task(WAYS[way](short, prompt)) for prompt in prompts]
            while backend.engine.runtime.queue.inside <= MANY:
                await asyncio.sleep(0)
            free = await asyncio.wait_for(asyncio.to_thread(lambda: "free"), TOO_LONG_S)
        return free, await asyncio.gather(*asked)

    free, results = asyncio.run(asyncio.wait_for(all_of_them(), TOO_LONG_S))
    assert free == "free"
    assert [result.text for result in results] == expected
    assert [[chunk.node_id for chunk in result.prompt.chunks] for result in results] == [
        [story.node_id] for story in STORIES
    ]
    assert [result.report.misses for result in results] == [0] * MANY


class Held:
    """A hook in a part that holds the device there, until it is let go; `after` counts the parts from then on."""

    def __init__(self, parts, at):
        self.begun, self.let_go, self.after = threading.Event(), threading.Event(), []
        self.hooks = [part.register_forward_pre_hook(self.count) for part in parts]
        self.hooks.append(parts[at].register_forward_pre_hook(self.hold))

    def count(self, *_):
        if self.let_go.is_set():
            self.after.append(1)

    def hold(self, *_):
        self.begun.set()
        assert self.let_go.wait(TOO_LONG_S)

    async def until_begun(self):
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


async def soon():
    """A cancelled task has come as far as it can without the device."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def held(backend):
    made = []

    def hold(at):
        model = backend.engine.runtime.loaded.model
        made.append(Held([*model.model.layers, model.lm_head], at))
        return made[-1]

    yield hold
    for hook in made[0].hooks:
        hook.remove()


def is_free(backend):
    """Waits for the device. That it is granted in turn shows that nobody before goes on."""
    with backend.engine.runtime.queue.turn():
        return True


@pytest.mark.parametrize(("way", "layer"), [("astream", 0), ("agenerate", 2)])
def test_cancelling_a_task_ends_the_work_within_a_layer(backend, short, prompts, held, way, layer):
    device = held(layer)

    async def cancelled():
        task = asyncio.create_task(WAYS[way](short, prompts[0]))
        await device.until_begun()
        task.cancel()
        await soon()
        device.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert is_free(backend)
    assert len(device.after) == 0


def test_leaving_a_stream_ends_the_work_within_a_token(backend, prompts, held):
    async def leave():
        endless = Call.of(backend, (), True, {"max_new_tokens": 1000})
        async with aclosing(endless.astream(prompts[0])) as items:
            assert await anext(items)
            device = held(-1)  # the head, which whatever computes a token calls
            await device.until_begun()
        device.let_go.set()
        assert await asyncio.to_thread(is_free, backend)  # here: an answer ends as well when its loop does
        return device

    device = asyncio.run(leave())
    assert len(device.after) < tiny_models.LAYERS


def test_a_request_that_is_cancelled_in_the_queue_leaves_it(backend, short, prompts):
    async def cancelled():
        queue = backend.engine.runtime.queue
        with queue.turn():
            task = asyncio.create_task(collect(short, prompts[0]))
            while queue.inside < 2:
                await asyncio.sleep(0)
            task.cancel()
            while queue.inside > 1:
                await asyncio.sleep(0.001)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(cancelled(), TOO_LONG_S))
    assert is_free(backend)


def test_errors_of_a_stream_come_where_it_is_read(short, prompts, monkeypatch):
    monkeypatch.setitem(short.arguments, "temperature", -1)
    with pytest.raises(ValueError, match="temperature must be 0"):
        asyncio.run(anext(short.astream(prompts[0])))


def test_adapters_command_line_and_page_share_one_engine(backend):
    """One model in memory, whoever asks; the command line and the page both work on a `Workspace`."""
    pytest.importorskip("langchain_core", reason="the langchain extra is not installed")
    from ragblend.app.workspace import Workspace
    from ragblend.integrations.langchain import ChatRAGBlend
    from ragblend.integrations.langchain import RAGBlendLLM as LangChainLLM
    from ragblend.integrations.llama_index import RAGBlendLLM

    place = {"model": backend.model, "home": backend.home, "device": "cpu", "dtype": "float32"}
    engine = backend.engine
    assert RAGBlendLLM(**place).backend.engine is engine
    assert ChatRAGBlend(**place).backend.engine is LangChainLLM(**place).backend.engine is engine
    with Workspace.open(**place) as workspace:
        assert workspace.engine is engine


def test_who_is_told_the_text_may_end_the_answer(backend, short, prompts):
    """A loop that is closed answers so: the device must not go on for nobody, and the next request must get it."""
    pieces = []
    result = backend.engine.generate(prompts[0], max_new_tokens=6, on_text=pieces.append)
    assert "".join(pieces) == result.text == short.generate(prompts[0]).text

    def refuse(piece):
        raise ConnectionError("nobody listens")

    with pytest.raises(ConnectionError):
        backend.engine.generate(prompts[0], max_new_tokens=6, on_text=refuse)
    assert is_free(backend)
    assert short.generate(prompts[0]).text == result.text


def test_what_looks_like_the_mark_of_a_text_that_is_not_there_is_text():
    first, second = marks(2)
    assert parts_of(f"a{first}b{second}c", ["one"]) == ["a", "one", f"b{second}c"]
    assert parts_of(first, []) == [first]
