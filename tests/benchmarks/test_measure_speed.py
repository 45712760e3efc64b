"""Times of a prefill: the document shows the recorded figures, and no second is counted twice."""

import itertools
import json

from benchmarks import measure_speed
from benchmarks.measure_speed import PAGE, RECORDED, Phases, render_page


def test_the_document_shows_the_recorded_figures():
    assert render_page(json.loads(RECORDED.read_text(encoding="utf-8"))) == PAGE.read_text(encoding="utf-8")


def test_nested_phases_are_not_counted_twice(monkeypatch):
    monkeypatch.setattr(measure_speed.time, "perf_counter", itertools.count().__next__)
    phases = Phases()
    around = phases.around(lambda: phases.around(lambda: None, "attention")(), "probe")
    phases.around(around, "all")()
    assert phases.seconds == {"all": 2, "probe": 2, "probe: attention": 1}
