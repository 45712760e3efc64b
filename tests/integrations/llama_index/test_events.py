"""LlamaIndex's events and callbacks: each is fired once a call; and streams that are closed or dropped under them."""

import asyncio

import pytest
from llama_helpers import METHODS, STORIES, call, recording, story_nodes, text_of, user
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload, LlamaDebugHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore


@pytest.mark.parametrize("method", METHODS)
def test_each_call_fires_one_start_and_one_end(make_llm, method):
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = make_llm(callback_manager=CallbackManager([debug]))
    with recording() as recorder:
        responses = call(llm, method, "Who kept two ledgers?", max_new_tokens=4)
    kind = "Chat" if method.endswith("chat") else "Completion"
    start, end, step = (f"LLM{kind}{when}Event" for when in ("Start", "End", "InProgress"))
    assert (
        len(recorder.named("LLMChatStartEvent", "LLMCompletionStartEvent")) == len(recorder.named(start)) == 1
    )
    [ended] = recorder.named("LLMChatEndEvent", "LLMCompletionEndEvent")
    assert ended.class_name() == end
    assert text_of(ended.response) == text_of(responses[-1])
    assert ended.response.raw == responses[-1].raw
    assert len(recorder.named(step)) == (len(responses) if "stream" in method else 0)
    assert recorder.named(start)[0].model_dict["class_name"] == "RAGBlendLLM"
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
    [[_, last]] = debug.get_event_pairs(CBEventType.LLM)
    payload = last.payload[EventPayload.RESPONSE if kind == "Chat" else EventPayload.COMPLETION]
    assert text_of(payload) == text_of(responses[-1])
    if method == "chat":  # a call that fails ends with its error
        with pytest.raises(ValueError, match="empty"):
            llm.chat([])
        [_, [_, failed]] = debug.get_event_pairs(CBEventType.LLM)
        assert "empty" in str(failed.payload[EventPayload.EXCEPTION])


def test_predict_fires_once_and_keeps_named_passages_out_of_the_prompt(llm):
    """A template's variable called passages stays one."""
    with recording() as recorder:
        llm.predict(PromptTemplate("{context}\nWho?"), context=STORIES[0], passages=[STORIES[0]])
        llm.predict(PromptTemplate("{passages}\nWho?"), passages="The harbour")
    assert len(recorder.named("LLMPredictStartEvent", "LLMPredictEndEvent")) == 4
    asked = [[m.content for m in end.messages] for end in recorder.ends]
    assert asked == [[f"{STORIES[0]}\nWho?"], ["The harbour\nWho?"]]
    assert [len(kv["chunks"]) for kv in recorder.kv] == [1, 0]


# --- streams that are left


@pytest.fixture
def forwards(llm, passes):
    llm.chat(user("Hello?"))
    return passes(llm.backend)


def test_closing_a_stream_that_a_handler_keeps_stops_the_device(llm, forwards, stopped):
    """A handler that keeps the exception of a closed stream keeps its traceback, and so the stream's generators."""
    llm.callback_manager = CallbackManager([LlamaDebugHandler(print_trace_on_end=False)])
    stream = llm.stream_chat(user("Who?"), max_new_tokens=1800)
    next(stream)
    stream.close()
    assert stopped(llm.backend, forwards)

    async def close():
        stream = await llm.astream_chat(user("Who?"), max_new_tokens=1800)
        await anext(stream)
        await stream.aclose()

    forwards.clear()
    asyncio.run(close())
    assert stopped(llm.backend, forwards)


def test_dropping_a_query_engines_stream_stops_the_device(llm, forwards, stopped):
    synthesizer = get_response_synthesizer(llm, streaming=True)
    llm.max_new_tokens = 1000
    response = synthesizer.synthesize("Who?", [NodeWithScore(node=node) for node in story_nodes()])
    next(iter(response.response_gen))
    del response
    assert stopped(llm.backend, forwards) and len(forwards) < 900
