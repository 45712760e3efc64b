"""Anthropic's `/v1/messages` gives chat's answers as blocks and events, to Anthropic's own client."""

import json

import pytest
from servers import HOIST, LEDGER, LIGHT, NUMBER, eager_to_call

from ragblend.app.serve.anthropic import MessagesBody

anthropic = pytest.importorskip("anthropic", reason="the client's package is not installed")

HI = [{"role": "user", "content": "Who built it?"}]
FLAG = {
    "name": "hoist",
    "description": "A flag.",
    "input_schema": HOIST["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
FULL = {"extra_body": {"method": "full"}}


def client_of(served, **told):
    told = told or {"api_key": served.keys["ada"]}
    return anthropic.Anthropic(base_url=served.url, max_retries=0, **told)


@pytest.fixture(scope="module")
def client(served):
    with client_of(served) as client:
        yield client


def test_messages_equal_chats_answers_and_usage(served, client) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *HI]
    expected = served.chat(messages=turns, method="full").json()
    block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    asked = {"model": served.service.model, "max_tokens": 6, "metadata": {"user_id": "ada"}, **FULL}
    for system in ("Be brief.", [block]):
        answer = client.messages.create(**asked, system=system, messages=HI)
        [said] = answer.content
        assert said.text == expected["choices"][0]["message"]["content"]
        assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "max_tokens")
        usage = answer.usage
        assert (usage.output_tokens, usage.cache_read_input_tokens) == (6, 0)
        assert usage.input_tokens == expected["usage"]["prompt_tokens"]


def test_stream_events_are_in_order_and_equal_the_whole_answer(served, client) -> None:
    asked = {"model": served.service.model, "max_tokens": 6, "messages": HI, **FULL}
    whole = client.messages.create(**asked)
    events = list(client.messages.create(**asked, stream=True))
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(deltas) == whole.content[0].text and len(deltas) > 1
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.input_tokens) == (whole.stop_reason, whole.usage.input_tokens)
    assert last.usage.output_tokens == 6
    with served.client() as plain:
        body = {**asked, "stream": True}
        text = plain.post("/v1/messages", json=body | body.pop("extra_body")).text
    assert text.startswith("event: message_start\ndata: {") and "[DONE]" not in text


def test_the_stop_sequence_is_named(served, client) -> None:
    asked = {"model": served.service.model, "max_tokens": 8, "messages": HI, **FULL}
    text = client.messages.create(**asked).content[0].text
    answer = client.messages.create(**asked, stop_sequences=["never said", text[3:5]])
    assert answer.content[0].text == text[: text.index(text[3:5])]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[3:5])


def test_reused_tokens_are_read_from_the_cache(served, client) -> None:
    """Passages that occur in two prompts, whether the client marks them or not."""

    def asked(question):
        blocks = [
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
            for text in (LEDGER, "\n\n", LIGHT, "\n\n")
        ]
        content = [*blocks, {"type": "text", "text": question}]
        answer = client.messages.create(
            model=served.service.model,
            max_tokens=4,
            messages=[{"role": "user", "content": content}],
        )
        served.engine.finish_background()
        return answer.usage

    usages = [asked(question) for question in ("Who kept them?", "Who wound it?", "What did nobody see?")]
    assert usages[0].cache_read_input_tokens == 0 and usages[-1].cache_read_input_tokens > 60
    assert usages[-1].input_tokens + usages[-1].cache_read_input_tokens > 100
    assert usages[-1].input_tokens < usages[0].input_tokens - 60


def test_an_answer_by_a_schema(served, client) -> None:
    answer = client.messages.create(
        model=served.service.model,
        max_tokens=40,
        messages=HI,
        output_config={"format": {"type": "json_schema", "schema": NUMBER}},
    )
    assert json.loads(answer.content[0].text).keys() == {"n"}


