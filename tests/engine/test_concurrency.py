"""Threads, cancellation and streams that nobody reads to the end: the engine goes on serving."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benches import make_prompt, make_text
from waiting import SOON_S, started, until

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.scheduling.queue import DeviceQueue
from ragblend.engine.selection import Policy
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.nodes import NodeIndex
from ragblend.kvstore.store import KVStore

TEXTS = [make_text(seed) for seed in range(6)]


@pytest.fixture
def serves(stored):
    """Checks, when the test is over, that the engine still gives the right answer."""
    prompt = make_prompt(TEXTS)
    expected = stored.engine.generate(prompt, max_new_tokens=10).token_ids
    yield
    assert stored.engine.generate(prompt, max_new_tokens=10).token_ids == expected
    assert device_is_free(stored.engine)


@pytest.mark.parametrize("step", ["put", "contains", "node ids"])
def test_closing_waits_for_the_current_chunk_of_an_encode_which_goes_on(engine, monkeypatch, step):
    """The store was closed under a put: `the KV store has been closed; open it again`, and the rest was not encoded."""
    owner, name = {
        "put": (KVStore, "put"),
        "contains": (KVStore, "contains"),
        "node ids": (NodeIndex, "put_many"),
    }[step]
    real, closings = getattr(owner, name), []

    def closed_meanwhile(self, *arguments, **named):
        if len(closings) < 3:
            closings.append(started(engine.close))
            closings[-1].join(0.05)  # else it could be through by then
        return real(self, *arguments, **named)

    engine.encode(["loads the model"])
    monkeypatch.setattr(owner, name, closed_meanwhile)
    report = engine.encode(TEXTS, node_ids=[str(number) for number in range(len(TEXTS))])
    for closing in closings:
        closing.join()
    assert closings and report.encoded == len(TEXTS)
    assert engine.encode(TEXTS).skipped == len(TEXTS)
    prompt = engine.tokenize(Prompt([Literal("read: "), Chunk(node_id="3"), Literal("?")]))
    assert engine.prefill(prompt, method="reuse").report.hits == 1


def device_is_free(engine):
    """Once the queue is empty; the device is held by nobody then."""
    return until(lambda: not engine.runtime.queue.request_count)


@pytest.fixture
def endless(stored, monkeypatch):
    """The model never ends an answer by itself; counts its forward passes."""
    model, calls = stored.engine.runtime.loaded.model, []
    monkeypatch.setattr(stored.engine.runtime, "end_ids", [])
    hook = model.model.norm.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    hook.remove()


class CancelsAt(Policy):
    """Sets an event when the layer loop asks about that layer, and remembers the last layer it was asked about."""

    def __init__(self, layer, event):
        super().__init__(name="cancels")
        object.__setattr__(self, "state", {"layer": layer, "event": event, "last": -1})

    def peeks(self, plan, layer):
        self.state["last"] = layer
        if layer == self.state["layer"]:
            self.state["event"].set()
        return False


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_cancelled_between_layers(stored, serves, layer):
    event = threading.Event()
    policy = CancelsAt(layer, event)
    with pytest.raises(Cancelled):
        stored.engine.prefill(make_prompt(TEXTS), method=policy, cancel=event)
    assert policy.state["last"] == layer  # no further layer was begun


def test_cancelled_before_it_begins(stored, serves):
    event = threading.Event()
    event.set()
    for call in (stored.engine.prefill, stored.engine.generate):
        with pytest.raises(Cancelled):
            call(make_prompt(TEXTS), cancel=event)


def test_cancelled_between_tokens(stored, serves):
    """Set while the third token is on its way: the answer ends long before its 1500 tokens."""
    event = threading.Event()
    model = stored.engine.runtime.loaded.model
    calls = []

    def count(*_):
        calls.append(1)
        if len(calls) == 3:
            event.set()

    hook = model.model.norm.register_forward_pre_hook(count)  # which ends every pass, whoever runs it
    try:
        with pytest.raises(Cancelled, match="tokens"):
            stored.engine.generate(make_prompt(TEXTS), max_new_tokens=1500, cancel=event)
    finally:
        hook.remove()
    assert len(calls) <= 4


def test_cancelled_while_it_waits(stored, serves):
    event, waiting = threading.Event(), threading.Event()

    def wait():
        waiting.set()
        with pytest.raises(Cancelled):
            stored.engine.generate(make_prompt(TEXTS), cancel=event)

    with stored.engine.runtime.queue.turn(), ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait)
        assert waiting.wait(SOON_S)
        event.set()
        done.result(timeout=SOON_S)


def test_a_failing_policy_fails_its_request_alone(stored, serves):
    class Fails(Policy):
        def peeks(self, plan, layer):
            if layer == 2:
                raise ZeroDivisionError
            return False

    with pytest.raises(ZeroDivisionError):
        stored.engine.prefill(make_prompt(TEXTS), method=Fails(name="fails"))
    with pytest.raises(ZeroDivisionError):
        list(stored.engine.stream(make_prompt(TEXTS), method=Fails(name="fails")))


def test_closing_a_stream_frees_the_device(stored, serves, endless):
    stream = stored.engine.stream(make_prompt(TEXTS), max_new_tokens=1500)
    next(iter(stream))
    stream.close()
    assert not stored.engine.runtime.queue.request_count
    assert len(endless) < 500
    stream.close()
    assert list(stream) == []
    with pytest.raises(Cancelled):
        _ = stream.result


def test_a_stream_without_references_stops(stored, serves, endless):
    """`for piece in engine.stream(...): break` must not keep the device for 1500 tokens."""
    for _ in stored.engine.stream(make_prompt(TEXTS), max_new_tokens=1500):
        break
    gc.collect()
    assert device_is_free(stored.engine)
    assert len(endless) < 500


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted by /proc")
def test_waiting_and_decoding_requests_hold_no_file_open(stored, serves):
    """Each held three of the index, for as long as its answer took: some hundreds of streams would be the end."""
    engine, begun, more = stored.engine, threading.Semaphore(0), threading.Event()
    home = str(engine.home.resolve())

    def opened():
        held = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(each).startswith(home) for each in held if each.is_symlink())

    def on_text(piece):
        begun.release()
        more.wait(60)

    def generate(number):
        return engine.generate(make_prompt(TEXTS[number:]), max_new_tokens=4, on_text=on_text)

    engine.finish_background()
    before = opened()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(generate, number) for number in range(4)]
        assert begun.acquire(timeout=60)  # one decodes, the others wait or decode as well
        until(lambda: engine.runtime.queue.request_count >= 4)
        during = opened()
        more.set()
        assert all(answer.result().token_ids for answer in answers)
    assert during <= before


def test_requests_that_yield_the_device_between_all_layers_answer_the_same(stored, serves, monkeypatch):
    """Each has its own cache, plan and probes: nothing of one is another's, wherever they are interleaved."""
    monkeypatch.setattr("ragblend.engine.scheduling.queue.SLICE_S", SHORT_S)
    prompts = [make_prompt([TEXTS[(n + i) % 6] for i in range(4)], suffix=f" Which {n}?") for n in range(6)]
    methods = ["probe-shift", "full", "reuse", "cacheblend", "a3", "prophet"]
    engine, handed = stored.engine, []
    monkeypatch.setattr(DeviceQueue, "yield_device", counted(DeviceQueue.yield_device, handed))

    def ask(number):
        options = {"method": methods[number], "ratio": 0.5, "temperature": 0.7, "seed": number}
        if number % 2:
            return "".join(engine.stream(prompts[number], max_new_tokens=12, **options))
        return engine.generate(prompts[number], max_new_tokens=12, **options).token_ids

    alone = [ask(number) for number in range(6)]
    handed.clear()  # a stream may end shortly after its last text
    with ThreadPoolExecutor(6) as pool:
        together = [list(pool.map(ask, range(6))) for _ in range(2)]
    assert together == [alone] * 2
    assert handed.count(SHORT_S) > 20 and handed.count(0.0) > 20  # between layers, and between tokens


