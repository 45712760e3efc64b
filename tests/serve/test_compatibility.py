"""What clients and agents send beside the question: answers come back, options that change nothing are no errors."""

import gzip
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from servers import events, serving

from ragblend.app.serve.bodies import IGNORED_IN_MESSAGES, IGNORED_PARTS, ChatBody

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi."}
PARAMETERS = {"type": "object", "properties": {"flag": {"type": "string"}}, "required": ["flag"]}
TOOL = {"type": "function", "function": {"name": "hoist", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "lower", "parameters": PARAMETERS}}


def called(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "hoist", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def said(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def prompt_of(served, message):
    """The prompt's token count after this message of the assistant."""
    answer = served.chat(messages=[HI, message, HI], max_tokens=1)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


def test_a_call_that_was_cut_off_is_accepted_when_it_comes_back(caller) -> None:
    """It was refused, so that a call longer than max_tokens ended an agent's loop."""
    told = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    choice = caller.choice(**told)
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and call["function"]["name"] == "hoist"
    assert call["function"]["arguments"].startswith('{"flag": "')
    *_, last = events(caller.chat(**told, stream=True))
    assert last["choices"][0]["finish_reason"] == "length"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "The arguments are no JSON."}
    back = [HI, choice["message"], result]
    assert caller.chat(messages=back, tools=[TOOL], max_tokens=1).status_code == 200


def test_a_call_without_its_whole_name_is_no_call(caller) -> None:
    """It was returned as a call of a tool without a name."""
    choice = caller.choice(tools=[TOOL], tool_choice="required", max_tokens=14)
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ('{"flag": "re', '{"flag": "re"}'),
        ('{"flag": "re', '{"flag": "re'),
        ("nonsense", '{"arguments": "nonsense"}'),
        ("[1]", '{"arguments": "[1]"}'),
        ('{"flag": NaN}', '{"arguments": "{\\"flag\\": NaN}"}'),
        ('{"flag": "\\ud800"}', '{"arguments": "{\\"flag\\": \\"\\\\ud800\\"}"}'),
        ("[" * 9000, json.dumps({"arguments": "[" * 9000})),
        ("", "{}"),
    ],
    ids=lambda text: text[:20],
)
def test_arguments_that_are_no_object_are_shown_to_the_model(caller, arguments, same) -> None:
    """OpenAI's API accepts any text there, because models write it."""
    if len(arguments) > 1000:
        answer = caller.chat(messages=[HI, called(arguments), HI], max_tokens=1)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    else:
        assert prompt_of(caller, called(arguments)) == prompt_of(caller, called(same))


def result(call_id="c1"):
    return {"role": "tool", "tool_call_id": call_id, "content": "It is up."}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([HI, result()], r"messages\[1\] has the role tool and must answer .* its tool_call_id is 'c1'"),
        ([HI, called("{}"), result("c9")], r"messages\[2\] has the role tool .* is 'c9'"),
        (
            [HI, called("{}"), {"role": "tool", "content": "up"}],
            r"messages\[2\] has the role tool .* is None",
        ),
        (
            [HI, called("{}"), result(), result()],
            r"messages\[2\] and messages\[3\] both answer the call 'c1'",
        ),
    ],
    ids=["no call", "another call", "no id", "two results"],
)
def test_results_without_a_call_of_their_own_are_refused(caller, messages, message) -> None:
    """As by OpenAI: they were shown to the model as if they had one."""
    answer = caller.chat(messages=messages, tools=[TOOL])
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"]), answer.text


def test_what_conversations_of_agents_have_is_accepted(caller) -> None:
    """A tool that is gone, an id that is used again, a developer's message in the middle."""
    gone = called("{}")
    gone["tool_calls"][0]["function"]["name"] = "gone"
    developer = {"role": "developer", "content": "Be brief."}
    told = [HI, gone, result(), developer, called("{}"), result(), HI]
    for tools in ([TOOL], None):
        assert caller.chat(messages=told, tools=tools, max_tokens=1).status_code == 200
    shorter = [each for each in told if each is not developer]
    counts = [
        caller.chat(messages=each, max_tokens=1).json()["usage"]["prompt_tokens"] for each in (told, shorter)
    ]
    assert counts[0] > counts[1], "nothing is lost"


