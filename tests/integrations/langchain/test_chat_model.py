"""ChatRAGBlend on a tiny model: all ways to call it, its arguments, and its errors."""

import asyncio
import threading

import pytest
import tiny_models
from langchain_classic.memory import ConversationTokenBufferMemory
from langchain_core._api import LangChainDeprecationWarning
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError
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
from watching import Watcher

from ragblend.integrations.langchain import ChatRAGBlend, encode_documents
from ragblend.integrations.langchain.messages import turns_of
from ragblend.kvstore.errors import PromptTooLongError, RagBlendError, UsageError

QUESTION = "Who rings the bell?"


def ask(model, way, *asked, **options):
    """The answer, or the chunks of a stream."""

    async def read():
        return [chunk async for chunk in model.astream(*asked, **options)]

    if way == "astream":
        return asyncio.run(read())
    answer = getattr(model, way)(*asked, **options)
    return list(answer) if way == "stream" else asyncio.run(answer) if way == "ainvoke" else answer


def kv_of(answer):
    return answer.response_metadata["kv"]


def chunks_of(answer):
    return kv_of(answer)["chunks"]


def blocks(documents, question=QUESTION):
    content = []
    for document in documents:
        content += [{"type": "text", "text": document.page_content, "id": document.id}, "\n\n"]
    return [HumanMessage([*content, {"type": "text", "text": question}])]


@pytest.mark.filterwarnings("ignore:.*version='v3'.*:langchain_core._api.LangChainBetaWarning")
def test_every_piece_is_reported_once(tiny, tiny_options):
    # Said explicitly, streaming=False would switch off `stream` as well: LangChain's rule.
    streaming = ChatRAGBlend(**tiny_options, max_tokens=8, streaming=True)
    ways = {
        "stream": lambda config: ask(tiny, "stream", "hello", config),
        "astream": lambda config: ask(tiny, "astream", "hello", config),
        "streaming=True": lambda config: [streaming.invoke("hello", config)],
        "stream_events": lambda config: [tiny.stream_events("hello", config, version="v3").output],
    }
    for way, call in ways.items():
        watcher = Watcher()
        pieces = [str(answer.text) for answer in call({"callbacks": [watcher]})]
        [seen] = watcher.calls
        assert "".join(seen.tokens) == "".join(pieces) == seen.text, way
        assert len([token for token in seen.tokens if token]) > 3, way
        assert seen.kv["fresh"] > 0


def test_a_model_with_configurable_fields_streams(tiny):
    model = tiny.configurable_fields(max_tokens=ConfigurableField(id="most"))
    pieces = list(model.stream("hello", {"configurable": {"most": 8}}))
    assert len([piece for piece in pieces if piece.text]) > 1


# --- documents in prompts


def test_documents_are_named_by_content_blocks_calls_artifacts_and_text(make_tiny, documents):
    tides, bell, lamp = documents
    model = make_tiny(learn_from_prompts=False)  # the same text is in many of these prompts
    assert chunks_of(model.invoke(blocks([bell, tides]))) == ["bell", "tides"]
    text = f"Notes: {lamp.page_content} And: {bell.page_content}\n\n{QUESTION}"
    assert chunks_of(model.invoke(text)) == []
    assert chunks_of(model.invoke(text, passages=[bell, lamp])) == ["lamp", "bell"]
    assert chunks_of(model.bind(passages=[bell]).invoke(text)) == ["bell"]
    assert chunks_of(model.invoke(text, passages=bell)) == ["bell"]
    artifact = [bell, {"page_content": lamp.page_content, "id": "l"}]
    tool = ToolMessage(text, tool_call_id="1", artifact=artifact)
    assert chunks_of(model.invoke([HumanMessage(QUESTION), AIMessage(""), tool])) == ["l", "bell"]
    encode_documents([tides, bell], model, show_progress=False)
    assert chunks_of(model.invoke(text)) == ["bell"]


def test_blocks_without_an_id_of_their_own_are_text(make_tiny, documents):
    automatic = create_text_block(documents[0].page_content)
    assert automatic["id"]
    said = AIMessage([{"type": "text", "text": documents[1].page_content, "id": "msg_1"}])
    assert chunks_of(make_tiny().invoke([HumanMessage([automatic]), said, HumanMessage(QUESTION)])) == []


def test_an_edited_document_is_a_miss_and_replaces_the_old_one(make_tiny, documents):
    """The old text's KV must not be used for the new text."""
    model = make_tiny()
    encode_documents(documents, model, show_progress=False)
    edited = Document(documents[1].page_content.replace("herring", "butter"), id="bell")
    kv = kv_of(model.invoke(blocks([edited])))
    assert (kv["chunks"], kv["hits"], kv["misses"]) == (["bell"], 0, 1)
    encode_documents([edited], model, show_progress=False)
    assert kv_of(model.invoke(f"{edited.page_content} {QUESTION}"))["hits"] == 1
    assert chunks_of(model.invoke(f"{documents[1].page_content} {QUESTION}")) == []