SHORT_S = 1e-9


def counted(yield_device, handed):
    """Notes after how long the device was given away, whenever others waited for it."""

    def noting(self, ticket, cancel, after_s):
        if self.has_waiting:
            handed.append(after_s)
        yield_device(self, ticket, cancel, after_s)

    return noting


def test_a_stream_goes_on_while_another_prompt_is_read(stored, serves, monkeypatch):
    """The second request came in the middle of the first answer, and used to wait for its end."""
    monkeypatch.setattr("ragblend.engine.scheduling.queue.SLICE_S", 0.0)
    engine, said, second = stored.engine, [], []

    def ask_too():
        options = {"method": "full", "max_new_tokens": 4, "on_text": lambda _: said.append("second")}
        engine.generate(make_prompt(TEXTS, suffix=" And then?"), **options)

    def on_text(_):
        said.append("first")
        if len(said) == 2:
            second.append(started(ask_too))
            until(lambda: engine.runtime.queue.request_count >= 2)

    engine.generate(make_prompt(TEXTS), method="full", max_new_tokens=60, on_text=on_text)
    second[0].join(60)
    begin, end = said.index("second"), len(said) - 1 - said[::-1].index("second")
    # Its prompt passed the layers between the first one's tokens, and it ended first.
    assert 2 <= said[:begin].count("first") < 60 and "first" in said[begin:end]
    assert said[-1] == "first"


def test_a_request_that_yielded_can_be_cancelled_and_closing_waits_for_others(stored, serves, monkeypatch):
    engine, cancel, begun, go = stored.engine, threading.Event(), threading.Event(), threading.Event()
    outcome = []

    def first(_):
        begun.set()

    def ask_first():
        with pytest.raises(Cancelled):
            engine.generate(make_prompt(TEXTS), "full", cancel=cancel, on_text=first, max_new_tokens=1500)
        outcome.append("cancelled")

    def hold(_):
        go.wait(60)

    def ask_second():
        engine.generate(make_prompt(TEXTS[:2]), "full", on_text=hold, max_new_tokens=3)
        outcome.append("answered")

    threads = [threading.Thread(target=ask) for ask in (ask_first, ask_second)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    until(lambda: engine.runtime.queue.request_count >= 2 and engine.runtime.queue.order.begun[1:])
    closing = threading.Thread(target=engine.close)
    cancel.set()
    threads[0].join(60)
    assert outcome == ["cancelled"]
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()  # the second is in the middle of its answer
    go.set()
    for thread in (threads[1], closing):
        thread.join(60)
    assert outcome == ["cancelled", "answered"]


def test_eight_threads_open_load_and_encode_together(fresh_bench_for, tmp_path):
    """Everything is loaded on first use: here by eight threads at once."""
    bench = fresh_bench_for("llama")
    prompts = [make_prompt([TEXTS[n % 6]], suffix=f" question {n}?") for n in range(8)]

    def ask(number):
        bench.engine.encode([TEXTS[number % 6]], node_ids=[f"node {number}"])
        prompt = Prompt([Literal("read: "), Chunk(node_id=f"node {number}"), Literal("?")])
        assert bench.engine.prefill(prompt, "reuse").report.hits == 1
        return list(bench.engine.generate(prompts[number], "full", max_new_tokens=5).token_ids)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert found == [bench.answer(prompt, 5) for prompt in prompts]
    assert bench.engine.store.stats().entries == 6
