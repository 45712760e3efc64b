"""The trace of a prefill: everything that was done is in it once, where and when it was done."""

import pytest
from benches import StagedTransfers, make_prompt, make_text

TEXTS = [make_text(seed) for seed in range(3)]


@pytest.fixture
def traced(fresh):
    fresh.engine.encode(TEXTS)
    return fresh.engine


def of(trace, part):
    return [event for event in trace.events if event.part == part]


@pytest.mark.parametrize("method", ["reuse", "cacheblend", "cacheblend-gradual", "probe"])
def test_every_layer_is_loaded_once_a_chunk_and_computed(traced, method):
    report = traced.prefill(make_prompt(TEXTS), method=method, ratio=0.5).report
    layers = range(traced.runtime.decoder.geometry.layers)
    loads = [(event.layer, event.chunk) for event in of(report.trace, "load")]
    assert sorted(loads) == [(layer, chunk) for layer in layers for chunk in range(len(TEXTS))]
    assert sorted({event.layer for event in of(report.trace, "compute")}) == list(layers)
    assert len(of(report.trace, "head")) == len(of(report.trace, "lookup")) == 1


def test_a_layer_is_never_computed_before_it_is_loaded(traced):
    """The wait lies inside its layer's compute, and ends after that layer's last load."""
    trace = traced.prefill(make_prompt(TEXTS), method="reuse").report.trace
    waits = {event.layer: event for event in of(trace, "stall")}
    for compute in of(trace, "compute"):
        wait = waits[compute.layer]
        assert compute.start_ms <= wait.start_ms <= wait.stop_ms <= compute.stop_ms
        assert all(load.stop_ms <= wait.stop_ms for load in of(trace, "load") if load.layer == compute.layer)


def test_the_timings_are_sums_over_the_trace_and_lie_inside_the_prefill(traced):
    report = traced.prefill(make_prompt(TEXTS), method="cacheblend").report
    for part in ("load", "stall", "move", "select"):
        assert getattr(report.timings, f"{part}_ms") == report.trace.total_ms(part)
    assert report.timings.load_ms > 0
    assert all(
        0 <= event.start_ms <= event.stop_ms <= report.timings.prefill_ms for event in report.trace.events
    )


class ClockedLane(StagedTransfers):
    """A device whose streams have a clock of their own, a second behind the host's, that is known in the end."""

    def __init__(self):
        super().__init__()
        self.done = False
        self.read_early = False

    def stamp(self):
        return [super().stamp()]

    def time_of(self, stamp):
        self.read_early |= not self.done
        return stamp[0] + 1.0

    def synchronize(self):
        self.done = True


def test_device_work_has_the_times_of_its_stream(traced, monkeypatch):
    transfers = ClockedLane()
    monkeypatch.setattr(traced.runtime, "transfers", transfers)
    trace = traced.prefill(make_prompt(TEXTS), method="reuse").report.trace
    assert not transfers.read_early
    assert {event.track for event in of(trace, "compute")} == {"device"}
    assert {event.track for event in of(trace, "copy")} == {"copy"}
    assert min(event.start_ms for event in of(trace, "compute")) > 1000
    assert max(event.stop_ms for event in of(trace, "load")) < 1000 + min(
        event.start_ms for event in of(trace, "copy")
    )
