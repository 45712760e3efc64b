"""A device that fails: nobody who has read nothing yet is told, and what is stored stays."""

import threading
import weakref
from itertools import cycle

import pytest
from benches import make_prompt, make_text
from doubles import raising
from waiting import until

from ragblend.engine import runtime as runtime_module
from ragblend.engine.model.decoder import TransformersDecoder
from ragblend.engine.prompts.session import Session
from ragblend.kvstore.errors import Cancelled, DeviceError

TEXTS = [make_text(seed) for seed in range(3)]
ASKED = make_prompt(TEXTS)
ERRORS = (MemoryError, RuntimeError)


@pytest.fixture
def asked(fresh):
    """An engine that holds the passages, and what it answers."""
    fresh.engine.encode(TEXTS)
    return fresh.engine, fresh.engine.generate(ASKED, max_new_tokens=8).token_ids


@pytest.fixture
def loads(monkeypatch):
    """How often a model was loaded."""
    count, load = [], runtime_module.model.load

    def counted(*given):
        count.append(1)
        return load(*given)

    monkeypatch.setattr(runtime_module.model, "load", counted)
    return count


def break_layer(monkeypatch, layer, error, times=1):
    """The next `times` passes over that layer fail."""
    run, left = TransformersDecoder.run_layer, [error("gone")] * times

    def failing(self, number, *given, **more):
        if number == layer and left:
            raise left.pop()
        return run(self, number, *given, **more)

    monkeypatch.setattr(TransformersDecoder, "run_layer", failing)
    return left


def test_a_failure_at_any_layer_costs_no_answer(asked, loads, monkeypatch):
    engine, expected = asked
    for layer, error in zip(range(engine.runtime.fingerprint.geometry.layers), cycle(ERRORS), strict=False):
        with monkeypatch.context() as once:
            left = break_layer(once, layer, error)
            result = engine.generate(ASKED, max_new_tokens=8)
        assert not left and result.token_ids == expected and result.report.misses == 0
    assert len(loads) == engine.runtime.fingerprint.geometry.layers, "each time the model is loaded anew"


def test_a_second_failure_is_raised_and_the_next_question_is_answered(asked, monkeypatch):
    engine, expected = asked
    break_layer(monkeypatch, 0, RuntimeError, times=2)
    with pytest.raises(DeviceError, match="twice"):
        engine.generate(ASKED)
    assert engine.runtime.queue.request_count == 0
    assert engine.generate(ASKED, max_new_tokens=8).token_ids == expected


def test_a_failure_after_text_was_shown_is_raised(asked, loads):
    engine, _ = asked
    read, head = [], engine.runtime.loaded.model.get_output_embeddings()

    def show(text):
        if not read:
            head.register_forward_pre_hook(gone)
        read.append(text)

    gone = raising(RuntimeError("gone"))
    with pytest.raises(DeviceError, match="in the middle of an answer"):
        engine.generate(ASKED, max_new_tokens=40, on_text=show)
    assert read and not loads


def test_prefill_is_retried(asked, loads, monkeypatch):
    engine, expected = asked
    with monkeypatch.context() as once:
        left = break_layer(once, 1, MemoryError)
        prefilled = engine.prefill(ASKED)
    assert not left and len(loads) == 1
    assert engine.decode(prefilled, max_new_tokens=8).token_ids == expected
    break_layer(monkeypatch, 1, MemoryError, times=2)
    with pytest.raises(DeviceError, match="twice"):
        engine.prefill(ASKED)
    assert engine.generate(ASKED, max_new_tokens=8).token_ids == expected


def test_encoding_is_retried(asked, loads, monkeypatch):
    engine, _ = asked
    new, later = make_text(90), make_text(91)
    engine.enter([later], ["later"])
    with monkeypatch.context() as once:
        break_layer(once, 1, MemoryError)
        assert engine.encode([new]).encoded == 1
        left = break_layer(once, 1, MemoryError)
        assert list(engine.encode_nodes(["later"])) == [engine.count_tokens(later)]
    assert not left and len(loads) == 2
    assert engine.prefill(make_prompt([new, later]), method="reuse").report.misses == 0
    break_layer(monkeypatch, 1, MemoryError, times=2)
    with pytest.raises(DeviceError, match="twice"):
        engine.encode([make_text(92)])


