"""Prompts that come while retrieval goes on: what was read ahead is used for exactly the last one, or not at all."""

import threading
import time

import pytest
from benches import make_prompt, make_text
from doubles import raising

from ragblend.engine import engine as engine_module
from ragblend.engine.scheduling import speculation
from ragblend.kvstore.errors import Cancelled, UsageError

TEXTS = [make_text(seed) for seed in range(4)]
RIGHT, WRONG = make_prompt(TEXTS[:3]), make_prompt(TEXTS[1:])
WAIT_S = 60


@pytest.fixture
def fresh(fresh_bench_for):
    bench = fresh_bench_for()
    bench.engine.encode(TEXTS)
    return bench


class Reads:
    """Prefills as they happen. ahead: what became of those begun early; in_place: how many the answer itself began.

    holds: those begun early come to the end of one layer after the other, and to no end.
    """

    def __init__(self, monkeypatch):
        self.ahead, self.in_place, self.holds = [], 0, False
        self.begun, self.ended = threading.Event(), threading.Event()
        real = speculation.prefill

        def ahead(runtime, request, turn, **how):
            self.begun.set()
            try:
                while self.holds:
                    turn.between_layers()
                    time.sleep(0.001)
                found = real(runtime, request, turn, **how)
                self.ahead.append("read")
                return found
            except Cancelled:
                self.ahead.append("dropped")
                self.holds = False
                raise
            finally:
                self.ended.set()

        def in_place(*given, **how):
            self.in_place += 1
            return real(*given, **how)

        monkeypatch.setattr(speculation, "prefill", ahead)
        monkeypatch.setattr(engine_module, "prefill", in_place)

    def counted_from_here(self, bench, prompt, **options):
        """What that prompt is answered, before anything is read ahead."""
        want = expected(bench, prompt, **options)
        bench.engine.finish_background()
        self.in_place = 0
        return want


@pytest.fixture
def reads(monkeypatch):
    return Reads(monkeypatch)


def answered(bench, prompts, **options):
    with bench.engine.stream_staged(prompts, max_new_tokens=6, **options) as stream:
        return stream.result.token_ids


def expected(bench, prompt, **options):
    return bench.engine.generate(prompt, max_new_tokens=6, **options).token_ids


@pytest.mark.parametrize("method", ["probe-shift", "exact", "full"])
def test_a_prompt_that_stays_the_same_is_read_ahead(fresh, reads, method):
    want = reads.counted_from_here(fresh, RIGHT, method=method)

    def prompts():
        yield RIGHT
        assert reads.ended.wait(WAIT_S)
        yield RIGHT

    assert answered(fresh, prompts(), method=method) == want
    assert (reads.ahead, reads.in_place) == (["read"], 0)


def test_a_prefill_in_progress_of_the_final_prompt_is_waited_for(fresh, reads):
    want, reads.holds = reads.counted_from_here(fresh, RIGHT), True

    def prompts():
        yield RIGHT
        assert reads.begun.wait(WAIT_S)
        yield RIGHT
        reads.holds = False

    assert answered(fresh, prompts()) == want
    assert (reads.ahead, reads.in_place) == (["read"], 0)


def test_cancelling_does_not_wait_for_the_prefill_in_progress(engine, reads):
    reads.holds = True

    def prompts():
        yield RIGHT
        assert reads.begun.wait(WAIT_S)

    with engine.stream_staged(prompts(), max_new_tokens=6) as stream:
        threading.Thread(target=lambda: (reads.begun.wait(WAIT_S), stream.close())).start()
        with pytest.raises(Cancelled):
            list(stream)
    assert reads.ahead == ["dropped"]


@pytest.mark.parametrize("last", [RIGHT, make_prompt(TEXTS[:3], suffix="Another question?")])
def test_a_changed_prompt_is_dropped_between_two_layers(fresh, reads, last):
    """The same passages with other words are another prompt."""
    want, reads.holds = reads.counted_from_here(fresh, last), True

    def prompts():
        yield WRONG if last is RIGHT else RIGHT
        assert reads.begun.wait(WAIT_S)
        yield last

    assert answered(fresh, prompts()) == want
    assert reads.ahead[0] == "dropped"


def test_nothing_is_read_ahead_on_a_busy_device(fresh, reads):
    want, has_it, let_go = reads.counted_from_here(fresh, RIGHT), threading.Event(), threading.Event()

    def busy():
        with fresh.engine.runtime.queue.turn():
            has_it.set()
            let_go.wait(WAIT_S)

    other = threading.Thread(target=busy)

    def prompts():
        other.start()
        assert has_it.wait(WAIT_S)
        yield RIGHT
        let_go.set()

    assert answered(fresh, prompts()) == want
    other.join()
    assert (reads.ahead, reads.in_place) == ([], 1)


def test_another_request_gets_the_device_after_a_layer(fresh, reads):
    want, served = reads.counted_from_here(fresh, RIGHT), []
    reads.holds = True
    other = threading.Thread(target=lambda: served.append(expected(fresh, WRONG)))

    def prompts():
        yield RIGHT
        assert reads.begun.wait(WAIT_S)
        other.start()
        other.join(WAIT_S)

    assert answered(fresh, prompts()) == want
    assert served == [expected(fresh, WRONG)] and reads.ahead == ["dropped"]


def test_a_failure_of_reading_ahead_is_ignored(fresh, monkeypatch):
    fails = raising(RuntimeError("no memory left"))
    want = expected(fresh, RIGHT)
    monkeypatch.setattr(speculation, "prefill", fails)
    assert answered(fresh, [RIGHT, RIGHT]) == want


def test_an_error_of_retrieval_is_raised_and_the_device_is_free(fresh, reads):
    fresh.engine.prefill(RIGHT)

    def prompts():
        yield RIGHT
        raise OSError("the index is gone")

    with pytest.raises(OSError, match="the index is gone"):
        answered(fresh, prompts())
    with fresh.engine.runtime.queue.turn():
        assert fresh.engine.runtime.queue.request_count == 1


def test_no_prompt_at_all(fresh):
    with pytest.raises(UsageError, match="there is no prompt"):
        answered(fresh, [])
