"""Tasks and threads: nothing blocks the loop, what is cancelled or closed stops, and requests keep apart."""

import asyncio
import threading

import pytest
from llama_helpers import listening, story_nodes, user
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore

from ragblend.engine.engine import Engine
from ragblend.integrations.llama_index.nodes import passage_of

TOO_LONG_S = 60  # only what is broken takes it
SUBJECTS = ["lighthouse", "orchard", "foundry", "library"]


def stories_about(subject):
    return [
        f"The {subject} of chapter {n} was built by the {subject} keepers, who paid {n} crowns for every stone of it."
        for n in range(3)
    ]


NODES = {subject: story_nodes(stories_about(subject), subject) for subject in SUBJECTS}


def asked(subject):
    context = "\n\n".join(passage_of(node).text for node in NODES[subject])
    return user(f"Context:\n{context}\nWho built the {subject}?")


def scored(subject):
    return [NodeWithScore(node=node) for node in NODES[subject]]


def ids_of(subject):
    return [node.node_id for node in NODES[subject]]


@pytest.fixture
def stored(llm):
    for nodes in NODES.values():
        llm.remember(nodes, encode=True)
    return llm


@pytest.fixture
def forwards(stored, passes):
    stored.chat(user("Hello?"))
    return passes(stored.backend)


LONG = {"max_new_tokens": 1800}


@pytest.mark.parametrize("method", ["achat", "acomplete", "astream_chat", "astream_complete"])
def test_the_loop_goes_on_while_the_device_works(stored, monkeypatch, method):
    """Making the prompt and every forward pass wait here for the loop: a call that held it would wait for ever."""
    answers = []

    def ask_the_loop(loop):
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        answers.append(answered.wait(TOO_LONG_S))
        assert answers[-1], "the call holds the event loop"

    async def ask():
        loop, tokenize = asyncio.get_running_loop(), Engine.tokenize
        monkeypatch.setattr(
            Engine, "tokenize", lambda engine, prompt: ask_the_loop(loop) or tokenize(engine, prompt)
        )
        model = stored.backend.engine.runtime.loaded.model
        hook = model.lm_head.register_forward_pre_hook(lambda *_: ask_the_loop(loop))
        answer = await getattr(stored, method)(asked("orchard") if "chat" in method else "Who?")
        if "stream" in method:
            async for _ in answer:
                pass
        hook.remove()

    asyncio.run(ask())
    assert len(answers) > 8


async def read(answer):
    async for _ in await answer:
        pass


@pytest.mark.parametrize("kept", [False, True])
def test_closing_a_stream_stops_the_device(stored, forwards, stopped, kept):
    """A handler keeps the exception that closed the stream, its traceback, and in it the generators of the stream."""
    if kept:
        stored.callback_manager = CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])
    stream = stored.stream_chat(user("Who?"), **LONG)
    next(stream)
    stream.close()
    assert stopped(stored.backend, forwards)

    async def leave():
        stream = await stored.astream_chat(user("Who?"), **LONG)
        await anext(stream)
        await stream.aclose()

    forwards.clear()
    asyncio.run(leave())
    assert stopped(stored.backend, forwards)


def test_leaving_a_query_engines_stream_stops_the_device(stored, forwards, stopped):
    synthesizer = get_response_synthesizer(stored, streaming=True)
    stored.max_new_tokens = 1000
    response = synthesizer.synthesize("Who?", scored("orchard"))
    for _ in response.response_gen:
        break
    del response
    assert stopped(stored.backend, forwards) and len(forwards) < 900


def test_four_tasks_with_different_documents_keep_apart(stored):
    """Their async streams are opened together, and read in the other order."""

    async def ask(subject):
        reports = [(await stored.achat(asked(subject))).raw["kv"] for _ in range(2)]
        return [*reports, await stored.astream_chat(asked(subject))]

    async def all_of_them():
        answers = await asyncio.gather(*(ask(subject) for subject in SUBJECTS))
        streamed = [[r async for r in stream][-1].raw["kv"] for *_, stream in reversed(answers)]
        return [[*kvs, last] for (*kvs, _), last in zip(answers, reversed(streamed), strict=True)]

    for subject, reports in zip(SUBJECTS, asyncio.run(all_of_them()), strict=True):
        assert [kv["chunks"] for kv in reports] == [ids_of(subject)] * 3
        assert [kv["misses"] for kv in reports] == [0] * 3


def test_answers_of_query_engines_opened_together_and_read_in_the_other_order(stored):
    """The same through synthesizers: the LLM is called when the stream is read, long after `synthesize` returned."""
    synthesizer = get_response_synthesizer(stored, streaming=True)
    opened = {subject: synthesizer.synthesize("Who?", scored(subject)) for subject in SUBJECTS}
    for subject in reversed(SUBJECTS):
        with listening() as ear:
            assert str(opened[subject])
        [kv] = ear.kv
        assert (kv["chunks"], kv["misses"]) == (ids_of(subject), 0)
