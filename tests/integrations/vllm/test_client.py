"""The client of a vLLM server, against a fake server; the other tests of this folder need vLLM, these do not."""

import logging
import math
import threading
import time
import traceback
from dataclasses import replace

import pytest
import tiny_models
import vllm_fake
from benches import make_prompt, make_text
from waiting import until

from ragblend.engine.decoding.grammar import Grammar
from ragblend.engine.engine import Engine, require_local_engine
from ragblend.engine.model.gate import GATE_TEXT
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt
from ragblend.integrations.vllm.client import ServerNodeEncoder
from ragblend.integrations.vllm.completions import Completions
from ragblend.kvstore.errors import (
    Cancelled,
    ModelServerError,
    PromptTooLongError,
    UnsupportedModelError,
    UsageError,
)

TEXTS = [make_text(seed) for seed in range(3)]
ASKED = make_prompt(TEXTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def opened(folder, tmp_path):
    """The client, and the server that has its model."""
    literal_ids = Engine.open(str(folder), tmp_path / "home").runtime.tokenizing.literal_ids
    with vllm_fake.serve(folder, literal_ids) as server:
        engine = Engine.open(str(folder), tmp_path / "home", backend="vllm", url=f"{server.url}/v1/")
        yield engine, server
        engine.close()


def ids_of(engine, text):
    return engine.runtime.tokenizing.passage_ids(text)


def test_a_prompt_is_sent_as_token_ids_and_answered_as_text(opened):
    engine, server = opened
    server.answer = [*ids_of(engine, "The harbour master kept two ledgers"), 2]
    prompt, pieces = engine.tokenize(ASKED), []
    sent = {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    result = engine.generate(ASKED, max_new_tokens=40, on_text=pieces.append, logit_bias={7: -3.0}, **sent)
    assert result.text == "".join(pieces) == "The harbour master kept two ledgers" and len(pieces) > 1
    assert result.token_ids == tuple(server.answer) and result.stopped
    (body,) = server.asked
    assert body["prompt"] == list(prompt.token_ids) and body["model"] == "tiny"
    assert {name: body[name] for name in sent} == sent
    assert (body["max_tokens"], body["logit_bias"]) == (40, {"7": -3.0})
    assert body["repetition_penalty"] == 1, "not what the checkpoint's generation config says"
    wish = body["kv_transfer_params"]
    assert wish["spans"] == [list(place) for place in prompt.places] and wish["encode"] is False
    assert "method" not in wish, "the server reads so by itself, and may use its cache"


def test_the_client_takes_no_memory_for_kv(opened, monkeypatch):
    """Asking a device what is free makes a context there, of some hundred MB that vLLM has counted as its own."""
    engine, _ = opened
    monkeypatch.setattr(
        "ragblend.engine.model.device.free_bytes", lambda *args: pytest.fail("the device was asked")
    )
    assert engine.runtime.store.tiers == ()


def test_the_report_is_the_connectors(opened):
    engine, server = opened
    tokens = len(engine.tokenize(ASKED).token_ids)
    server.told |= {"served": [["f", tokens - 28], ["r", 20], ["c", 5], ["m", 3]], "misses": 1}
    report = engine.generate(ASKED).report
    counts = report.tokens
    assert (counts.reused, counts.recomputed, counts.missing, counts.fresh) == (20, 5, 3, tokens - 28)
    assert (report.hits, report.misses, report.method, counts.generated) == (2, 1, "probe-shift", 3)
    assert report.served == "f" * (tokens - 28) + "r" * 20 + "c" * 5 + "m" * 3
    assert 0 < report.timings.ttft_ms <= report.timings.total_ms


def test_tokens_in_vllms_cache_count_as_reused(opened):
    engine, server = opened
    prompt = engine.tokenize(ASKED)
    (_, stop), *_ = prompt.places
    cached = stop - 3
    server.told = {"cached_tokens": cached, "misses": 0}
    report = engine.generate(ASKED).report
    assert (report.tokens.reused, report.tokens.fresh) == (cached, len(prompt.token_ids) - cached)
    assert report.hits == 1 and report.method == "full"


def test_a_missing_report_is_a_warning(opened):
    """Of several engines behind one address another one may have answered."""
    engine, server = opened
    server.told = None
    report = engine.generate(ASKED).report
    assert report.tokens.generated == 3 and "unknown" in report.warning


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": ["two"]}, "The harbour master kept "),
        ({"one_sentence": True}, "The harbour master kept two ledgers."),
    ],
)
def test_the_stream_is_closed_when_the_text_has_ended(opened, options, text):
    engine, server = opened
    server.answer = ids_of(engine, "The harbour master kept two ledgers. And wrote the names of the ships")
    server.hold = len(server.answer) - 1
    result = engine.generate(ASKED, **options)
    assert result.text == text and result.stopped
    assert server.left.wait(60), "the server was told"


