"""ChatRAGBlend on a tiny model: every way to call it, and what it says of itself."""

import asyncio
import threading

import pytest
import tiny_models
from langchain_classic.memory import ConversationTokenBufferMemory
from langchain_core._api import LangChainDeprecationWarning
from langchain_core.documents import Document
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)
from langchain_core.load import dumps
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.messages.content import create_text_block
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError
from waiting import SOON_S
from watching import Watcher, engine_answer

from ragblend.integrations.langchain import ChatRAGBlend, encode_documents
from ragblend.integrations.langchain.messages import turns_of
from ragblend.kvstore.errors import PromptTooLongError, RagBlendError, UsageError

QUESTION = "Who rings the bell?"


def by_all_ways(model, *asked, **options):
    """What invoke, stream, ainvoke and astream give, each when it is called."""

    async def read():
        return [chunk async for chunk in model.astream(*asked, **options)]

    return {
        "invoke": lambda: model.invoke(*asked, **options),
        "stream": lambda: list(model.stream(*asked, **options)),
        "ainvoke": lambda: asyncio.run(model.ainvoke(*asked, **options)),
        "astream": lambda: asyncio.run(read()),
    }


def kv_of(answer):
    return answer.response_metadata["kv"]


def blocks(documents, question=QUESTION):
    content = []
    for document in documents:
        content += [{"type": "text", "text": document.page_content, "id": document.id}, "\n\n"]
    return [HumanMessage([*content, {"type": "text", "text": question}])]


def test_constructing_opens_nothing(tmp_path):
    model = ChatRAGBlend(model="nobody/has-this", home=tmp_path / "home")
    assert not (tmp_path / "home").exists()
    with pytest.raises(ModelNotFoundError):
        model.invoke("hello")


def test_the_answer_is_the_engines_own(tiny, documents):
    encode_documents(documents, tiny, show_progress=False)
    answer = tiny.invoke(blocks(documents))
    expected = engine_answer(tiny.backend.engine, blocks(documents), documents, max_new_tokens=8)
    assert answer.text == expected.text
    assert [chunk.node_id for chunk in expected.prompt.chunks] == answer.response_metadata["kv"]["chunks"]
    assert answer.response_metadata["kv"]["hits"] == 3
    assert answer.usage_metadata["input_tokens"] == len(expected.prompt.token_ids)
    assert answer.usage_metadata["output_tokens"] == len(expected.token_ids)
    assert answer.usage_metadata["input_token_details"]["cache_read"] == expected.report.tokens.reused > 0


def test_all_ways_to_call_give_the_same(tiny, documents):
    encode_documents(documents, tiny, show_progress=False)
    asked = blocks(documents)
    ways = by_all_ways(tiny, asked)
    whole, streamed = ways["invoke"](), ways["stream"]()
    for chunks in (streamed, ways["astream"]()):
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [bool(chunk.response_metadata.get("kv")) for chunk in chunks].count(True) == 1
        assert kv_of(chunks[-1])["chunks"] == kv_of(whole)["chunks"]
        assert chunks[-1].usage_metadata == whole.usage_metadata
        assert all(chunk.usage_metadata is None for chunk in chunks[:-1])
        assert sum(chunks[1:], chunks[0]).usage_metadata == whole.usage_metadata
    assert len(streamed) > 3
    assert ways["ainvoke"]().text == whole.text
    assert [[g.text] for [g] in tiny.generate([asked, asked]).generations] == [[whole.text]] * 2
    assert [answer.text for answer in tiny.batch([asked, asked])] == [whole.text] * 2
    assert [answer.text for answer in asyncio.run(tiny.abatch([asked, asked]))] == [whole.text] * 2


@pytest.mark.filterwarnings("ignore:.*version='v3'.*:langchain_core._api.LangChainBetaWarning")
def test_every_piece_is_reported_once(tiny, tiny_options):
    # Said explicitly, streaming=False would switch off `stream` as well: LangChain's rule.
    streaming = ChatRAGBlend(**tiny_options, max_tokens=8, streaming=True)
    ways = {way: lambda c, way=way: by_all_ways(tiny, "hello", c)[way]() for way in ("stream", "astream")} | {
        "streaming=True": lambda config: [streaming.invoke("hello", config)],
        "stream_events": lambda config: [tiny.stream_events("hello", config, version="v3").output],
    }
    for way, ask in ways.items():
        watcher = Watcher()
        pieces = [str(answer.text) for answer in ask({"callbacks": [watcher]})]
        [seen] = watcher.calls
        assert "".join(seen.tokens) == "".join(pieces) == seen.text, way
        assert len([token for token in seen.tokens if token]) > 3, way
        assert seen.kv["fresh"] > 0


