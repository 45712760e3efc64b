"""Invalid requests get an error in OpenAI's form with a documented status, and the server continues."""

import json
import re
import socket
import threading
import time
from datetime import datetime, timedelta

import httpx
import pytest
from pydantic import ValidationError
from servers import events, post_raw, serving
from waiting import SOON_S, until

from ragblend.app import database
from ragblend.app.serve.anthropic import MessagesBody
from ragblend.app.serve.application import STATUSES
from ragblend.app.serve.bodies import AskBody, ChatBody, ResponsesBody
from ragblend.app.serve.errors import KNOWN_ERRORS, ApiError
from ragblend.app.serve.ollama import OllamaChatBody, OllamaEmbedBody
from ragblend.app.serve.rerank import RerankBody
from ragblend.app.serve.service import Limits
from ragblend.engine.model.decoder import TransformersDecoder

HI = [{"role": "user", "content": "Hi."}]
CHAT, TEXT, ASK = "/v1/chat/completions", "/v1/completions", "/v1/rag/ask"
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"flag": "x"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def check(response, status, code=None):
    assert response.status_code == status, response.text
    assert status in STATUSES
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert code in (None, error["code"]), error
    return error


@pytest.mark.parametrize(
    "row",  # path, what the body has, status, code, and what the message says
    [
        (CHAT, {"model": "gpt-none"}, 404, "model_not_found"),
        (CHAT, {"messages": []}, 400, "invalid_value"),
        (CHAT, {"messages": None}, 400, "invalid_value"),
        (CHAT, {"no_such_option": 1}, 400, "unknown_parameter", "no_such_option: this server has no such parameter"),
        (CHAT, {"max_tokens": 0}, 400, "invalid_value"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 3}, 400, "invalid_value"),
        (CHAT, {"temperature": "hot"}, 400, "invalid_value"),
        (CHAT, {"temperature": -1}, 400, "invalid_value"),
        (CHAT, {"seed": 10**40}, 400, "invalid_value"),
        (CHAT, {"method": "guess"}, 400, "invalid_value"),
        (CHAT, {"ratio": 2}, 400, "invalid_value"),
        (CHAT, {"ratio": "fast"}, 400, "invalid_value", "ratio: Input should be 'auto'"),
        (CHAT, {"modalities": ["audio"]}, 400, "invalid_value", "modalities.0: Input should be 'text'"),
        (CHAT, {"best_of": 2}, 400, "invalid_value", "best_of: Input should be 1"),
        (CHAT, {"min_tokens": 5}, 400, "invalid_value", "min_tokens: Input should be 0"),
        (CHAT, {"presence_penalty": 3}, 400, "invalid_value", "presence_penalty must be from -2 to 2, not 3"),
        (CHAT, {"min_p": 1.5}, 400, "invalid_value", "min_p must be from 0"),
        (CHAT, {"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias must have token ids"),
        (CHAT, {"logit_bias": {"1": "x"}}, 400, "invalid_value", "logit_bias must have token ids"),
        (CHAT, {"logit_bias": {"1": 101}}, 400, "invalid_value", "token ids with numbers from -100 to 100"),
        (CHAT, {"logit_bias": {"400": 1}}, 400, "invalid_value", "names the token 400; the model has 400 tokens"),
        (CHAT, {"stop": ["a"] * 17}, 400, "invalid_value", "stop: List should have at most 16 items"),
        (CHAT, {"stop": [1]}, 400, "invalid_value", "stop.0: Input should be a valid string"),
        (CHAT, {"messages": "Hi."}, 400, "invalid_value", "messages: Input should be a valid list"),
        (CHAT, {"messages": [{**HI[0], "images": ["x"]}]}, 400, "invalid_value", "messages.0.images: List should have"),
        (CHAT, {"messages": [CALLED]}, 400, "invalid_value", "messages[0].tool_calls has arguments that are no text"),
        (CHAT, {"tools": [TOOL]}, 400, "unsupported"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"function": {"name": ["f"]}}}, 400, "invalid_value"),
        (CHAT, {"response_format": {"type": "json_schema"}}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": ["a"]}]}]}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value"),
        (CHAT, {"messages": HI, "tools": [{"x": "\udfff"}]}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, 400, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_001}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 10_000}, 400, "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10_000_000}]}, 413, None),
        (CHAT, {"messages": [{"role": "user", "content": "a " * (1 << 20)}]}, 400, "context_length_exceeded"),
        (TEXT, {"prompt": "a " * (1 << 18)}, 400, "context_length_exceeded"),
        ("/v1/responses", {"input": "a " * (1 << 18)}, 400, "context_length_exceeded"),
        (ASK, {"question": "a " * (1 << 18)}, 400, "context_length_exceeded"),
        (CHAT, {"timeout": 0.001, "max_tokens": 1500}, 408, "timeout"),
        ("/v1/responses", {"input": "a", "metadata": {"a": float("nan")}}, 400, "invalid_value"),
        ("/v1/responses", {"input": "a", "text": {"nonsense": 1}}, 400, "invalid_value"),
        ("/v1/responses", {"input": "a", "text": {"verbosity": "low"}}, 400, "invalid_value"),
        (TEXT, {"prompt": "a", "echo": True}, 400, "invalid_value", "echo: Input should be False"),
        (TEXT, {"prompt": ["a"] * 9}, 400, "invalid_value", "prompt: List should have at most 8 items"),
        (TEXT, {"prompt": [1, 2]}, 400, "invalid_value", "prompt.0: Input should be a valid string"),
        ("/v1/embeddings", {"model": "other", "input": "a"}, 404, "model_not_found"),
        ("/v1/embeddings", {"model": "all-MiniLM-L6-v2", "input": "a", "dimensions": 8}, 400, "invalid_value"),
        (ASK, {"question": "  "}, 400, "invalid_value"),
        (ASK, {"question": "a", "method": "guess"}, 400, "invalid_value"),
        (ASK, {"question": "a", "collection": "default"}, 404, "collection_not_found"),
        (ASK, {"question": "a", "collection": ""}, 404, "collection_not_found"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_with_an_error_code(served, row) -> None:
    path, change, status, code, *message = row
    named = {"model": served.service.model}
    basis = {CHAT: named | {"messages": HI}, TEXT: named, "/v1/responses": named}
    body = json.dumps(basis.get(path, {}) | change).encode()
    with served.client() as client:
        answer = post_raw(client, path, body)
        error = check(answer, status, code)
        assert all(each in error["message"] for each in message), error
        assert (answer.headers.get("x-should-retry") == "false") == (code == "timeout")
        streams = post_raw(client, path, body[:-1] + b', "stream": true}')
    if path in (CHAT, TEXT, ASK):
        if code == "timeout" and streams.status_code == 200:  # it had begun by then
            assert '"code":"timeout"' in streams.text.splitlines()[-2], streams.text
        else:
            check(streams, status, code)
    assert served.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 50_000, b"9" * 5000, b'{"model": NaN}']
)
def test_bodies_that_are_no_json_object_are_refused_in_the_form_of_each_api(served, body) -> None:
    with served.client() as client:
        check(post_raw(client, CHAT, body), 400)
        for path, is_error in (
            ("/v1/messages", lambda said: said["error"]["type"] == "invalid_request_error"),
            ("/api/chat", lambda said: said.keys() == {"error"} and isinstance(said["error"], str)),
        ):
            answer = post_raw(client, path, body)
            assert answer.status_code == 400 and is_error(answer.json()), answer.text


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    """Python parses slightly deeper JSON than it writes."""
    nested: list[object] = []
    for _ in range(10_000):
        nested = [nested]
    with pytest.raises(ValidationError, match="nested too deeply"):
        ChatBody.model_validate({"model": "a", "messages": HI, "tools": nested})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (ChatBody, {"tools": [1] * 9}),
        (ChatBody, {"messages": [1] * 9}),
        (ChatBody, {"messages": [{"role": "user", "tool_calls": [1] * 9}]}),
        (ChatBody, {"modalities": [1] * 9}),
        (ChatBody, {str(n): 1 for n in range(1000)}),
        (ResponsesBody, {"input": [1] * 9}),
        (ResponsesBody, {"tools": [1] * 9}),
        (ResponsesBody, {"include": [1] * 9}),
        (AskBody, {"history": [1] * 9}),
        (MessagesBody, {"messages": [{"role": "user", "content": [1] * 9}]}),
        (MessagesBody, {"system": [1] * 9}),
        (MessagesBody, {"tools": [1] * 9}),
        (MessagesBody, {"stop_sequences": [1] * 9}),
        (OllamaChatBody, {"messages": [{"role": "user", "tool_calls": [1] * 9}]}),
        (OllamaChatBody, {"tools": [1] * 9, "options": {"stop": [1] * 9}}),
        (OllamaEmbedBody, {"input": [1] * 9}),
        (RerankBody, {"documents": [1] * 9}),
    ],
)  # fmt: skip
def test_a_body_of_many_faults_is_refused_for_the_first_ones(kind, change) -> None:
    """Each item and each unknown field was an error: a body of 8 MiB held up all answers for half a minute."""
    basis = {
        "model": "",
        "messages": HI,
        "question": "a",
        "query": "a",
        "input": "a",
        "documents": ["a"],
        "max_tokens": 1,
    }
    given = {name: value for name, value in basis.items() if name in kind.model_fields}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(given | change)
    assert refused.value.error_count() < 5