def test_log_probabilities_have_token_ids(opened):
    engine, _ = opened
    result = engine.generate(ASKED, logprobs=2)
    assert len(result.logprobs) == 2, "the end token has none"
    assert result.logprobs[0].token_id == 7 and result.logprobs[0].logprob == -0.5
    assert result.logprobs[0].most_likely == ((3, -0.25), (7, -0.5))


@pytest.fixture
def unsure(opened):
    """The server says "moored at 9", but 4 is as likely to it."""
    engine, server = opened
    server.answer = ids_of(engine, "moored at 9 of the year")
    server.exact = [*ids_of(engine, "4 of the year"), 2]
    nine, four = (ids_of(engine, digit)[-1] for digit in "94")
    server.rivals = {nine: {f"token_id:{four}": -0.6}}
    return engine, server, nine, four


@pytest.mark.parametrize("confirmed", [True, False])
def test_an_uncertain_figure_is_checked_by_its_passage_alone(unsure, confirmed):
    engine, server, nine, four = unsure
    by_passage = {nine: -0.1, four: -3.0} if confirmed else {nine: -5.0, four: -0.01}
    server.alone = {f"token_id:{token}": p for token, p in by_passage.items()}
    pieces = []
    result = engine.generate(ASKED, max_new_tokens=20, on_text=pieces.append)
    fused, alone, *again = server.asked
    begun = fused["prompt"]
    at = server.answer.index(nine)
    (span,) = alone["kv_transfer_params"]["spans"]
    assert len(alone["prompt"]) < len(begun) and alone["prompt"][-at:] == server.answer[:at]
    assert alone["prompt"][slice(*span)] in [list(chunk.token_ids) for chunk in engine.tokenize(ASKED).chunks]
    assert alone["kv_transfer_params"]["method"] == "reuse"
    assert result.text == "".join(pieces)
    if confirmed:
        assert list(result.token_ids) == server.answer and not again
        assert result.report.read_again_at is None
    else:
        assert list(result.token_ids) == [*server.answer[:at], *server.exact]
        assert result.report.read_again_at == at and result.report.method == "probe-shift"
        (again,) = again
        assert again["prompt"] == [*begun, *server.answer[:at]] and again["max_tokens"] == 20 - at
        assert again["kv_transfer_params"] == {"off": True} and "logprobs" not in again


@pytest.mark.parametrize(
    "options",
    [
        {"method": "probe-shift:sure=0"},
        {"method": "epic"},
        {"ratio": 1.0},
        {"grammar": Grammar("start: /.*/")},
    ],
)
def test_figures_are_not_checked_where_that_is_off_exact_or_under_a_grammar(unsure, options):
    engine, server, *_ = unsure
    result = engine.generate(ASKED, **options)
    (body,) = server.asked
    assert "logprobs" not in body and list(result.token_ids) == server.answer


def test_a_server_with_too_few_log_probabilities_answers_without_checks(unsure, caplog):
    engine, server, *_ = unsure
    server.most_logprobs = 5
    assert list(engine.generate(ASKED).token_ids) == server.answer
    assert "logprobs" not in server.asked[0]
    assert [record for record in caplog.records if "figures in answers are not checked" in record.message]


def test_full_prefill_and_other_methods_are_requested(opened):
    engine, server = opened
    report = engine.prefill(ASKED, method="full").report
    assert report.timings.prefill_ms > 0
    engine.prefill(ASKED)
    assert "logprobs" not in server.asked.pop(), "figures are checked where they are said"
    engine.generate(ASKED, method="cacheblend", ratio=0.3)
    full, other = (body["kv_transfer_params"] for body in server.asked)
    assert full["off"] is True
    assert (other["method"], other["ratio"]) == ("cacheblend", 0.3)