def test_an_error_of_the_text_receiver_is_raised_and_not_retried(asked, loads):
    engine, expected = asked

    def show(text):
        raise RuntimeError("the loop is closed")

    with pytest.raises(RuntimeError, match="the loop is closed"):
        engine.generate(ASKED, max_new_tokens=8, on_text=show)
    assert not loads and engine.generate(ASKED, max_new_tokens=8).token_ids == expected


def test_requests_that_fail_together_load_the_model_once(asked, loads, monkeypatch):
    engine, expected = asked
    found, both = [], threading.Barrier(2, timeout=60)
    rebuild = engine.runtime.rebuild

    def together(*failed):
        both.wait()
        rebuild(*failed)

    monkeypatch.setattr(engine.runtime, "rebuild", together)
    break_layer(monkeypatch, 1, RuntimeError, times=2)
    work = [
        threading.Thread(target=lambda: found.append(engine.generate(ASKED, max_new_tokens=8).token_ids))
        for _ in range(2)
    ]
    for each in work:
        each.start()
    for each in work:
        each.join(120)
    assert found == [expected, expected] and len(loads) == 1


def test_a_retry_waits_neither_for_other_answers_nor_for_background_tasks(asked, monkeypatch):
    """It waited for chores, which wait until nobody is there, and nobody could call it off."""
    engine, expected = asked
    waits, go = threading.Event(), threading.Event()

    def chore():
        waits.set()
        go.wait(60)

    engine.runtime.background.add(chore)
    assert waits.wait(60)
    break_layer(monkeypatch, 1, RuntimeError)
    found: list[object] = []
    work = threading.Thread(
        target=lambda: found.append(engine.generate(ASKED, max_new_tokens=8).token_ids), daemon=True
    )
    work.start()
    work.join(60)
    try:
        assert found == [expected] and not engine.finish_background(0)
    finally:
        go.set()


def test_a_retry_can_be_cancelled_while_others_have_the_device(asked, monkeypatch):
    engine, _ = asked
    queue, cancel, found = engine.runtime.queue, threading.Event(), []
    fails, others, go = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with queue.turn():
            others.set()
            go.wait(60)

    def ask():
        try:
            engine.generate(ASKED, cancel=cancel)
        except Cancelled:
            found.append("called off")

    def fail(*_):
        """At the failing layer somebody else is in the queue already, and has the device next."""
        fails.set()
        until(lambda: queue.request_count >= 2)
        raise RuntimeError("gone")

    monkeypatch.setattr(TransformersDecoder, "run_layer", fail)
    asking, other = (threading.Thread(target=each, daemon=True) for each in (ask, hold))
    asking.start()
    assert fails.wait(60)
    other.start()
    assert others.wait(60)
    cancel.set()
    asking.join(60)
    go.set()
    other.join(60)
    assert found == ["called off"]


def test_the_failed_model_is_freed_before_the_next_is_loaded(asked, monkeypatch):
    """Also where an encode under way waits with it: memory may be what was short."""
    engine, expected = asked
    nodes = ["a", "b"]
    engine.enter([make_text(7), make_text(8)], nodes)
    encoding, load, held = engine.encode_nodes(nodes), runtime_module.model.load, []
    next(encoding)
    failed = weakref.ref(engine.runtime.loaded.model)

    def looks(*given):
        held.append(failed())
        return load(*given)

    monkeypatch.setattr(runtime_module.model, "load", looks)
    break_layer(monkeypatch, 1, RuntimeError)
    assert engine.generate(ASKED, max_new_tokens=8).token_ids == expected and held == [None]
    assert all(encoding) and engine.missing(nodes).node_ids == ()


def test_sessions_forget_the_context_of_a_failed_model(asked, monkeypatch):
    """They are of no use to another model, and their memory may be what was short."""
    engine, expected = asked
    session = Session()
    engine.generate(ASKED, max_new_tokens=2, session=session)
    assert session.tokens > 0
    break_layer(monkeypatch, 1, MemoryError)
    assert engine.generate(ASKED, max_new_tokens=8).token_ids == expected and session.tokens == 0


@pytest.mark.parametrize("error", [RecursionError, NotImplementedError])
def test_a_bug_is_not_retried(asked, loads, monkeypatch, error):
    engine, _ = asked
    break_layer(monkeypatch, 1, error)
    with pytest.raises(error):
        engine.generate(ASKED, max_new_tokens=8)
    assert not loads