def test_a_loop_of_tools_runs_to_its_end(caller) -> None:
    model, messages = caller.service.model, [{"role": "user", "content": "Hoist it."}]
    with client_of(caller) as client:

        def answered(tokens, **choice):
            return client.messages.create(
                model=model, tools=[FLAG], messages=messages, max_tokens=tokens, **choice
            )

        def streamed(tokens, choice):
            asked = {"model": model, "tools": [FLAG], "messages": messages, "max_tokens": tokens}
            with client.messages.stream(**asked, tool_choice=choice) as stream:
                return list(stream), stream.get_final_message()

        with eager_to_call():
            answer = answered(60)
        [call] = answer.content
        assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "hoist")
        assert call.input.keys() == {"up"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is up."}
        messages += [
            {"role": "assistant", "content": [each.model_dump() for each in answer.content]},
            {"role": "user", "content": [result]},
        ]
        for choice in ({}, {"tool_choice": {"type": "none"}}):
            ended = answered(4, **choice)
            assert ended.stop_reason == "max_tokens" and ended.content[0].text
        named = {"type": "tool", "name": "hoist", "disable_parallel_tool_use": True}
        for choice in ({"type": "any"}, named):
            events, last = streamed(60, choice)
            [made] = last.content
            assert made.name == "hoist" and made.input.keys() == {"up"}
            assert [e.type for e in events if e.type.startswith("content_block")] == [
                "content_block_start", "content_block_delta", "content_block_stop",
            ]  # fmt: skip
        _, cut = streamed(12, {"type": "any"})
        assert cut.stop_reason == "max_tokens" and cut.content == []


def test_results_of_tools_are_turns_before_the_text() -> None:
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "hoist", "input": {"up": True}} for n in (1, 2)]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    failed = {"type": "text", "text": "It is stuck."}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "up"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [failed], "is_error": True},
    ]
    body = MessagesBody(
        model="m",
        max_tokens=4,
        messages=[
            {"role": "user", "content": "Hoist them."},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Both."}, *calls]},
            {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
        ],
    )
    turns = body.to_chat_body().turns()
    assert [(turn.role, turn.text, turn.call_id) for turn in turns] == [
        ("user", "Hoist them.", None),
        ("assistant", "Both.", None),
        ("tool", "up", "c1"),
        ("tool", "Error: It is stuck.", "c2"),
        ("user", "And now?", None),
    ]
    assert [call.id for call in turns[1].calls] == ["c1", "c2"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
OPENAIS = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def user(*blocks):
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": user(IMAGE)}, r"messages\[0\].content\[0\]: a block of the type 'image'"),
        ({"messages": user({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]})}, "type 'image'"),
        ({"messages": user({"type": "tool_result", "tool_use_id": "a", "content": 5})}, "not supported"),
        ({"messages": user({"type": "text", "text": 5})}, "not text"),
        ({"messages": user({"type": "tool_use", "id": "a", "name": "f", "input": 5})}, "input must be an object"),
        ({"messages": [*HI, {"role": "assistant", "content": "The"}]}, "cannot be continued"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"system": [IMAGE]}, "system: a block of the type 'image'"),
        ({"tools": [OPENAIS]}, "written as for OpenAI"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [FLAG]}, "calls no tools"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type is 'maybe'"),
        ({"tool_choice": {"type": []}}, r"tool_choice.type is \[\]"),
        ({"stop_sequences": ["a"] * 17}, "stop: List should have at most 16 items"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"stop": ["a"]}, "stop"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named_in_anthropics_form(served, client, change, named) -> None:
    body = {"model": served.service.model, "max_tokens": 2, "messages": HI} | change
    with pytest.raises(anthropic.BadRequestError, match=named) as found:
        client.post("/v1/messages", body=body, cast_to=object)
    assert found.value.body["type"] == "error"
    assert found.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("told", "change", "kind"),
    [
        ({"api_key": "wrong"}, {}, anthropic.AuthenticationError),
        ({}, {"model": "claude-none"}, anthropic.NotFoundError),
        ({}, {"messages": user({"type": "text", "text": "a" * 10_000_000})}, anthropic.RequestTooLargeError),
    ],
)
def test_errors_have_the_clients_own_classes(served, told, change, kind) -> None:
    asked = {"model": served.service.model, "max_tokens": 2, "messages": HI} | change
    with client_of(served, **told) as client, pytest.raises(kind) as found:
        client.messages.create(**asked)
    assert found.value.body["error"].keys() == {"type", "message"}


def test_both_forms_of_a_key_are_accepted(served) -> None:
    asked = {"model": served.service.model, "max_tokens": 1, "messages": HI}
    with client_of(served, auth_token=served.keys["ada"]) as client:
        assert client.messages.create(**asked).usage.output_tokens == 1
    with served.client(None) as plain:
        assert plain.get("/v1/models", headers={"x-api-key": served.keys["ada"]}).status_code == 200


def test_an_error_after_the_first_token_is_an_event_of_the_stream(served, client) -> None:
    stream = client.messages.create(
        model=served.service.model, max_tokens=100, messages=HI, stream=True, **FULL
    )
    next(iter(stream))
    with served.failing(), pytest.raises(anthropic.APIStatusError, match="device"):
        list(stream)
