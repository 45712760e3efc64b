"""Tasks and streams: the event loop is never blocked, closing stops the device, and requests keep apart."""

import asyncio
import threading

import pytest
from llama_helpers import recording, story_nodes, user
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore

from ragblend.engine.engine import Engine
from ragblend.integrations.llama_index.nodes import passage_of

TIMEOUT_S = 60  # reached only by what is broken
SUBJECTS = ["lighthouse", "orchard", "foundry", "library"]
BUILT = "The {0} of chapter {1} was built by the {0} keepers, who paid {1} crowns for every stone of it."
NODES = {name: story_nodes([BUILT.format(name, n) for n in range(3)], name) for name in SUBJECTS}


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


@pytest.mark.parametrize("method", ["achat", "acomplete", "astream_chat", "astream_complete"])
def test_the_event_loop_runs_while_the_device_computes(stored, monkeypatch, method):
    """Making the prompt and every forward pass wait here for the loop: a call that blocked it would never end."""
    answers = []

    def wait_for(loop):
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        answers.append(answered.wait(TIMEOUT_S))
        assert answers[-1], "the call blocks the event loop"

    async def ask():
        loop, tokenize = asyncio.get_running_loop(), Engine.tokenize
        monkeypatch.setattr(
            Engine, "tokenize", lambda engine, prompt: wait_for(loop) or tokenize(engine, prompt)
        )
        model = stored.backend.engine.runtime.loaded.model
        hook = model.lm_head.register_forward_pre_hook(lambda *_: wait_for(loop))
        answer = await getattr(stored, method)(asked("orchard") if "chat" in method else "Who?")
        if "stream" in method:
            async for _ in answer:
                pass
        hook.remove()

    asyncio.run(ask())
    assert len(answers) > 8


@pytest.mark.parametrize("is_kept", [False, True])
def test_closing_a_stream_stops_the_device(stored, forwards, stopped, is_kept):
    """A handler that keeps the exception of a closed stream keeps its traceback, and so the stream's generators."""
    if is_kept:
        stored.callback_manager = CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])
    stream = stored.stream_chat(user("Who?"), max_new_tokens=1800)
    next(stream)
    stream.close()
    assert stopped(stored.backend, forwards)

    async def close():
        stream = await stored.astream_chat(user("Who?"), max_new_tokens=1800)
        await anext(stream)
        await stream.aclose()

    forwards.clear()
    asyncio.run(close())
    assert stopped(stored.backend, forwards)


def test_dropping_a_query_engines_stream_stops_the_device(stored, forwards, stopped):
    synthesizer = get_response_synthesizer(stored, streaming=True)
    stored.max_new_tokens = 1000
    response = synthesizer.synthesize("Who?", scored("orchard"))
    next(iter(response.response_gen))
    del response
    assert stopped(stored.backend, forwards) and len(forwards) < 900


def test_four_tasks_report_their_own_documents(stored):
    """Their async streams are opened together, and read in reverse order."""

    async def ask(subject):
        reports = [(await stored.achat(asked(subject))).raw["kv"] for _ in range(2)]
        return reports, await stored.astream_chat(asked(subject))

    async def ask_all():
        answers = await asyncio.gather(*(ask(subject) for subject in SUBJECTS))
        for reports, stream in reversed(answers):
            reports.append([response async for response in stream][-1].raw["kv"])
        return [reports for reports, _ in answers]

    for subject, reports in zip(SUBJECTS, asyncio.run(ask_all()), strict=True):
        assert [kv["chunks"] for kv in reports] == [ids_of(subject)] * 3
        assert [kv["misses"] for kv in reports] == [0] * 3


def test_query_engines_streams_that_are_read_in_reverse_order_report_their_own_documents(stored):
    """The LLM is called when the stream is read, long after `synthesize` returned."""
    synthesizer = get_response_synthesizer(stored, streaming=True)
    opened = {subject: synthesizer.synthesize("Who?", scored(subject)) for subject in SUBJECTS}
    for subject in reversed(SUBJECTS):
        with recording() as recorder:
            assert str(opened[subject])
        [kv] = recorder.kv
        assert (kv["chunks"], kv["misses"]) == (ids_of(subject), 0)
