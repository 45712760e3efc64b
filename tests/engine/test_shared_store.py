"""Engines that share a store: what one encoded another fuses, and a bad server costs at most what it may."""

import logging
import threading

import pytest
import torch
from benches import largest_error, make_prompt, make_text
from shared_servers import RedisNames, free_port, proxy_to
from test_controller import profile
from waiting import SOON_S, started

from ragblend.engine.controller import DeviceProfile
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt
from ragblend.kvstore.policy import PrefillProfile

TEXTS = [make_text(seed, words=30) for seed in range(4)]
PROMPT = make_prompt(TEXTS)
PATIENT = "?timeout_s=60"
ALLOWED = 1e-4


@pytest.fixture
def redis(redis_server):
    return redis_server()


@pytest.fixture
def local(llama):
    """An engine that has all of it at home."""
    llama.engine.encode(TEXTS)
    return llama


def share(bench, texts=TEXTS):
    """Have these encoded by that engine, and at the server."""
    keys = bench.engine.encode(texts).keys
    assert bench.engine.runtime.store.remote.flush()
    return keys


def remote_of(bench):
    return bench.engine.runtime.store.remote


# --- what it is for


def test_kv_of_another_machine_is_fused_here(redis, fresh_bench_for, local):
    url = redis.url() + PATIENT
    share(fresh_bench_for(remote=url))
    here, expected = fresh_bench_for(remote=url), local.engine.prefill(PROMPT)
    found = here.engine.prefill(PROMPT)
    assert torch.equal(found.logits, expected.logits)
    assert found.report.tokens == expected.report.tokens and found.report.hits == 4
    assert remote_of(here).stats().read_bytes > 0
    assert here.engine.finish_background()
    assert here.engine.runtime.store.stats().entries == 4  # kept
    assert torch.equal(here.engine.prefill(PROMPT).logits, expected.logits)
    assert remote_of(here).stats().hits == 4  # not read again


def test_shared_passages_are_fetched_and_not_encoded(redis, fresh_bench_for, local, monkeypatch):
    share(fresh_bench_for(remote=redis.url() + PATIENT), TEXTS[:2])
    here = fresh_bench_for(remote=redis.url() + PATIENT)
    report = here.engine.encode(TEXTS, node_ids=[f"node{number}" for number in range(4)])
    assert (report.encoded, report.skipped) == (2, 2)
    assert torch.equal(here.engine.prefill(PROMPT).logits, local.engine.prefill(PROMPT).logits)
    here.engine.enter(TEXTS, [f"later{number}" for number in range(4)])
    assert list(here.engine.encode_nodes([f"later{number}" for number in range(4)])) == [0] * 4
    assert remote_of(here).flush()
    third = fresh_bench_for(remote=redis.url() + PATIENT)
    third.engine.enter(TEXTS, [f"node{number}" for number in range(4)])
    assert list(third.engine.encode_nodes([f"node{number}" for number in range(4)])) == [0] * 4
    assert third.engine.runtime.store.stats().entries == 4


def test_shared_kv_without_room_here_is_logged_in_a_line(redis, fresh_bench_for, caplog):
    share(fresh_bench_for(remote=redis.url() + PATIENT))
    here = fresh_bench_for(remote=redis.url() + PATIENT, store_budget_bytes=1000)
    for _ in range(2):
        assert here.engine.prefill(PROMPT).report.hits == 4
        assert here.engine.finish_background()
    said = [record for record in caplog.records if "shared store is not stored here" in record.getMessage()]
    assert len(said) == 2 and not any(record.exc_info for record in caplog.records)


def test_methods_that_load_nothing_do_not_ask_the_shared_store(redis, fresh_bench_for):
    share(fresh_bench_for(remote=redis.url() + PATIENT))
    here = fresh_bench_for(remote=redis.url() + PATIENT)
    for method in ("full", "exact"):
        here.engine.prefill(PROMPT, method=method)
    assert remote_of(here).stats().state == "untried"


# --- servers that are bad


def assert_computed_in_place(bench, prompt=PROMPT):
    """As if nothing had been stored."""
    found = bench.engine.prefill(prompt)
    assert found.report.tokens.reused == found.report.tokens.recomputed == 0
    assert largest_error(found.logits, bench.logits(prompt)[-1]) < ALLOWED
    return found.report


def test_a_dead_server_is_asked_once_for_many_prompts(redis, fresh_bench_for):
    redis.end()
    here = fresh_bench_for(remote=redis.url())
    for number in range(4):
        assert_computed_in_place(here, make_prompt([make_text(10 * number + each) for each in range(3)]))
    assert here.engine.finish_background()
    assert remote_of(here).stats().errors == 1