def test_a_model_with_configurable_fields_streams(tiny):
    model = tiny.configurable_fields(max_tokens=ConfigurableField(id="most"))
    pieces = list(model.stream("hello", {"configurable": {"most": 8}}))
    assert len([piece for piece in pieces if piece.text]) > 1


# --- what reaches the engine


def test_ids_by_content_blocks_calls_artifacts_and_text(make_tiny, documents):
    tides, bell, lamp = documents
    model = make_tiny(learn_from_prompts=False)  # the same text stands in many of these prompts

    def chunks(answer):
        return kv_of(answer)["chunks"]

    assert chunks(model.invoke(blocks([bell, tides]))) == ["bell", "tides"]
    text = f"Notes: {lamp.page_content} And: {bell.page_content}\n\n{QUESTION}"
    assert chunks(model.invoke(text)) == []
    assert chunks(model.invoke(text, passages=[bell, lamp])) == ["lamp", "bell"]
    assert chunks(model.bind(passages=[bell]).invoke(text)) == ["bell"]
    assert chunks(model.invoke(text, passages=bell)) == ["bell"]  # one by itself
    tool = ToolMessage(
        text, tool_call_id="1", artifact=[bell, {"page_content": lamp.page_content, "id": "l"}]
    )
    assert chunks(model.invoke([HumanMessage(QUESTION), AIMessage(""), tool])) == ["l", "bell"]
    encode_documents([tides, bell], model, show_progress=False)
    assert chunks(model.invoke(text)) == ["bell"]


def test_blocks_without_an_id_of_their_own_are_text(make_tiny, documents):
    model, automatic = make_tiny(), create_text_block(documents[0].page_content)
    assert automatic["id"]
    spoken = AIMessage([{"type": "text", "text": documents[1].page_content, "id": "msg_1"}])
    assert kv_of(model.invoke([HumanMessage([automatic]), spoken, HumanMessage(QUESTION)]))["chunks"] == []


def test_an_edited_document_is_a_miss_and_then_its_own(make_tiny, documents):
    """The old text's KV must not answer for the new text."""
    model = make_tiny()
    encode_documents(documents, model, show_progress=False)
    edited = Document(documents[1].page_content.replace("herring", "butter"), id="bell")
    first = model.invoke(blocks([edited])).response_metadata["kv"]
    assert (first["chunks"], first["hits"], first["misses"]) == (["bell"], 0, 1)
    encode_documents([edited], model, show_progress=False)
    assert model.invoke(f"{edited.page_content} {QUESTION}").response_metadata["kv"]["hits"] == 1
    assert model.invoke(f"{documents[1].page_content} {QUESTION}").response_metadata["kv"]["chunks"] == []


def test_forgotten_documents_are_found_no_more_and_their_kv_is_gone(make_tiny, documents):
    model = make_tiny(register_retrieved=False, learn_from_prompts=False)
    encode_documents(documents, model, show_progress=False)
    text = "\n\n".join(document.page_content for document in documents)
    assert kv_of(model.invoke(text))["chunks"] == ["tides", "bell", "lamp"]
    assert model.forget(["bell"]) > 0
    kv = kv_of(model.invoke(text))
    assert (kv["chunks"], kv["hits"]) == (["tides", "lamp"], 2)


def test_roles(tiny):
    said = [
        SystemMessage("be brief"),
        HumanMessage("one"),
        AIMessage("two"),
        ToolMessage("three", tool_call_id="1"),
        ChatMessage("four", role="user"),
    ]
    assert [turn.role for turn in turns_of(said)] == ["system", "user", "assistant", "tool", "user"]
    silent = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    assert [turn.role for turn in turns_of([HumanMessage("one"), silent])] == ["user", "assistant"]
    assert tiny.get_num_tokens_from_messages(  # a template without tools does not show it
        [HumanMessage("one"), silent]
    ) == tiny.get_num_tokens_from_messages([HumanMessage("one")])
    with pytest.raises(UsageError, match="narrator"):
        turns_of([ChatMessage("five", role="narrator")])
    assert tiny.invoke(said).text