def test_the_collection_with_most_tokens_is_requested(opened):
    engine, server = opened
    theirs = [Chunk(text, collection="theirs") for text in TEXTS]
    engine.generate(Prompt([Literal("Passages: "), theirs[0], theirs[1], Chunk(TEXTS[2]), Literal(" Who?")]))
    wish = server.asked[0]["kv_transfer_params"]
    assert wish["collection"] == "theirs" and len(wish["spans"]) == 2


def test_missing_passages_are_encoded_behind_the_canonical_prefix(opened):
    engine, server = opened
    server.told["misses"] = 1
    engine.generate(make_prompt(TEXTS[:1]))
    engine.finish_background()
    _, encode = server.asked
    passage, prefix = ids_of(engine, TEXTS[0]), engine.runtime.canonical_prefix
    assert encode["prompt"] == [*prefix, *passage, passage[-1]]
    wish = encode["kv_transfer_params"]
    assert wish["encode"] is True and wish["spans"] == [[len(prefix), len(prefix) + len(passage)]]


def test_closing_does_not_wait_for_the_server(opened, monkeypatch):
    engine, server = opened
    server.told["misses"] = 1
    engine.generate(make_prompt(TEXTS[:1]))
    engine.finish_background()
    begun, fetch = threading.Event(), engine.runtime.server.fetch

    def silent(path, body, cancel, *more):
        if "encode" not in body["kv_transfer_params"]:
            return fetch(path, body, cancel, *more)
        begun.set()
        until(cancel.is_set)
        raise Cancelled("it was cancelled")

    monkeypatch.setattr(engine.runtime.server, "fetch", silent)
    engine.generate(make_prompt(TEXTS[1:2]))
    assert begun.wait(60)
    engine.close()


def test_the_server_encodes_passages_that_are_named_here(opened):
    engine, server = opened
    done = []
    report = engine.encode(TEXTS, ["a", "b", "c"], lambda *counts: done.append(counts))
    assert report.encoded == 3 and len(server.asked) == 3 and done == [(1, 3), (2, 3), (3, 3)]
    assert engine.missing(["a"]).node_ids == ("a",), "in another home than ours"
    server.encodes = False
    assert engine.encode(TEXTS[:1]).encoded == 0
    assert list(engine.encode_nodes(["a", "no such"])) == [0, 0]
    with pytest.raises(UsageError, match="prefix"):
        engine.encode(TEXTS, prefix="another")


def test_kv_of_a_node_that_is_deleted_while_the_server_encodes_it_is_deleted(opened, monkeypatch):
    engine, _ = opened
    engine.enter(TEXTS[:1], ["a"])
    assert engine.gate.passed
    deleted, fetch = [], engine.runtime.server.fetch

    def late(*given):
        engine.forget(["a"])
        return fetch(*given)

    monkeypatch.setattr(engine.runtime.store, "delete", lambda keys, recheck: deleted.extend(keys) or 0)
    monkeypatch.setattr(engine.runtime.server, "fetch", late)
    assert list(engine.encode_nodes(["a"])) == [0]
    assert len(deleted) == 2, "by who deleted it, and when it was there"


def sessions_of(engine, server, prompt) -> set[str]:
    """What a router goes by for an answer, and for the report of it."""
    server.sessions.clear()
    engine.generate(prompt)
    assert len(server.sessions) == 2
    return set(server.sessions)


def test_prompts_with_the_same_passages_have_one_session(opened):
    """In any order, in later turns, and the passage where it is encoded; what has no passages goes anywhere."""
    engine, server = opened
    (session,) = sessions_of(engine, server, ASKED)
    assert sessions_of(engine, server, make_prompt(TEXTS[::-1])) == {session}
    more = [Literal(" An answer. More passages: "), Chunk(make_text(7)), Chunk(make_text(8)), Literal("And?")]
    assert sessions_of(engine, server, Prompt([*ASKED.segments, *more])) == {session}
    server.sessions.clear()
    engine.encode(TEXTS)
    assert len(set(server.sessions)) == len(TEXTS) and session in server.sessions
    plain = [sessions_of(engine, server, Prompt([Literal("Where?")])) for _ in range(2)]
    assert len(set.union(*plain)) == 2, "one for an answer with its report"