def test_fields_that_clients_send_back_with_a_message_change_nothing(served) -> None:
    plain = {"role": "assistant", "content": "Yes."}
    more = {name: {"any": ["thing"]} for name in IGNORED_IN_MESSAGES}
    more |= {"audio": None, "images": [], "function_call": None}
    assert prompt_of(served, plain | more) == prompt_of(served, plain)
    parts = [{"type": "thinking", "thinking": "Well."}, {"type": "text", "text": "Yes.", "cache_control": {}}]
    assert prompt_of(served, plain | {"content": parts}) == prompt_of(served, plain)


def test_the_docs_name_every_parameter_and_every_ignored_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    known = (set(ChatBody.model_fields) - {"model", "messages"}) | IGNORED_IN_MESSAGES | set(IGNORED_PARTS)
    assert {name for name in known if f"`{name}`" not in text} == set()


@pytest.mark.parametrize(
    "options",
    [
        dict.fromkeys(("top_k", "min_p", "repetition_penalty", "best_of")),
        {"reasoning_effort": "high", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "user": "me"},
        {"parallel_tool_calls": True, "modalities": ["text"], "verbosity": "medium", "tools": [], "stop": []},
        {"top_k": -1, "max_tokens": -1, "max_completion_tokens": None, "best_of": 1, "echo": False, "logit_bias": {}},
        {"ignore_eos": False, "use_beam_search": False, "skip_special_tokens": True, "min_tokens": 0},
        {"length_penalty": 1.0, "typical_p": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0},
        {"model": "", "prediction": {"type": "content", "content": "x"}, "reasoning": {"effort": "high"}},
    ],
    ids=lambda options: " ".join(options)[:30],
)  # fmt: skip
def test_options_that_change_nothing_are_no_errors(served, options) -> None:
    limit = None if "max_tokens" in options else 12  # without a limit this model's answer fills the window
    assert said(served.chat(**{"max_tokens": limit} | options)) == said(served.chat(max_tokens=limit))


@pytest.mark.parametrize(
    ("path", "basis", "module", "parameters"),
    [
        (CHAT, {"messages": [HI]}, "chat.completion", "CompletionCreateParamsBase"),
        ("/v1/completions", {"prompt": "Hi."}, "completion", "CompletionCreateParamsBase"),
        ("/v1/responses", {"input": "Hi."}, "responses.response", "ResponseCreateParamsBase"),
    ],
    ids=["chat", "completions", "responses"],
)
def test_null_of_every_name_of_openais_client_is_no_error(served, path, basis, module, parameters) -> None:
    """Names that its newer versions have (`moderation`, `prompt_cache_options`) were unknown."""
    pytest.importorskip("openai", reason="the client's package is not installed")
    names = vars(import_module(f"openai.types.{module}_create_params"))[parameters].__annotations__
    limit = {"max_output_tokens" if "input" in basis else "max_tokens": 1}
    with served.client() as client:
        body = dict.fromkeys(names) | {"model": ""} | basis | limit
        assert client.post(path, json=body).status_code == 200


def test_the_models_names_count_in_any_case(served) -> None:
    name = served.service.model
    assert served.chat(model=name.upper()).json()["model"] == name
    with served.client() as client:
        for name in served.service.models:  # the embedder's was not found
            assert client.get(f"/v1/models/{name.title()}").json().get("id") == name


