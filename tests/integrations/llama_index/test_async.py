"""Tasks and streams: the event loop is never blocked, closing stops the device, and requests keep apart."""

import asyncio

import pytest
from llama_helpers import recording, story_nodes, user
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore

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


def test_query_engines_streams_that_are_read_in_reverse_order_report_their_own_documents(stored):
    """The LLM is called when the stream is read, long after `synthesize` returned."""
    synthesizer = get_response_synthesizer(stored, streaming=True)
    opened = {subject: synthesizer.synthesize("Who?", scored(subject)) for subject in SUBJECTS}
    for subject in reversed(SUBJECTS):
        with recording() as recorder:
            assert str(opened[subject])
        [kv] = recorder.kv
        assert (kv["chunks"], kv["misses"]) == (ids_of(subject), 0)