def test_prompts_that_share_most_passages_mostly_have_one_session(opened):
    """Four of five: two of three times, by MinHash, and by the first passage alone never."""
    engine, server = opened
    texts = [make_text(seed) for seed in range(64)]
    same = 0
    for at in range(0, 60, 3):
        first, second = (make_prompt(texts[at + shift : at + shift + 5]) for shift in range(2))
        same += sessions_of(engine, server, first) == sessions_of(engine, server, second)
    assert same >= 8


def test_a_server_without_connector_answers_with_one_warning(opened, caplog):
    engine, server = opened
    server.about = None
    with caplog.at_level(logging.WARNING, "ragblend"):
        reports = [engine.generate(ASKED).report for _ in range(3)]
    assert sum("no connector" in each.message for each in caplog.records) == 1
    assert "no connector" in reports[2].warning and reports[2].tokens.reused == 0
    assert all("kv_transfer_params" not in body for body in server.asked)
    assert not engine.gate.passed and engine.missing(["a"]).node_ids == ("a",)
    assert engine.encode(TEXTS).encoded == 0


def test_a_refusal_of_the_connector_is_reported(opened):
    engine, server = opened
    server.about = vllm_fake.ABOUT | {"refusal": "the layers of Odd have no attention"}
    assert engine.gate.reason == "the layers of Odd have no attention"
    server.told = {"warning": "the collection 'x' is none of this server", "cached_tokens": 0}
    assert "collection" in engine.generate(ASKED).report.warning


# --- what goes wrong; after each the same engine answers


def after(engine, server):
    """A server that is well again is used again."""
    server.status = server.breaks = None
    assert engine.generate(ASKED).token_ids == (7, 8, 9)


def test_an_unreachable_server_is_named(folder, tmp_path):
    with vllm_fake.serve(".", lambda text: []) as server:
        url = server.url
    engine = Engine.open(str(folder), tmp_path, backend="vllm", url=url)
    for ask in (lambda: engine.generate(ASKED), lambda: engine.stream(ASKED), lambda: engine.gate):
        with pytest.raises(ModelServerError, match="Is vLLM running there"):
            ask()
    assert engine.count_tokens("what needs no server") and engine.forget(["a"]) == 0


def test_a_server_of_another_model_is_refused(opened):
    engine, server = opened
    theirs = {"id": "Qwen/Qwen3-4B", "root": "Qwen/Qwen3-4B", "max_model_len": 512}
    ours, server.cards = server.cards, {"data": [theirs]}
    with pytest.raises(ModelServerError, match=r"has Qwen/Qwen3-4B .*was asked for"):
        engine.generate(ASKED)
    server.cards = ours
    server.tokenize = lambda text: [1, 2, 3]
    with pytest.raises(ModelServerError, match="tokenizer"):
        engine.generate(ASKED)
    server.tokenize = engine.runtime.tokenizing.literal_ids
    after(engine, server)


def test_a_prompt_beyond_the_servers_window_is_never_sent(opened):
    engine, server = opened
    server.cards["data"][0]["max_model_len"] = 30
    with pytest.raises(PromptTooLongError, match="reads at most 29"):
        engine.generate(ASKED)
    assert not server.asked


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        ((400, "This model's maximum context length is 512 tokens"), PromptTooLongError, "512"),
        ((400, "Grammar error: no such rule"), UsageError, "no such rule"),
        ((404, "The model `tiny` does not exist."), ModelServerError, "does not exist"),
        ((500, "EngineCore encountered an issue"), ModelServerError, "status 500"),
    ],
)
def test_errors_of_the_server_have_their_own_classes(opened, status, error, said):
    engine, server = opened
    server.status = status
    with pytest.raises(error, match=said):
        engine.generate(ASKED)
    after(engine, server)


def test_the_api_key_comes_from_the_environment_and_is_never_shown(opened, monkeypatch):
    """An invalid one was a traceback with the key in it."""
    engine, server = opened
    server.key = "right"
    for wrong in ("wrong", "wro\nng", "wrong\u2026", "wro\xf1g"):
        monkeypatch.setenv("VLLM_API_KEY", wrong)
        with pytest.raises(ModelServerError, match="VLLM_API_KEY") as raised:
            engine.generate(ASKED)
        assert "wro" not in "".join(traceback.format_exception(raised.value))
    monkeypatch.setenv("VLLM_API_KEY", " right\n")
    assert engine.generate(ASKED).token_ids == (7, 8, 9)