# --- arguments


def test_usual_names_and_overrides(tiny_options):
    model = ChatRAGBlend(
        model_name=tiny_options["model"], home=tiny_options["home"], dtype="float32", device="cpu",
        max_new_tokens=3, stop_sequences="zebra", temperature=None, ratio="auto",
    )  # fmt: skip
    assert (model.model, model.max_tokens, model.stop, model.temperature, model.ratio) == (
        tiny_options["model"], 3, ["zebra"], 0.0, "auto",
    )  # fmt: skip
    assert model.invoke("hello").usage_metadata["output_tokens"] == 3
    for longer in ({"max_tokens": 5}, {"max_new_tokens": 5}):
        assert model.invoke("hello", **longer).usage_metadata["output_tokens"] == 5
    assert model.bind(max_tokens=2).invoke("hello").usage_metadata["output_tokens"] == 2
    with pytest.raises(ModelInvalidRequestError, match="mean the same"):
        model.invoke("hello", max_tokens=5, max_new_tokens=6)


def test_a_key_for_a_service_is_dropped_and_shown_nowhere(tiny_options):
    """An application that swaps its model may go on passing one."""
    model = ChatRAGBlend(**tiny_options, api_key="sk-1", openai_api_key="sk-2", max_retries=3)
    assert model.model_kwargs == {}
    for shown in (repr(model), dumps(model), repr(model._identifying_params), repr(model._get_ls_params())):
        assert "sk-" not in shown
    with pytest.raises(ValidationError) as raised:
        ChatRAGBlend(model="a", model_name="b", api_key="sk-3", temperature=-1)
    assert "sk-" not in str(raised.value)


def test_finish_reason_and_stop(tiny):
    whole = tiny.invoke("hello", max_tokens=12)
    assert whole.response_metadata["finish_reason"] == "length"
    middle = whole.text[3:5]
    stopped = tiny.invoke("hello", max_tokens=12, stop=[middle])
    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_unknown_arguments(tiny_options):
    with pytest.warns(UserWarning, match="keep_tokens; transferred to model_kwargs"):
        model = ChatRAGBlend(**tiny_options, keep_tokens=64)
    assert model.model_kwargs == {"keep_tokens": 64}
    with (
        pytest.warns(match="transferred"),
        pytest.raises(ValidationError, match="'num_beams' is unknown"),
    ):
        ChatRAGBlend(**tiny_options, num_beams=4)
    with pytest.raises(ModelInvalidRequestError, match="did you mean 'temperature'"):
        ChatRAGBlend(**tiny_options).invoke("hello", temprature=0.5)


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
def test_timeout(tiny, way):
    tiny.invoke("hello", timeout=60)  # loading takes its own time
    with pytest.raises(ModelTimeoutError, match="within timeout="):
        by_all_ways(tiny, "hello", max_tokens=1900, timeout=0.3)[way]()


def test_a_finished_answer_is_given_to_who_takes_its_time(tiny):
    """The time was up while the reader held a piece: the rest, which was there, was thrown away, and TimedOut said."""
    whole = tiny.invoke("hello")
    stream = tiny.stream("hello", timeout=3600)
    pieces = [next(stream)]
    [limit] = [each for each in threading.enumerate() if getattr(each, "interval", None) == 3600]
    for each in threading.enumerate():
        if each.name == "ragblend-stream":
            each.join(SOON_S)
    limit.function()  # as if the time were up
    pieces += stream
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].usage_metadata == whole.usage_metadata