def test_control_tokens_in_user_text_are_plain_text(served) -> None:
    """In user text they are several ordinary tokens, and do not end the turn."""
    plain, marked = (
        served.chat(text, max_tokens=1).json()["usage"]["prompt_tokens"]
        for text in ("<|im_end>", "<|im_end|>")
    )
    assert marked > plain - 3


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer", "Basic YTpi", "Bearer \udcff"])
def test_requests_without_a_valid_key_are_refused(served, key) -> None:
    headers = {} if key is None else {"authorization": key.encode("utf-8", "surrogateescape")}
    with served.client(None) as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            answer = client.get(path, headers=headers)
            check(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/healthz").json()["status"] in ("ok", "loading")


def test_other_hosts_and_other_sites_are_refused(served) -> None:
    with served.client() as client:
        check(client.get("/v1/models", headers={"host": "evil.example"}), 421)
        check(client.get("/v1/models", headers={"origin": "http://evil.example"}), 403)
        check(client.get("/v1/models", headers={"sec-fetch-site": "cross-site"}), 403)
        check(client.get("/v1/%2e%2e/x"), 404)
        check(client.get("/nothing"), 404)
        assert client.get("/v1/models", headers={"origin": served.url}).status_code == 200


def test_metrics_need_the_owners_key(served) -> None:
    with served.client("ada") as client:
        check(client.get("/metrics"), 403)


def test_one_device_error_is_retried(served) -> None:
    said = served.choice("Will it work?")["message"]["content"]
    for number in (0, -1):
        layers = served.engine.runtime.loaded.model.model.layers
        layers[number].register_forward_pre_hook(failing)
        answer = served.chat("Will it work?")
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == said


def test_a_repeated_device_error_hides_its_message(served, monkeypatch) -> None:
    served.chat()
    with monkeypatch.context() as broken:
        broken.setattr(TransformersDecoder, "run_layer", failing)
        error = check(served.chat("Will it work?"), 503, "device_failed")
    assert "secret" not in error["message"]
    assert served.chat("Will it work?").status_code == 200


def failing(*_):
    raise RuntimeError("the device at /secret/path is gone")


def test_an_error_after_the_first_token_is_an_event_of_the_stream(served) -> None:
    served.chat()
    read, steps, values = threading.Event(), [], []

    def fail(*_):
        steps.append(1)
        if read.wait(0 if len(steps) < 50 else SOON_S):
            raise RuntimeError("gone")

    body = {"model": served.service.model, "messages": HI, "max_tokens": 100, "stream": True}
    with (
        served.failing(fail),
        served.client() as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        for line in filter(None, answer.iter_lines()):
            values.append(json.loads(line.removeprefix("data: ")))
            if any(each["delta"].get("content") for each in values[-1].get("choices", ())):
                read.set()
    assert answer.status_code == 200
    assert values[-1]["error"]["code"] == "device_failed" and "choices" in values[0]
    assert events(served.chat("Will it stream?", stream=True))


def test_refused_requests_have_retry_after(home_of, tiny_folder) -> None:
    with serving(home_of(), tiny_folder, Limits(requests=2, requests_per_client=1)) as served:
        served.chat()
        answers = {}

        def ask(name):
            answers[name] = served.chat(name=name)

        waiting = [threading.Thread(target=ask, args=(name,)) for name in ("ada", "bob")]
        with served.engine.runtime.queue.turn():
            for thread in waiting:
                thread.start()
            until(lambda: served.service.admission.inside == 2)
            refused = [served.chat(name="ada"), served.chat(name="owner-key")]
            with served.client() as client:  # which had a thread each, however many came
                paths = ("/v1/documents", "/v1/documents/jobs")
                refused += [*map(client.get, paths), client.delete("/v1/documents/none")]
        for thread in waiting:
            thread.join(SOON_S)
        for answer in refused:
            check(answer, 429, "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert [answers[name].status_code for name in ("ada", "bob")] == [200, 200]
        assert served.chat().status_code == 200


@pytest.mark.parametrize("days", [1, -1])
def test_changing_the_system_clock_changes_no_answer_job_or_limit(served, monkeypatch, days) -> None:
    """While a question waits and a file is ingested, both with an earlier deadline; and afterwards."""
    told, answers = {"max_tokens": 20, "timeout": SOON_S, "method": "full", "stream": True}, []
    expected = events(served.chat("Hi.", **told))

    def uptime_s():
        return float(
            re.search(r"^ragblend_uptime_seconds (\S+)$", chief.get("/metrics").text, re.MULTILINE)[1]
        )

    def files(what):
        told = {"collection": "bob", "search": f"clock{days}"}
        return [each["state"] for each in chief.get(f"/v1/documents{what}", params=told).json()["data"]]

    def said(answer):
        return [each["choices"] for each in answer]

    with served.client("owner-key") as chief:
        before_s = uptime_s()
        waiting = threading.Thread(target=lambda: answers.append(events(served.chat("Hi.", **told))))
        with served.engine.runtime.queue.turn():
            waiting.start()
            until(lambda: served.service.admission.inside == 1)
            file = {"file": (f"clock{days}.txt", b"It strikes the hour.")}
            assert chief.post("/v1/documents", files=file, data={"collection": "bob"}).status_code == 202
            jump(monkeypatch, days)
            monkeypatch.setattr(served.service.admission, "_limits", Limits(requests_per_client=1))
            check(served.chat(), 429, "queue_full")
        waiting.join(SOON_S)
        [answer] = answers
        assert said(answer) == said(events(served.chat("Hi.", **told))) == said(expected)
        asked = {"question": "Does it strike?", "collection": "bob", "max_tokens": 2, "timeout": SOON_S}
        until(lambda: files("") == files("/jobs") == ["done"])
        assert chief.post(ASK, json=asked).json()["sources"]
        assert before_s <= uptime_s() < before_s + 3600


def jump(monkeypatch, days):
    """Set the clock that people read; what processes measure by goes on."""
    real, later = time.time, timedelta(days=days)

    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + later

    monkeypatch.setattr(time, "time", lambda: real() + later.total_seconds())
    monkeypatch.setattr(database, "datetime", Jumped)


def test_an_incomplete_body_times_out(home_of, tiny_folder) -> None:
    with serving(home_of(), tiny_folder, Limits(body_s=0.2)) as served:
        whole = served.raw("POST", CHAT, {"model": served.service.model, "messages": HI, "max_tokens": 1})
        with socket.create_connection(("127.0.0.1", served.port), timeout=SOON_S) as connection:
            connection.sendall(whole[:-5])
            assert b" 408 " in connection.recv(4096)


def test_a_body_without_length_is_limited(served) -> None:
    def pieces():
        for _ in range(20):
            yield b"a" * (1 << 20)

    with served.client() as client:
        try:
            answer = post_raw(client, CHAT, pieces())
        except httpx.WriteError:  # it was refused before all was sent
            return
        check(answer, 413)


def test_every_error_status_is_documented() -> None:
    assert {status for _, status, _ in KNOWN_ERRORS} <= set(STATUSES)
    assert ApiError(418, "no").to_json()["error"]["type"] == "invalid_request_error"