def test_an_invalid_address_is_named(opened):
    for url in ("http://gpu..local:8000", f"{opened[1].url}/\xe4"):
        with pytest.raises(ModelServerError, match="is that its address"):
            Completions(url).fetch("/v1/models")


def test_a_server_that_dies_during_an_answer_is_named(opened):
    engine, server = opened
    server.answer, server.breaks = ids_of(engine, "The harbour master kept two ledgers"), 4
    stream, pieces = engine.stream(ASKED), []
    with pytest.raises(ModelServerError, match="ended within an answer"):
        pieces.extend(stream)
    assert "".join(pieces) and "The harbour master kept two ledgers".startswith("".join(pieces))
    server.answer = [7, 8, 9]
    after(engine, server)


def test_after_a_failure_the_server_is_asked_again_what_it_is(opened):
    engine, server = opened
    assert engine.context_window == 512
    server.cards["data"][0]["max_model_len"], server.breaks = 400, 1
    with pytest.raises(ModelServerError):
        engine.generate(ASKED)
    assert engine.context_window == 400


@pytest.mark.parametrize(
    "status", [(503, "Server is overloaded"), (429, "Too many requests"), (400, "no such parameter")]
)
def test_a_failed_report_does_not_lose_the_answer(opened, status):
    """It is asked for after the stream, and a refusal there was raised in the place of the answer."""
    engine, server = opened
    server.told_status = status
    result = engine.generate(ASKED)
    assert result.token_ids == (7, 8, 9) and result.stopped
    assert status[1] in result.report.warning and "unknown" in result.report.warning
    server.told_status = None
    report = engine.generate(ASKED).report
    assert report.warning is None and report.tokens.reused == 20


def test_waiting_for_a_report_can_be_cancelled(opened):
    engine, server = opened
    server.told_late, cancel = True, threading.Event()
    timer = threading.Timer(0.5, cancel.set)
    timer.start()
    with pytest.raises(Cancelled):
        engine.generate(ASKED, cancel=cancel)
    assert server.left.wait(60)
    timer.join()


class Asked(threading.Event):
    """Of a request; looked: whether it has been asked for it."""

    def __init__(self):
        super().__init__()
        self.looked = threading.Event()

    def is_set(self):
        self.looked.set()
        return super().is_set()


def test_waiting_for_a_busy_server_can_be_cancelled(opened):
    """The first question waited ten minutes, whatever its cancel and deadline said, and all others behind it."""
    engine, server = opened
    server.silent, ends = True, {}

    def ask(name, cancel, deadline=math.inf):
        try:
            engine.generate(ASKED, cancel=cancel, deadline=deadline)
        except Cancelled:
            ends[name] = "cancelled"

    first, second = Asked(), Asked()
    asking = threading.Thread(target=ask, args=("first", first), daemon=True)
    asking.start()
    assert server.asking.wait(60)
    waiting = threading.Thread(target=ask, args=("second", second), daemon=True)
    waiting.start()
    assert second.looked.wait(60)
    engine.close()
    assert asking.is_alive(), "it is not waited for"
    second.set()
    waiting.join(60)
    ask("late", None, deadline=time.monotonic() + 0.2)
    assert asking.is_alive() and ends == {"second": "cancelled", "late": "cancelled"}
    first.set()
    asking.join(60)
    assert ends["first"] == "cancelled" and server.left.wait(60)
    server.silent = False
    after(engine, server)


def test_a_silent_server_is_given_up(opened, monkeypatch):
    engine, server = opened
    server.silent = True
    monkeypatch.setattr("ragblend.integrations.vllm.server.QUERY_TIMEOUT_S", 0.2)
    with pytest.raises(ModelServerError, match="no answer from the server"):
        engine.generate(ASKED)
    server.silent = False
    after(engine, server)


def test_closing_cancels_encoding_by_a_silent_server(opened):
    engine, server = opened
    server.silent = True
    ServerNodeEncoder(engine.runtime, "default").queue_encoding(engine.tokenize(ASKED).chunks[0])
    assert server.asking.wait(60)
    engine.close()
    assert server.left.wait(60)