def test_models_are_named_without_their_folders(home_of, tiny_folder, tmp_path) -> None:
    """A folder's name was cut at its last dot, and an embedder's folder was shown to every key."""
    model, gone = tmp_path / "Tiny2.5-0.5B-Instruct", tmp_path / "e5-small"
    model.symlink_to(tiny_folder)
    with serving(home_of(), model, embedder=str(gone)) as served, served.client() as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == [model.name, gone.name]
        assert served.chat(model=model.name).json()["model"] == model.name
        for named, status in ((gone.name, 503), ("other", 404)):
            refused = client.post("/v1/embeddings", json={"model": named, "input": "x"})
            assert refused.status_code == status and str(tmp_path) not in refused.text


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b"{}", {"content-type": "text/plain"}, 400, "not JSON: Content-Type is text/plain, not application/json"),
        (b"{}", {}, 400, "not JSON: Content-Type is missing"),
        (b"[]", {"content-type": "application/json"}, 400, "The body is not a JSON object"),
        (b"{'", {"content-type": "application/json"}, 400, "The body is not JSON: Expecting property name"),
        (gzip.compress(b"{}", mtime=0), {"content-encoding": "gzip"}, 415, "Compressed bodies are not read"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_what_is_wrong_with_a_body(served, content, headers, status, message) -> None:
    with served.client() as client:
        answer = client.post(CHAT, content=content, headers=headers)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("is_nested", [True, False], ids=["chat", "responses"])
def test_only_allowed_tools_are_called(caller, is_nested) -> None:
    name = {"function": {"name": "lower"}} if is_nested else {"name": "lower"}
    allowed = {"mode": "required", "tools": [{"type": "function", **name}]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if is_nested else allowed)}
    if is_nested:
        message = said(caller.chat(tools=[TOOL, OTHER], tool_choice=choice, max_tokens=40))
        [call] = (each["function"] for each in message["tool_calls"])
    else:
        tools = [{"type": "function", **tool["function"]} for tool in (TOOL, OTHER)]
        body = {"model": "", "input": "Hi.", "tools": tools, "tool_choice": choice, "max_output_tokens": 40}
        with caller.client() as client:
            [call] = client.post("/v1/responses", json=body).json()["output"][1:]
    assert call["name"] == "lower"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "lists no allowed tools"),
        ([{"type": "function", "function": {"name": "no"}}], "allows 'no', which is no tool; the tools are: hoist"),
        ([7], "allows 7, which is no tool; the tools are: hoist"),
        ([["hoist"]], "allows ['hoist'], which is no tool; the tools are: hoist"),
    ],
    ids=["none", "unknown", "number", "list"],
)  # fmt: skip
def test_wrong_allowed_tools_are_refused(caller, tools, message) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    answer = caller.chat(tools=[TOOL], tool_choice=choice)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_bias_bans_and_forces_tokens(served) -> None:
    token = served.engine.tokenizer.encode(" harbour")[0]
    word = served.engine.tokenizer.decode([token])
    assert said(served.chat(logit_bias={str(token): 100}, max_tokens=3))["content"] == word * 3
    assert word not in said(served.chat(logit_bias={str(token): -100}, max_tokens=60))["content"]


def test_a_suffix_may_be_empty_and_nothing_else(served) -> None:
    body = {"model": served.service.model, "prompt": "The harbour", "max_tokens": 1}
    with served.client() as client:
        for suffix, status in (("", 200), (None, 200), ("end", 400)):
            assert client.post("/v1/completions", json=body | {"suffix": suffix}).status_code == status


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("n", [1, 2])
def test_every_stream_ends_with_usage_and_kv(served, path, n) -> None:
    """Without include_usage they were missing."""
    body = {"model": "", "stream": True, "max_tokens": 3, "n": n}
    body |= {"messages": [HI]} if path == CHAT else {"prompt": "Hi."}
    with served.client() as client:
        plain = events(client.post(path, json=body))
        asked = events(client.post(path, json=body | {"stream_options": {"include_usage": True}}))
    assert all(each["choices"] for each in plain), "who did not ask for usage has a choice in every event"
    assert plain[-1]["usage"] == asked[-1]["usage"] and len(plain[-1]["kv"]) == len(asked[-1]["kv"]) == n
    assert [each for each in asked[:-1] if each["usage"] or "kv" in each] == []
    assert sum("usage" in each for each in plain) == n


def test_parts_of_characters_have_their_bytes(served) -> None:
    content = served.choice("Say \u00e9.", logprobs=True, top_logprobs=20, max_tokens=12)["logprobs"][
        "content"
    ]
    tokens = [token for each in content for token in (each, *each["top_logprobs"])]
    assert any("\ufffd" in each["token"] for each in tokens)
    for each in tokens:
        assert each["bytes"] and bytes(each["bytes"]).decode(errors="replace") == each["token"]