def test_a_server_that_falls_silent_costs_one_time_out(redis, fresh_bench_for):
    """In the midst of the layers: a prompt goes on without what did not come, all of it in one go."""
    share(fresh_bench_for(remote=redis.url() + PATIENT))
    with proxy_to(redis.port, most=30_000) as proxy:
        here = fresh_bench_for(remote=f"redis://127.0.0.1:{proxy.port}/0?timeout_s=0.4&retry_s=600")
        prompts = [PROMPT, make_prompt(TEXTS[::-1]), make_prompt(TEXTS[:2])]
        found = here.engine.prefill(PROMPT)
        if not found.report.hits:
            assert largest_error(found.logits, here.logits(PROMPT)[-1]) < ALLOWED
        connections = proxy.connections
        for prompt in prompts[1:]:
            here.engine.prefill(prompt)
        stats = remote_of(here).stats()
        assert stats.errors == 1 and proxy.connections == connections and not remote_of(here).is_available
        assert stats.state == "no answer within 0.34 s"


def test_lost_readers_are_left_out_together(redis, fresh_bench_for, caplog):
    """Else each of them would have the prefill begin again."""
    share(fresh_bench_for(remote=redis.url() + PATIENT))
    with proxy_to(redis.port, most=30_000, cuts=True) as proxy:  # behind the headers and some layers
        here = fresh_bench_for(remote=f"redis://127.0.0.1:{proxy.port}/0{PATIENT}&retry_s=600")
        with caplog.at_level(logging.WARNING):
            assert_computed_in_place(here)
        stats = remote_of(here).stats()
        assert stats.read_bytes > 0 and stats.misses > 0, "behind the headers"
    assert caplog.text.count("are computed instead") == 1


def test_on_a_slow_network_only_what_arrives_in_time_is_requested(redis, fresh_bench_for):
    long = [make_text(seed, words=300) for seed in range(6)]  # half a megabyte each
    share(fresh_bench_for(remote=redis.url() + PATIENT), long)
    with proxy_to(redis.port, bytes_per_s=2e5) as proxy:
        here = fresh_bench_for(remote=f"redis://127.0.0.1:{proxy.port}/0?timeout_s=1&retry_s=0.01")
        back = threading.Event()
        assert_computed_in_place(here, make_prompt(long[:3]))
        remote_of(here).call_when_available(back.set)
        assert back.wait(60)  # it answers, slowly
        assert_computed_in_place(here, make_prompt(long[3:]))


@pytest.mark.parametrize("where", ["header", "last layer"])
def test_a_damaged_value_is_computed_in_place_and_the_others_are_used(redis, fresh_bench_for, where):
    one = fresh_bench_for(remote=redis.url() + PATIENT)
    keys, names = share(one), RedisNames(redis)
    by_digest = {name.rpartition(":")[2]: name for name in names.names()}
    spoiled = by_digest[keys[1].digest]
    raw = bytearray(names.get(spoiled))
    raw[{"header": 50, "last layer": -2}[where]] ^= 4
    names.set(spoiled, bytes(raw))

    lacking = fresh_bench_for()
    lacking.engine.encode([TEXTS[0], *TEXTS[2:]])
    here = fresh_bench_for(remote=redis.url() + PATIENT)
    found, expected = here.engine.prefill(PROMPT), lacking.engine.prefill(PROMPT)
    assert (found.report.hits, found.report.misses) == (3, 1)
    assert torch.equal(found.logits, expected.logits)
    stats = remote_of(here).stats()
    assert stats.damaged and not stats.errors
    assert here.engine.finish_background() and remote_of(here).flush()  # encoded anew, and shared
    assert fresh_bench_for(remote=redis.url() + PATIENT).engine.prefill(PROMPT).report.hits == 4


def test_a_part_of_a_passage_is_read_from_the_shared_store(redis, fresh_bench_for, local):
    """As vLLM's prompts have them, whose edges may be tokenized otherwise."""
    whole = tuple(local.engine.tokenize(Prompt([Chunk(TEXTS[0])])).token_ids)
    prompt = Prompt([
        Literal("", (5, 6)), Chunk(token_ids=whole[2:-2], whole=whole, skipped=2), Literal("", (7, 8, 9)),
    ])  # fmt: skip
    share(fresh_bench_for(remote=redis.url() + PATIENT))
    here = fresh_bench_for(remote=redis.url() + PATIENT)
    found = here.engine.prefill(prompt)
    assert found.report.hits == 1 and torch.equal(found.logits, local.engine.prefill(prompt).logits)
    assert here.engine.finish_background() and here.engine.runtime.store.stats().entries == 1


# --- what the controller says


