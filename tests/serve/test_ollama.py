"""Ollama's API gives the answers of chat, completions and embeddings in Ollama's form, to Ollama's own client."""

import json

import pytest
from servers import HOIST, NUMBER, eager_to_call

from ragblend.app.serve.ollama import OllamaChatBody

ollama = pytest.importorskip("ollama", reason="the client's package is not installed")

HI = [{"role": "user", "content": "Who built it?"}]
SIX = {"num_predict": 6, "method": "full"}


def client_of(served):
    return ollama.Client(host=served.url, headers={"authorization": f"Bearer {served.keys['ada']}"})


@pytest.fixture(scope="module")
def client(served):
    with client_of(served) as client:
        yield client


def test_answers_equal_chats_and_a_stream_equals_the_whole(served, client) -> None:
    expected = served.chat(messages=HI, method="full").json()
    asked = {"model": f"{served.service.model}:latest", "messages": HI, "options": SIX}
    whole = client.chat(**asked, keep_alive="5m", think=False)
    *pieces, last = client.chat(**asked, stream=True)
    assert whole.message.content == expected["choices"][0]["message"]["content"]
    assert "".join(each.message.content for each in pieces) == whole.message.content
    assert [each.done for each in pieces] == [False] * len(pieces) and not last.message.content
    for end in (whole, last):
        assert (end.done, end.done_reason, end.model) == (True, "length", served.service.model)
        assert (end.prompt_eval_count, end.eval_count) == (expected["usage"]["prompt_tokens"], 6)
        assert end.load_duration + end.prompt_eval_duration + end.eval_duration == end.total_duration
        assert end.prompt_eval_duration > 1_000_000, "nanoseconds"


def test_a_stream_is_lines_of_json_and_the_default(served) -> None:
    body = {"model": served.service.model, "messages": HI, "options": SIX}
    with served.client() as client:
        answer = client.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert len(lines) > 1 and lines[-1]["done"] and lines[-1]["kv"][0]["method"] == "full"


def test_generate_equals_chat_and_raw_text_equals_completions(served, client) -> None:
    model = served.service.model
    turns = [{"role": "system", "content": "Be brief."}, *HI]
    said = client.chat(model=model, messages=turns, options=SIX).message.content
    asked = {"model": model, "prompt": "Who built it?", "options": SIX}
    assert client.generate(**asked, system="Be brief.").response == said
    *pieces, last = client.generate(**asked, system="Be brief.", stream=True)
    assert "".join(each.response for each in pieces) == said and last.done_reason == "length"
    with served.client() as plain:
        body = {"model": model, "prompt": "Who built it?", "max_tokens": 6, "method": "full"}
        text = plain.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert client.generate(**asked, raw=True).response == text


def test_options_have_openais_meaning(served, client) -> None:
    def said(**options):
        return client.chat(model=served.service.model, messages=HI, options=SIX | options)

    text = said().message.content
    stopped = said(stop=[text[3:5]])
    assert stopped.message.content == text[: text.index(text[3:5])] and stopped.done_reason == "stop"
    sampled = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "repeat_penalty": 1.1, "repeat_last_n": None}
    openai = served.choice(
        messages=HI, method="full", temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.1
    )
    assert said(**sampled, num_ctx=4096, mirostat=0).message.content == openai["message"]["content"] != text
    window = client.show(served.service.model).modelinfo["ragblend.context_length"]
    endless = said(num_predict=-1)
    assert endless.prompt_eval_count + endless.eval_count == window


def test_log_probabilities(served, client) -> None:
    answer = client.chat(model=served.service.model, messages=HI, options=SIX, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 6
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in answer.logprobs)


@pytest.mark.parametrize(("wanted", "keys"), [("json", None), (NUMBER, {"n"})])
def test_format_is_json_or_a_schema(served, client, wanted, keys) -> None:
    answer = client.chat(model=served.service.model, messages=HI, format=wanted, options={"num_predict": 40})
    found = json.loads(answer.message.content)
    assert isinstance(found, dict) and keys in (None, found.keys())


def test_embeddings_equal_openais(served, client) -> None:
    name = client.list().models[1].model
    with served.client() as plain:
        body = {"model": name, "input": ["a boat", "a quay"]}
        expected = [each["embedding"] for each in plain.post("/v1/embeddings", json=body).json()["data"]]
    found = client.embed(model=name, input=["a boat", "a quay"], truncate=True, options={"num_ctx": 512})
    assert found.embeddings == expected and found.prompt_eval_count == 4
    assert client.embeddings(model=name, prompt="a boat").embedding == pytest.approx(expected[0], abs=1e-5)


def test_the_model_is_listed_shown_and_loaded(served, client) -> None:
    model = served.service.model
    assert [each.model for each in client.list().models] == list(served.service.models)
    assert [each.model for each in client.ps().models] == [model]
    assert client.show(model).capabilities == ["completion"]
    assert client.show(served.service.models[1].upper()).capabilities == ["embedding"]
    for loaded in (client.generate(model=model), client.chat(model=model)):
        assert (loaded.done, loaded.done_reason) == (True, "load")
    with served.client() as plain:
        assert plain.get("/api/version").json().keys() == {"version"}
        for older in ({"name": model}, {"name": model, "model": ""}, {"name": "", "model": model}):
            assert plain.post("/api/show", json=older).json()["capabilities"] == ["completion"]
        assert plain.head("/").status_code == 200, "Ollama's command line asks this first"


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_runs_to_its_end(caller, stream) -> None:
    messages = [{"role": "user", "content": "Hoist it."}]
    with client_of(caller) as client:
        assert client.show(caller.service.model).capabilities == ["completion", "tools"]

        def answer(tokens):
            asked = {"model": caller.service.model, "tools": [HOIST], "messages": messages, "stream": stream}
            found = client.chat(**asked, options={"num_predict": tokens})
            return list(found) if stream else [found]

        with eager_to_call():
            found = answer(60)
        [said] = [each.message for each in found if each.message.tool_calls]
        [call] = said.tool_calls
        assert call.function.name == "hoist" and call.function.arguments.keys() == {"up"}
        assert found[-1].done_reason == "stop"
        messages += [said, {"role": "tool", "tool_name": "hoist", "content": "It is up."}]
        ended = answer(5)
        assert "".join(each.message.content for each in ended) and ended[-1].eval_count == 5
        with eager_to_call():
            cut = answer(12)
        assert not any(each.message.tool_calls for each in cut) and cut[-1].done_reason == "length"