def test_messages_become_turns_with_the_templates_roles(tiny):
    messages = [
        SystemMessage("be brief"),
        HumanMessage("one"),
        AIMessage("two"),
        ToolMessage("three", tool_call_id="1"),
        ChatMessage("four", role="user"),
    ]
    assert [turn.role for turn in turns_of(messages)] == ["system", "user", "assistant", "tool", "user"]
    assert tiny.invoke(messages).text
    one, silent = HumanMessage("one"), AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    assert [turn.role for turn in turns_of([one, silent])] == ["user", "assistant"]
    count = tiny.get_num_tokens_from_messages
    assert count([one, silent]) == count([one])  # a template without tools does not show it
    with pytest.raises(UsageError, match="narrator"):
        turns_of([ChatMessage("five", role="narrator")])


# --- arguments


def test_other_names_of_arguments_and_overrides_in_a_call(tiny_options):
    where = {name: value for name, value in tiny_options.items() if name != "model"}
    more = {"max_new_tokens": 3, "stop_sequences": "zebra", "temperature": None, "ratio": "auto"}
    model = ChatRAGBlend(model_name=tiny_options["model"], **where, **more)
    assert (model.model, model.max_tokens, model.stop) == (tiny_options["model"], 3, ["zebra"])
    assert (model.temperature, model.ratio) == (0.0, "auto")
    for options, tokens in (({}, 3), ({"max_tokens": 5}, 5), ({"max_new_tokens": 5}, 5)):
        assert model.invoke("hello", **options).usage_metadata["output_tokens"] == tokens
    assert model.bind(max_tokens=2).invoke("hello").usage_metadata["output_tokens"] == 2
    with pytest.raises(ModelInvalidRequestError, match="mean the same"):
        model.invoke("hello", max_tokens=5, max_new_tokens=6)


def test_a_hosted_models_key_is_dropped_and_never_shown(tiny_options):
    model = ChatRAGBlend(**tiny_options, api_key="sk-1", openai_api_key="sk-2", max_retries=3)
    assert model.model_kwargs == {}
    for shown in (repr(model), dumps(model), repr(model._identifying_params), repr(model._get_ls_params())):
        assert "sk-" not in shown


def test_the_finish_reason_tells_a_stop_text_from_the_most_tokens(tiny):
    whole = tiny.invoke("hello", max_tokens=12)
    assert whole.response_metadata["finish_reason"] == "length"
    middle = whole.text[3:5]
    stopped = tiny.invoke("hello", max_tokens=12, stop=[middle])
    assert stopped.text == whole.text[: whole.text.index(middle)]
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_unknown_arguments_go_to_model_kwargs_where_the_engine_checks_them(tiny_options):
    with pytest.warns(UserWarning, match="keep_tokens; transferred to model_kwargs"):
        model = ChatRAGBlend(**tiny_options, keep_tokens=64)
    assert model.model_kwargs == {"keep_tokens": 64}
    with pytest.warns(match="transferred"), pytest.raises(ValidationError, match="'num_beams' is unknown"):
        ChatRAGBlend(**tiny_options, num_beams=4)


def test_a_finished_answer_is_delivered_to_a_slow_reader(tiny):
    """If the time ran out while the reader held a piece, the finished rest was dropped with a TimedOut."""
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


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
AUDIO = {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "no message to answer"),
        ([HumanMessage(["what is this?", IMAGE])], "reads text only"),
        ([HumanMessage([AUDIO])], "reads text only"),
    ],
    ids=["nothing", "image", "audio"],
)
def test_messages_that_cannot_be_read_are_refused(tiny, asked, message):
    with pytest.raises(ValueError, match=message) as raised:
        tiny.invoke(asked)
    assert isinstance(raised.value, ModelInvalidRequestError)
    assert isinstance(raised.value, RagBlendError)


@pytest.mark.parametrize("way", ["invoke", "astream"])
def test_a_prompt_over_the_window_is_refused_and_reported_once_to_callbacks(tiny, watcher, way):
    with pytest.raises(ContextOverflowError, match="reads at most") as raised:
        ask(tiny, way, "why " * 3000, {"callbacks": [watcher]})
    assert isinstance(raised.value, PromptTooLongError)
    [seen] = watcher.calls
    assert isinstance(seen.error, ContextOverflowError)
    assert (seen.text, seen.tokens) == ("", [])


# --- counting tokens


def test_tokens_are_counted_by_the_models_own_tokenizer(tiny):
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


def test_parts_of_a_conversation_are_counted_for_trimming_and_memories(make_tiny, tmp_path):
    """Counting raised for no messages, and for an end of a conversation that a template refuses."""
    model = make_tiny(model=str(tiny_models.save_model("llama", tmp_path / "strict", template=STRICT)))
    count = model.get_num_tokens_from_messages
    said = [HumanMessage("hello " * 9), AIMessage("hi " * 20), HumanMessage("word\n" * 20), AIMessage("yes")]
    assert count([]) == 0
    alone = [count([HumanMessage(message.text)]) for message in said]
    whole = count(said)
    assert whole <= count(said[::-1]) == sum(alone)
    assert count(said[1:2]) == alone[1]
    for how in ({"strategy": "last"}, {"strategy": "first"}, {"strategy": "last", "start_on": "human"}):
        for partial in (False, True):
            options = how | {"max_tokens": whole - 10, "token_counter": model, "allow_partial": partial}
            trimmed = trim_messages(said, **options)
            assert trimmed
            assert count(trimmed) < whole - 10
    with pytest.warns(LangChainDeprecationWarning):
        memory = ConversationTokenBufferMemory(llm=model, max_token_limit=20, return_messages=True)
    memory.save_context({"input": "hello"}, {"output": "word " * 300})
    assert memory.buffer == []