def test_the_controller_computes_what_would_take_longer_to_fetch(redis, fresh_bench_for):
    share(fresh_bench_for(remote=redis.url() + PATIENT))
    nbytes = 4 * 90 * 4 * 2 * 2 * 16 * 4  # of four passages of some 90 tokens
    with proxy_to(redis.port) as proxy:
        here = fresh_bench_for(remote=f"redis://127.0.0.1:{proxy.port}/0{PATIENT}")
        engine = here.engine
        assert engine.prefill(make_prompt(TEXTS[:1])).report.hits == 1  # which measures it
        assert engine.finish_background()
        rate = remote_of(here).bytes_per_s
        load_ms = nbytes / rate * 1e3
        for row_ms, hits in ((load_ms / 1e5, 1), (load_ms, 4)):
            engine.runtime.save_profile(timed(row_ms))
            report = engine.prefill(PROMPT).report
            assert report.hits == hits, (row_ms, load_ms)
            assert report.decision.predicted_ttft_ms is not None
            assert engine.finish_background()
            if hits == 1:
                assert engine.runtime.store.stats().entries == 4  # each was encoded here
                engine.runtime.store.delete(list(engine.runtime.store.sizes())[1:])


def timed(row_ms: float) -> DeviceProfile:
    grid = PrefillProfile.of("test", (0, 1000), (10, 1000), lambda cached, new: row_ms * new)
    return DeviceProfile("test", grid, profile().tiers)


# --- deleting


def test_forgotten_kv_is_deleted_from_the_shared_store(redis, fresh_bench_for):
    here, names = fresh_bench_for(remote=redis.url() + PATIENT), RedisNames(redis)
    here.engine.encode(TEXTS, node_ids=["a", "b", "c", "d"])
    assert remote_of(here).flush() and len(names.names()) == 4
    here.engine.forget(["a", "b", "c"])
    assert len(names.names()) == 1 and here.engine.runtime.nodes.outbox(shared=True) == {}


def test_kv_of_hidden_nodes_is_at_home_alone(redis, fresh_bench_for):
    """A deletion that can still be undone: its KV must not wait in the shared store."""
    here, names = fresh_bench_for(remote=redis.url() + PATIENT), RedisNames(redis)
    here.engine.encode(TEXTS, node_ids=["a", "b", "c", "d"])
    assert remote_of(here).flush() and len(names.names()) == 4
    here.engine.hide(["a", "b"])
    assert remote_of(here).flush() and len(names.names()) == 2
    assert here.engine.store.stats().entries == 4 and here.engine.missing(["a", "b"]).left_out == 2
    assert list(here.engine.encode_nodes(["a", "b"])) == [0, 0]
    here.engine.unhide(["a"])
    assert remote_of(here).flush() and len(names.names()) == 3
    assert here.engine.missing(["a"]).node_ids == () and here.engine.missing(["a"]).left_out == 0
    here.engine.forget(["b"])
    assert here.engine.store.stats().entries == 3 and here.engine.runtime.nodes.outbox(shared=True) == {}


@pytest.fixture
def line(redis):
    with proxy_to(redis.port) as proxy:
        yield proxy


def test_a_deletion_is_finished_when_the_shared_store_answers_again(redis, line, fresh_bench_for, caplog):
    here = fresh_bench_for(remote=f"{redis.url(line.port)}?timeout_s=60&retry_s=0.05")
    names = RedisNames(redis)
    here.engine.encode(TEXTS, node_ids=["a", "b", "c", "d"])
    assert remote_of(here).flush()
    line.cut()
    with caplog.at_level(logging.WARNING):
        assert here.engine.forget(["a", "b", "c"]) > 0
    assert "The KV of 3 deleted passages may still be there" in caplog.text
    assert here.engine.runtime.store.stats().entries == 1  # here they are gone
    assert len(here.engine.runtime.nodes.outbox(shared=True)) == 3 and len(names.names()) == 4
    back = threading.Event()
    remote_of(here).call_when_available(back.set)
    line.mend()
    assert back.wait(60) and here.engine.finish_background()
    assert len(names.names()) == 1 and here.engine.runtime.nodes.outbox(shared=True) == {}


def test_the_next_process_finishes_a_deletion(redis, line, fresh_bench_for, tmp_path):
    url, names = f"{redis.url(line.port)}?timeout_s=60&retry_s=600", RedisNames(redis)
    here = fresh_bench_for(home=tmp_path / "kept", remote=url)
    here.engine.encode(TEXTS[:2], node_ids=["a", "b"])
    assert remote_of(here).flush()
    line.cut()
    here.engine.forget(["a"])
    here.engine.close()
    line.mend()
    again = fresh_bench_for(home=tmp_path / "kept", remote=url)
    again.engine.forget(())
    assert len(names.names()) == 1 and again.engine.runtime.nodes.outbox(shared=True) == {}