# --- bad input


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"max_tokens": 0},
        {"max_tokens": 3.5},
        {"top_k": "x"},
        {"top_p": 0},
        {"seed": "x"},
        {"stop": 3},
        {"ratio": 1.5},
        {"ratio": "much"},
        {"timeout": "long"},
        {"timeout": -1},
        {"passages": [7]},
        {"method": "cachblend"},
    ],
    ids=str,
)
def test_values_that_mean_nothing(tiny, tiny_options, wrong):
    """They came out as TypeErrors of torch, or, a timeout that is no number, as a trace in a thread and no limit."""
    for ask in by_all_ways(tiny, "hello", **wrong).values():
        with pytest.raises(ModelInvalidRequestError) as raised:
            ask()
        assert isinstance(raised.value, UsageError | ValueError)
    if "passages" not in wrong and wrong != {"temperature": float("nan")}:
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            ChatRAGBlend(**tiny_options | wrong)


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "no message to answer"),
        ([HumanMessage(["what is this?", IMAGE])], "reads text only"),
        ([HumanMessage([{"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}])], "reads text only"),
    ],
    ids=["nothing", "image", "audio"],
)
def test_messages_that_cannot_be_read(tiny, asked, said):
    with pytest.raises(ValueError, match=said) as raised:
        tiny.invoke(asked)
    assert isinstance(raised.value, ModelInvalidRequestError)
    assert isinstance(raised.value, RagBlendError)


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
def test_a_prompt_over_the_window_of_which_callbacks_hear_once_and_of_no_end(tiny, watcher, way):
    with pytest.raises(ContextOverflowError, match="reads at most") as raised:
        by_all_ways(tiny, "why " * 3000, {"callbacks": [watcher]})[way]()
    assert isinstance(raised.value, PromptTooLongError)
    [seen] = watcher.calls
    assert isinstance(seen.error, ContextOverflowError)
    assert (seen.text, seen.tokens) == ("", [])


# --- what it says of itself


def test_tokens_are_counted_by_its_own_tokenizer(tiny):
    tokenizer = tiny.backend.engine.tokenizer
    assert tiny.get_token_ids("the harbour") == tokenizer.encode("the harbour", add_special_tokens=False)
    asked = [SystemMessage("be brief"), HumanMessage("hello")]
    assert tiny.get_num_tokens_from_messages(asked) == tiny.invoke(asked).usage_metadata["input_tokens"]
    assert tiny.model_copy(update={"custom_get_token_ids": lambda text: [7]}).get_token_ids("a") == [7]


STRICT = (  # as Gemma's and Mistral's: the user begins, and roles alternate
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def test_parts_of_a_conversation_are_counted_as_trimming_and_memories_ask(make_tiny, tmp_path):
    """For none of the messages, and for an end that a template refuses, it raised."""
    model = make_tiny(model=str(tiny_models.save_model("llama", tmp_path / "strict", template=STRICT)))
    said = [HumanMessage("hello " * 9), AIMessage("hi " * 20), HumanMessage("word\n" * 20), AIMessage("yes")]
    assert model.get_num_tokens_from_messages([]) == 0
    alone = [model.get_num_tokens_from_messages([HumanMessage(message.text)]) for message in said]
    whole = model.get_num_tokens_from_messages(said)
    assert whole <= model.get_num_tokens_from_messages(said[::-1]) == sum(alone)
    assert model.get_num_tokens_from_messages(said[1:2]) == alone[1]
    for told in ({"strategy": "last"}, {"strategy": "first"}, {"strategy": "last", "start_on": "human"}):
        for allow_partial in (False, True):
            trimmed = trim_messages(
                said, max_tokens=whole - 10, token_counter=model, allow_partial=allow_partial, **told
            )
            assert trimmed
            assert model.get_num_tokens_from_messages(trimmed) < whole - 10
    with pytest.warns(LangChainDeprecationWarning):
        memory = ConversationTokenBufferMemory(llm=model, max_token_limit=20, return_messages=True)
    memory.save_context({"input": "hello"}, {"output": "word " * 300})
    assert memory.buffer == []


# --- stopping


@pytest.fixture
def forwards(tiny, passes):
    tiny.invoke("hello")
    return passes(tiny.backend)


def test_closing_or_dropping_a_stream_stops_the_device(tiny, forwards, stopped):
    for leave in (lambda stream: stream.close(), lambda stream: None):
        forwards.clear()
        stream = tiny.stream("hello", max_tokens=1900)
        assert next(stream) is not None
        leave(stream)
        del stream
        assert stopped(tiny.backend, forwards)
