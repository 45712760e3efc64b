"""`/v1/responses` gives the same answers as chat, as items and events."""

import json

import pytest
from servers import HOIST

from ragblend.app.serve.bodies import ResponsesBody

openai = pytest.importorskip("openai", reason="the client's package is not installed")

FUNCTION = {"type": "function", **HOIST["function"]}


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(**served.openai, max_retries=0) as client:
        yield client


def test_responses_equal_chat_answers_and_usage(served, client) -> None:
    model = served.service.model
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who built it?"}]
    chat = client.chat.completions.create(model=model, messages=said, max_tokens=6)
    asked = {"model": model, "instructions": "Be brief.", "max_output_tokens": 6}
    for input in (
        "Who built it?",
        [{"role": "user", "content": [{"type": "input_text", "text": "Who built it?"}]}],
    ):
        answer = client.responses.create(**asked, input=input)
        assert answer.output_text == chat.choices[0].message.content
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        usage = answer.usage
        assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 6)
        assert usage.total_tokens == usage.input_tokens + 6 and not answer.store
    stopped = client.responses.create(
        **asked, input="Who built it?", extra_body={"stop": [chat.choices[0].message.content[2]]}
    )
    assert stopped.status == "completed" and stopped.incomplete_details is None


def test_stream_events_are_in_order(served, client) -> None:
    asked = {"model": served.service.model, "input": "Tell me more.", "max_output_tokens": 5}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.output_tokens == 5
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {last.output[0].id}
    with served.client() as plain:
        text = plain.post("/v1/responses", json=asked | {"stream": True}).text
    assert text.startswith("event: response.created\ndata: {") and "[DONE]" not in text


def test_function_calls_and_their_results(caller) -> None:
    hoist = {"role": "user", "content": "Hoist it."}
    with openai.OpenAI(**caller.openai) as client:

        def answered(tokens=60, choice="required", asked=(hoist,), **more):
            return client.responses.create(
                model=caller.service.model, tools=[FUNCTION], max_output_tokens=tokens, tool_choice=choice,
                input=list(asked), **more,
            )  # fmt: skip

        answer = answered()
        events = list(answered(choice={"type": "function", "name": "hoist"}, stream=True))
        cut = list(answered(48, stream=True))
        given = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "It is up."}
        again = [hoist, *(item.model_dump() for item in answer.output), given]
        assert answered(4, "auto", again).output_text
    call = answer.output[-1]
    assert (call.type, call.name) == ("function_call", "hoist") and json.loads(call.arguments).keys() == {
        "up"
    }
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert (done.name, done.arguments) == ("hoist", call.arguments)
    assert events[-1].type == "response.completed" and events[-1].response.output[-1].name == "hoist"
    items = [event.item for event in cut if event.type == "response.output_item.done"]
    assert cut[-1].type == "response.incomplete" and cut[-1].response.output == items, "one id, made once"
    assert [(item.type, item.status) for item in items] == [
        ("message", "completed"), ("function_call", "incomplete"),
    ]  # fmt: skip


def test_text_and_calls_of_one_turn_are_one_message() -> None:
    calls = [
        {"type": "function_call", "call_id": f"c{n}", "name": "hoist", "arguments": '{"up": true}'}
        for n in (1, 2)
    ]
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Both of them."}]}
    given = [{"type": "function_call_output", "call_id": f"c{n}", "output": "up"} for n in (1, 2)]
    items = [
        {"role": "user", "content": "Hoist them."},
        said,
        *calls,
        {"type": "reasoning", "summary": []},
        *given,
    ]
    turns = ResponsesBody(model="m", input=items).to_chat_body().turns()
    assert [(turn.role, len(turn.calls)) for turn in turns] == [
        ("user", 0),
        ("assistant", 2),
        ("tool", 0),
        ("tool", 0),
    ]
    assert turns[1].pieces == ("Both of them.",) and [turn.call_id for turn in turns[2:]] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "image_generation_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "not text"),
        ({"input": [{"role": None, "content": "a"}]}, "messages.0.role"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "call_id": {}, "name": "f"}]}, "has an id that is no text"),
        ({"text": {"format": {"type": "grammar"}}}, "grammar"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
    ],
)
def test_unsupported_fields_are_refused(served, client, change, named) -> None:
    asked = {"model": served.service.model, "input": "Hi.", "max_output_tokens": 2}
    with pytest.raises(openai.BadRequestError, match=named):
        client.responses.create(**asked | change)
