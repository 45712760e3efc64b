"""The trace of a prefill: everything that was done is in it once, where and when it was done."""

import json
import threading

import pytest
from benches import make_prompt, make_text
from test_device import StagedLane

from ragblend.engine.device import Lane
from ragblend.engine.trace import HOST, Recorder, Trace, TraceEvent, busy_ms

TEXTS = [make_text(seed) for seed in range(3)]


@pytest.fixture
def traced(fresh):
    fresh.engine.encode(TEXTS)
    return fresh.engine


def of(trace, part):
    return [event for event in trace.events if event.part == part]


@pytest.mark.parametrize("method", ["reuse", "cacheblend", "cacheblend-gradual"])
def test_every_layer_is_loaded_once_a_chunk_and_computed(traced, method):
    report = traced.prefill(make_prompt(TEXTS), method=method, ratio=0.5).report
    layers = range(traced._resources.decoder.geometry.layers)
    loads = [(event.layer, event.chunk) for event in of(report.trace, "load")]
    assert sorted(loads) == [(layer, chunk) for layer in layers for chunk in range(len(TEXTS))]
    assert sorted({event.layer for event in of(report.trace, "compute")}) == list(layers)
    assert len(of(report.trace, "head")) == len(of(report.trace, "lookup")) == 1


def test_a_layer_is_never_computed_before_it_is_there(traced):
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


def test_loads_are_on_their_threads_tracks_and_computing_on_the_hosts(traced):
    trace = traced.prefill(make_prompt(TEXTS), method="reuse").report.trace
    assert {event.track for event in of(trace, "compute")} == {HOST}
    assert all(event.track.startswith("ragblend-loader") for event in of(trace, "load"))
    assert trace.tracks[0] == HOST


class ClockedLane(StagedLane):
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


def test_what_streams_did_has_the_streams_times_and_is_asked_for_when_they_are_done(traced, monkeypatch):
    lane = ClockedLane()
    monkeypatch.setattr(traced._resources.server, "lane", lane)
    trace = traced.prefill(make_prompt(TEXTS), method="reuse").report.trace
    assert not lane.read_early
    assert {event.track for event in of(trace, "compute")} == {"device"}
    assert {event.track for event in of(trace, "copy")} == {"copy"}
    assert min(event.start_ms for event in of(trace, "compute")) > 1000
    assert max(event.stop_ms for event in of(trace, "load")) < 1000 + min(
        event.start_ms for event in of(trace, "copy")
    )


def test_a_part_that_an_exception_ends_is_in_the_trace():
    recorder = Recorder(Lane(None))
    with pytest.raises(ZeroDivisionError), recorder.part("load", 1):
        1 / 0  # noqa: B018
    (event,) = recorder.finish().events
    assert (event.part, event.layer, event.track) == ("load", 1, HOST)


def test_other_threads_have_tracks_of_their_names():
    recorder = Recorder(Lane(None))

    def work():
        with recorder.part("load"):
            pass

    thread = threading.Thread(target=work, name="reader 7")
    thread.start()
    thread.join()
    assert recorder.finish().tracks == ("reader 7",)


def test_a_trace_viewer_gets_named_tracks_and_microseconds():
    events = (TraceEvent("compute", HOST, 1.5, 2.0, 3), TraceEvent("load", "reader", 0.25, 1.0, 3, 1))
    found = json.loads(json.dumps(Trace(events).to_chrome()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    spans = {e["name"]: e for e in found if e["ph"] == "X"}
    assert names == {0: HOST, 1: "reader"}
    assert (spans["compute 3"]["ts"], spans["compute 3"]["dur"], spans["compute 3"]["tid"]) == (1500, 2000, 0)
    assert spans["load 3"]["args"] == {"layer": 3, "chunk": 1}


def test_time_that_events_share_counts_once():
    events = [TraceEvent("load", track, start, 2.0) for track, start in (("a", 0.0), ("b", 1.0), ("a", 5.0))]
    assert busy_ms(events) == pytest.approx(5.0)
    assert busy_ms([]) == 0