def test_results_answer_calls_by_name_or_in_order() -> None:
    """This API's own clients send no ids, which templates and other APIs need."""

    def call(name):
        return {"function": {"name": name, "arguments": {"up": True}}}

    messages = [
        {"role": "user", "content": "Both of them."},
        {"role": "assistant", "content": "", "tool_calls": [call("hoist"), call("lower")]},
        {"role": "tool", "tool_name": "lower", "content": "down"},
        {"role": "tool", "content": "up"},
        {"role": "assistant", "tool_calls": [call("hoist") | {"id": "mine"}]},
        {"role": "tool", "tool_call_id": "mine", "content": "up again"},
    ]
    turns = OllamaChatBody(model="m", messages=messages).to_chat_body().turns()
    first, second = (each.id for each in turns[1].calls)
    assert first != second and [each.arguments for each in turns[1].calls] == [{"up": True}] * 2
    assert [turn.call_id for turn in turns if turn.role == "tool"] == [second, first, "mine"]
    assert turns[4].calls[0].id == "mine"
    calls = [call("hoist") | {"id": "a"}, call("hoist") | {"id": "b"}]
    results = [{"role": "tool", "tool_call_id": "b", "content": "up"}, {"role": "tool", "content": "up"}]
    by_id = OllamaChatBody(model="m", messages=[{"role": "assistant", "tool_calls": calls}, *results])
    assert [turn.call_id for turn in by_id.to_chat_body().turns()[1:]] == ["b", "a"], (
        "`a` was taken by b's result"
    )
    alone = OllamaChatBody(model="m", messages=[{"role": "tool", "content": "up"}] * 2)
    assert [turn.role for turn in alone.to_chat_body().turns()] == ["tool", "tool"], "Ollama asks for no call"


def called(arguments):
    call = {"function": {"name": "hoist", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("path", "change", "status", "named"),
    [
        ("chat", {"model": "llama3"}, 404, "There is no model 'llama3'; there is 'llama'"),
        ("generate", {"model": "llama3", "prompt": ""}, 404, "There is no model 'llama3'"),
        ("embed", {"model": "nomic", "input": "a"}, 404, "the embedding model is 'all-MiniLM-L6-v2'"),
        ("show", {"model": "llama3"}, 404, "There is no model 'llama3'"),
        ("show", {"model": "", "name": "llama3"}, 404, "There is no model 'llama3'"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, 400, "messages.0.images"),
        ("chat", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages.0.role"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages.0.content"),
        ("chat", {"tools": [{"name": "f", "input_schema": {}}]}, 400, '"function": {"name", "description"'),
        ("chat", {"tools": [HOIST]}, 400, "calls no tools"),
        ("chat", {"tools": [HOIST], "tool_choice": "required"}, 400, "tool_choice"),
        ("chat", {"keep_alive": 0}, 400, "keep_alive"),
        ("generate", {"prompt": "a", "keep_alive": "0s"}, 400, "keep_alive"),
        ("chat", {"think": "high"}, 400, "think"),
        ("chat", {"format": "yaml"}, 400, "format"),
        ("chat", {"options": {"num_predict": 0}}, 400, "options.num_predict"),
        ("chat", {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("chat", {"options": {"presence_penalty": 5}}, 400, "presence_penalty"),
        ("chat", {"messages": [*HI, called("up")]}, 400, "messages[1].tool_calls[0].function.arguments must be an"),
        ("chat", {"options": {"max_tokens": 5}}, 400, "options.max_tokens"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"prompt": "a", "context": [1, 2]}, 400, "context"),
        ("generate", {"prompt": "a", "images": ["eA=="]}, 400, "images"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "raw"),
        ("generate", {"prompt": "word " * 3000}, 400, "tokens"),
        ("embed", {"input": ["a"], "dimensions": 8}, 400, "dimensions"),
        ("embed", {"input": []}, 400, "input"),
        ("pull", {}, 400, "cannot pull any; `ragblend models`"),
        ("nothing", {}, 404, "Not Found"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named_in_ollamas_form(served, path, change, status, named) -> None:
    model = served.service.models[path == "embed"]
    basis = {"chat": {"messages": HI}, "embed": {"input": "a"}}.get(path, {})
    with served.client() as client:
        answer = client.post(f"/api/{path}", json={"model": model} | basis | change)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"} and named in answer.json()["error"]


def test_a_request_without_a_key_is_refused(served) -> None:
    with (
        ollama.Client(host=served.url) as client,
        pytest.raises(ollama.ResponseError, match="API key") as found,
    ):
        client.list()
    assert found.value.status_code == 401


def test_an_error_after_the_first_token_is_a_line_of_the_stream(served, client) -> None:
    asked = {"model": served.service.model, "messages": HI, "stream": True, "options": {"num_predict": 100}}
    stream = client.chat(**asked)
    next(stream)
    with served.failing(), pytest.raises(ollama.ResponseError, match="device"):
        list(stream)
