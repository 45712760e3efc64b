"""Chat and completions over TCP: answers equal the engine's, in OpenAI's forms."""

import json
import socket
import threading

import pytest
from servers import HOIST, LEDGER, LIGHT, NUMBER, events, post_raw
from waiting import SOON_S, until

from ragblend.app.serve import chat
from ragblend.integrations.backend import Backend, ChatTurn
from ragblend.integrations.threads import THREAD_NAME


def test_answers_equal_the_engines(served) -> None:
    answer = served.chat("Who built it?", method="full").json()
    own = Backend(str(served.service.app.settings.model), served.service.home, "ada", "cpu", "float32")
    prompt = own.chat_prompt([ChatTurn("user", ("Who built it?",))])
    expected = own.engine.generate(prompt, method="full", max_new_tokens=6)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    counts = answer["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (len(prompt.token_ids), 6)
    assert counts["total_tokens"] == counts["prompt_tokens"] + 6
    assert answer["model"] == served.service.model


def test_a_stream_equals_the_whole_answer_and_ends_with_usage(served) -> None:
    whole = served.chat("Tell me more.", method="full").json()
    chunks = events(
        served.chat("Tell me more.", method="full", stream=True, stream_options={"include_usage": True})
    )
    *pieces, last = chunks
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in pieces)
        == (whole["choices"][0]["message"]["content"])
    )
    assert [c["choices"][0]["finish_reason"] for c in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_each_choice_has_its_own_seed(served) -> None:
    def texts(**options):
        found = served.chat("Sing.", method="full", temperature=1.0, **options).json()["choices"]
        assert [choice["index"] for choice in found] == list(range(len(found)))
        return [choice["message"]["content"] for choice in found]

    assert texts(seed=5, n=2) == [*texts(seed=5), *texts(seed=6)]
    assert texts(seed=5) != texts(seed=6)


def test_a_prompt_of_several_choices_is_counted_once(served) -> None:
    one, three = (served.chat("Count.", n=n).json()["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(served) -> None:
    text = served.choice("Stop there.", method="full", max_tokens=8)["message"]["content"]
    stop = text[3:5]
    choice = served.choice("Stop there.", method="full", max_tokens=8, stop=[stop])
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_log_probabilities_in_both_forms(served) -> None:
    choice = served.choice(logprobs=True, top_logprobs=2)
    assert len(choice["logprobs"]["content"]) == 6
    for token in choice["logprobs"]["content"]:
        assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 2
    with served.client() as client:
        body = {"model": served.service.model, "prompt": ["One", "Two"], "max_tokens": 3, "logprobs": 1}
        answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {3}
        # Greedy: the token that was said is the likeliest.
        assert [max(likely.values()) for likely in columns["top_logprobs"]] == columns["token_logprobs"]


@pytest.mark.parametrize("at", [0, 3, 7])
def test_tokens_of_a_stop_string_have_no_log_probabilities(served, at) -> None:
    """They are no part of the answer; of one that the stop string begins in, the whole is listed."""
    whole = served.choice("Stop there.", max_tokens=12, logprobs=True)
    text, tokens = whole["message"]["content"], whole["logprobs"]["content"]
    cut = served.choice("Stop there.", max_tokens=12, logprobs=True, stop=text[at : at + 2])
    length = len(cut["message"]["content"])
    begin = [sum(len(token["token"]) for token in tokens[:number]) for number in range(len(tokens))]
    assert length == text.index(text[at : at + 2])
    assert cut["logprobs"]["content"] == tokens[: sum(start < length for start in begin)]


def test_log_probabilities_are_decoded_outside_the_event_loop(served, monkeypatch) -> None:
    """All clients waited for half a second: four answers of 400 tokens with 20 probabilities each."""
    where, made = [], chat.logprobs
    monkeypatch.setattr(
        chat, "logprobs", lambda *given: (where.append(threading.current_thread().name), made(*given))[1]
    )
    assert served.choice(logprobs=True)["logprobs"]["content"]
    assert where == [THREAD_NAME]


def test_completions_continue_a_text_without_a_template(served) -> None:
    body = {"model": served.service.model, "prompt": "Once upon a time", "max_tokens": 4, "method": "full"}
    with served.client() as client:
        whole = client.post("/v1/completions", json=body).json()
        chunks = events(client.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert whole["usage"]["prompt_tokens"] == served.engine.count_tokens("Once upon a time")


def test_repeated_text_is_learnt_for_one_key_only(served) -> None:
    def asked(question, passages, name="ada"):
        found = served.chat("\n\n".join([*passages, question]), name).json()
        served.engine.finish_background()
        return found["kv"][0]["chunks"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert asked("Who kept the ledgers?", [LEDGER, LIGHT])[0] == []
    learnt, _ = asked("Who wound the clockwork?", [LIGHT, LEDGER])
    assert len(learnt) == 2 and all(node_id.startswith("seen-") for node_id in learnt)
    chunks, cached = asked("What did nobody see?", [LEDGER, LIGHT])
    assert set(chunks) == set(learnt) and cached > 100
    assert asked("What did nobody see?", [LEDGER, LIGHT], "bob") == ([], 0)


def test_a_later_key_of_the_same_name_inherits_nothing(served) -> None:
    """Removing key and collection left passages learned from prompts, on disk and in memory, and the session."""
    services, runtime = served.service.app, served.engine.runtime

    def asked(*passages):
        [kv] = served.chat("\n\n".join([*passages, "Who kept the ledgers?"]), "cleo").json()["kv"]
        served.engine.finish_background()
        return kv

    for _ in range(2):  # two keys of one name, one after the other
        served.add_key("cleo")
        first, second = asked(LEDGER, LIGHT), asked(LIGHT, LEDGER)
        assert (first["chunks"], first["reused"], second["hits"]) == ([], 0, 0)
        workspace = services.workspaces.of("cleo")
        workspace.engine.encode(["Nobody looks for this in prompts."], ["entered"])
        stored = runtime.nodes.keys("cleo")
        assert len(stored) == 3 and all(map(runtime.store.contains, stored))
        served.known.remove("cleo")
        assert services.remove_collection("cleo")[1] > 0
        assert not runtime.nodes.keys("cleo") and not any(map(runtime.store.contains, stored))
        assert len(workspace.known_passages) == 0


def test_requests_after_a_collections_removal_leave_nothing_for_a_later_key(served) -> None:
    """The key was still valid: the next key of that name found its later prompts and their queued KV."""
    services, runtime, begun = served.service.app, served.engine.runtime, threading.Event()
    served.add_key("dora")
    served.engine.finish_background()
    runtime.background.add(lambda: begun.wait(SOON_S))
    for passages in ((LEDGER, LIGHT), (LIGHT, LEDGER), (LEDGER, LIGHT)):
        assert served.chat("\n\n".join([*passages, "Who kept the ledgers?"]), "dora").status_code == 200
    services.remove_collection("dora")
    begun.set()
    assert served.engine.finish_background(SOON_S) and not runtime.nodes.keys("dora")
    assert served.chat(LEDGER, "dora").status_code == 404
    served.known.remove("dora")
    Backend(services.settings.model, served.service.home, "dora", "cpu", "float32").engine.encode(
        [LEDGER], ["late"]
    )
    served.add_key("dora")
    assert served.chat(LEDGER, "dora").json()["kv"][0]["reused"] == 0 and not runtime.nodes.keys("dora")
    served.known.remove("dora")
    services.remove_collection("dora")


def test_each_conversation_of_a_key_has_a_session_of_its_own(served) -> None:
    """Two conversations shared one session, and each recomputed all but the system prompt in every turn."""
    system = {"role": "system", "content": "Answer as the keeper of the harbour would, in few words. " * 3}
    long = " Name every ship, and the harbour that each of them came from." * 3

    def asked(messages):
        answer = served.chat(messages=messages).json()
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        return [*messages, said, {"role": "user", "content": "And then?"}], answer["usage"]

    talks = [
        [system, {"role": "user", "content": f"{who} came in by night.{long}"}] for who in ("Ann", "Bea")
    ]
    read = [0, 0]
    for number in (0, 1) * 3:
        talks[number], usage = asked(talks[number])
        assert usage["prompt_tokens_details"]["cached_tokens"] >= read[number] - 20
        read[number] = usage["prompt_tokens"]
    other = served.chat(messages=talks[0], name="bob").json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_disconnected_client_is_counted_until_its_prompt_is_built(served, monkeypatch) -> None:
    """Threads grew without a limit, and shutdown waited for all of them."""
    going, goes_on, made = threading.Semaphore(0), threading.Event(), chat._requested_choices

    def slow(*given):
        going.release()
        assert goes_on.wait(SOON_S)
        return made(*given)

    monkeypatch.setattr(chat, "_requested_choices", slow)
    body = {"model": served.service.model, "messages": [{"role": "user", "content": "Hello."}]}
    for number in range(1, 4):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(served.raw("POST", "/v1/chat/completions", body))
            assert going.acquire(timeout=SOON_S)
        assert served.service.admission.inside == number
    goes_on.set()
    until(lambda: served.service.admission.inside == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/rag/ask"])
def test_long_texts_are_tokenized_one_at_a_time_and_waiting_times_out(served, path) -> None:
    """Sixteen at once took sixteen times the memory."""
    text, named = "\u00e9" * 200_000, {"model": served.service.model}  # more bytes than characters
    body = (
        {"question": text}
        if path.endswith("ask")
        else named | {"messages": [{"role": "user", "content": text}]}
    )
    sent = json.dumps(body | {"timeout": 0.2}, ensure_ascii=False).encode()
    with served.client() as client, served.service.tokenizing(sent, threading.Event()):
        answer = post_raw(client, path, sent)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert served.chat().status_code == 200, "a short one does not wait"


def test_repeating_a_conversation_gives_the_same_answer(served) -> None:
    """The whole prompt is cached then; its last token must still be computed."""
    text = "What did the keeper of the lamp do in the winter of the storm? " * 3
    first, again = (served.chat(text).json() for _ in range(2))
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 64


def test_json_by_a_schema(served) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER, "strict": True}}
    choice = served.choice(response_format=wanted, max_tokens=40)
    assert json.loads(choice["message"]["content"]).keys() == {"n"}


def test_tool_calls_whole_and_streamed(caller) -> None:
    told = {"tools": [HOIST], "tool_choice": "required", "max_tokens": 60}
    choice = caller.choice(**told)
    chunks = events(caller.chat(**told, stream=True))
    call = choice["message"]["tool_calls"][0]
    back = [
        {"role": "user", "content": "Hoist it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "It is up."},
    ]
    assert caller.chat(messages=back, tools=[HOIST]).status_code == 200
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"]["name"] == "hoist"
    assert json.loads(call["function"]["arguments"]).keys() == {"up"}
    [made] = [
        c["choices"][0]["delta"]["tool_calls"] for c in chunks if "tool_calls" in c["choices"][0]["delta"]
    ]
    assert made[0]["index"] == 0 and made[0]["function"] == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_answer(served, stream) -> None:
    served.chat()  # the model is loaded
    seen, begun = [], threading.Event()

    def count(*_):
        seen.append(1)
        if len(seen) == 5:
            begun.set()

    hook = served.engine.runtime.loaded.model.lm_head.register_forward_pre_hook(count)
    body = {
        "model": served.service.model,
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 1800,
    }
    request = served.raw("POST", "/v1/chat/completions", body | {"stream": stream})
    try:
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(request)
            assert begun.wait(SOON_S)
        until(served.is_free)
    finally:
        hook.remove()
    assert 5 <= len(seen) < 1500