def test_an_error_event_of_a_stream_is_raised(opened):
    engine, server = opened
    server.fails = {"message": "Grammar error: no such rule", "code": 400}
    with pytest.raises(UsageError, match="no such rule"):
        engine.generate(ASKED)


def test_a_server_that_is_no_vllm_is_named(opened, monkeypatch):
    engine, server = opened

    def page(handler, value):
        handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n<html>")
        handler.close_connection = True

    monkeypatch.setattr(vllm_fake.Handler, "_json", page)
    with pytest.raises(ModelServerError, match="is not vLLM"):
        engine.generate(ASKED)
    monkeypatch.undo()
    server.cards = {"something": "else"}
    with pytest.raises(ModelServerError, match="is not a vLLM of a known version"):
        engine.generate(ASKED)


@pytest.mark.parametrize("sent", ["7", "null", "[]", '"error"'])
def test_an_event_that_is_no_object_is_named(opened, monkeypatch, sent):
    """It was a TypeError, or an AttributeError after the client had passed it on."""
    engine, _ = opened

    def stream(handler, body):
        handler.wfile.write(f"HTTP/1.0 200 OK\r\n\r\ndata: {sent}\n\n".encode())
        handler.close_connection = True

    monkeypatch.setattr(vllm_fake.Handler, "_stream", stream)
    with pytest.raises(ModelServerError, match=r"is not vLLM: it sent .* instead of a JSON object"):
        engine.generate(ASKED)


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1", "127.0.0.1:8000", "http://", "http://a:port", "http://me:secret@a", ""]
)
def test_an_invalid_url_or_backend_is_refused(folder, tmp_path, url):
    if url:
        with pytest.raises(UsageError, match=r"^(?!.*secret).*looks like http"):
            Engine.open(str(folder), tmp_path, backend="vllm", url=url)
    with pytest.raises(UsageError, match="'tgi' is unknown"):
        Engine.open(str(folder), tmp_path, backend="tgi", url=url)


def test_a_cancelled_answer_ends_at_the_server_too(opened):
    engine, server = opened
    server.hold, cancel = 1, threading.Event()
    with pytest.raises(Cancelled):
        engine.generate(ASKED, cancel=cancel, on_text=lambda piece: cancel.set())
    assert server.left.wait(60)
    with pytest.raises(Cancelled):
        engine.generate(ASKED, deadline=0.0)


def test_what_a_server_cannot_do_is_refused_by_name(opened):
    engine, server = opened
    engine.prefill(ASKED)
    with pytest.raises(UnsupportedModelError, match="comparing logits is not possible with vLLM at"):
        require_local_engine(engine, "comparing logits")
    for options in ({"keep_tokens": 9}, {"repetition_penalty": 1.1}):
        with pytest.raises(UsageError, match=f"vLLM does not support {next(iter(options))}"):
            engine.generate(ASKED, **options)
    assert len(server.asked) == 1 and engine.known_profile is None and not engine.needs_measurement


def test_the_last_of_staged_prompts_is_answered(opened):
    engine, server = opened
    stages = [make_prompt(TEXTS[:1]), ASKED]
    assert engine.stream_staged(iter(stages)).result.token_ids == (7, 8, 9)
    assert [body["prompt"] for body in server.asked] == [list(engine.tokenize(ASKED).token_ids)]
    with pytest.raises(UsageError, match="there is no prompt"):
        list(engine.stream_staged([]))


def test_engines_of_one_server_share_what_they_know(opened):
    engine, server = opened
    folder, home = engine.config.model, engine.home
    assert Engine.open(folder, home, url=server.url) is engine
    assert Engine.open(folder, home) is not engine
    other = Engine.open(folder, home, url=server.url, collection="other")
    assert other.runtime is engine.runtime and replace(other.config, collection="default") == engine.config
    assert engine.tokenizer and server.tokenize(GATE_TEXT) == engine.runtime.tokenizing.literal_ids(GATE_TEXT)


@pytest.mark.parametrize(
    "said", [b'{"error": "boom"}', b'{"error": {"message": "boom"}}', b'{"error": null}']
)
def test_an_error_within_a_stream_is_named_in_any_form(said):
    """Of some proxies it is a text."""
    with pytest.raises(ModelServerError):
        raise Completions("http://127.0.0.1:1")._parse_event(said)