def test_a_process_without_the_url_says_that_copies_may_stay(shared_of, fresh_bench_for, tmp_path, caplog):
    """`docs rm` without `--remote` left the KV in the shared store and said nothing."""
    shared, home, note = (
        shared_of("file"),
        tmp_path / "kept",
        "Copies of deleted KV may stay in the shared store",
    )
    here = fresh_bench_for(home=home, remote=shared.url + PATIENT)
    here.engine.encode(TEXTS, node_ids=["a", "b", "c", "d"])
    assert remote_of(here).flush()
    here.engine.forget(["d"])
    here.engine.close()
    other = fresh_bench_for(home=home, dtype="bfloat16").engine
    other.forget(())
    assert note not in caplog.text and len(shared.names.names()) == 3
    other.forget(["a"])
    other.forget(["b"])
    assert caplog.text.count(note) == 1, "a command for a hundred documents says it once"
    alone = fresh_bench_for().engine
    alone.encode(TEXTS[:1], node_ids=["a"])
    alone.forget(["a"])
    assert caplog.text.count(note) == 1, "this home has no shared store"


def test_deletions_owed_only_to_the_shared_store_are_not_repeated_here(fresh_bench_for, monkeypatch):
    """Each `enter` once deleted every owed key again, in the turn that questions need, and was called back for it."""
    engine = fresh_bench_for(remote=f"redis://127.0.0.1:{free_port()}/0?retry_s=600").engine
    engine.encode(TEXTS[:3], node_ids=["a", "b", "c"])
    deleted, called = [], []
    delete, call_when_available = engine.store.delete, engine.store.remote.call_when_available
    monkeypatch.setattr(
        engine.store, "delete", lambda keys, still: (deleted.append(len(keys)), delete(keys, still))[1]
    )
    monkeypatch.setattr(
        engine.store.remote,
        "call_when_available",
        lambda call, name: (called.append(name), call_when_available(call, name)),
    )
    engine.forget(["a", "b"])
    for number in range(3):
        engine.enter([make_text(10 + number)], [f"new {number}"])
        engine.forget(())
    assert deleted == [2] and len(engine.runtime.nodes.outbox(shared=True)) == 2
    assert len(set(called)) == 1
    engine.encode(TEXTS[:1], node_ids=["a again"])
    assert len(engine.runtime.nodes.outbox(shared=True)) == 1  # a node has it
    engine.forget(["a again", "c"])
    assert deleted == [2, 2] and len(engine.runtime.nodes.outbox(shared=True)) == 3
    assert engine.store.stats().entries == 0 and engine.runtime.nodes.outbox() == {}


def test_a_deletion_holds_no_lock_while_it_waits_for_the_shared_store(redis, fresh_bench_for, monkeypatch):
    engine, passed = fresh_bench_for(remote=redis.url() + PATIENT).engine, threading.Event()
    engine.encode(TEXTS[:1], node_ids=["a"])
    delete_shared = engine.store.delete_shared

    def question() -> None:
        with engine.runtime.store_lock:
            passed.set()

    def deleting(keys) -> None:
        asking = started(question)
        assert passed.wait(SOON_S)
        asking.join()
        delete_shared(keys)

    monkeypatch.setattr(engine.store, "delete_shared", deleting)
    assert engine.forget(["a"]) > 0 and engine.runtime.nodes.outbox(shared=True) == {}


def test_kv_that_is_deleted_while_it_is_fetched_is_not_stored(redis, fresh_bench_for):
    share(fresh_bench_for(remote=redis.url() + PATIENT), TEXTS[:2])
    here = fresh_bench_for(remote=redis.url() + PATIENT)
    engine = here.engine
    engine.enter(TEXTS[:2], ["a", "b"])
    held = threading.Event()
    engine.runtime.background.add(lambda: held.wait(60))
    chunks = [Chunk(node_id=name, entered=True) for name in "ab"]
    prompt = engine.tokenize(Prompt([Literal("Read: "), *chunks, Literal(" Now?")]))
    assert engine.prefill(prompt).report.hits == 2
    engine.forget(["a"])
    held.set()
    assert engine.finish_background()
    assert engine.runtime.store.stats().entries == 1


def test_fetching_in_the_background_evicts_nothing(redis, fresh_bench_for):
    one = fresh_bench_for(remote=redis.url() + PATIENT)
    share(one)
    budget = one.engine.runtime.store.stats().bytes // 2
    here = fresh_bench_for(remote=redis.url() + PATIENT, store_budget_bytes=budget)
    here.engine.enter(TEXTS, ["a", "b", "c", "d"])
    assert list(here.engine.encode_nodes(["a", "b", "c", "d"])) == [0, 0]
    stats = here.engine.runtime.store.stats()
    assert (stats.entries, stats.evictions) == (2, 0)
