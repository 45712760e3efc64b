"""Traces as files: the suffix chooses the format, and is checked before any work is done."""

import json

import numpy as np
import pytest

from ragblend.app.answering.timeline import (
    PART_COLOURS,
    TimelineError,
    check_timeline,
    chrome_trace,
    write_timeline,
)
from ragblend.engine.trace import HOST, Trace, TraceEvent
from ragblend.kvstore.errors import UsageError

TRACE = Trace(
    (
        *(TraceEvent("load", "reader", 2.0 * layer, 1.5, layer, 0) for layer in range(4)),
        *(TraceEvent("compute", "host", 3.0 * layer, 2.5, layer) for layer in range(4)),
        *(TraceEvent("stall", "host", 3.0 * layer, 0.5, layer) for layer in range(4)),
    )
)


def test_the_picture_has_each_parts_colour_that_occurs_and_no_other(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    write_timeline(TRACE, "title", tmp_path / "trace.png")
    pixels = image.imread(tmp_path / "trace.png")
    plot = pixels[: int(pixels.shape[0] * 0.7)]  # without the legend
    colours = np.unique((255 * plot[..., :3]).round().astype(int).reshape(-1, 3), axis=0)
    seen = {"#{:02x}{:02x}{:02x}".format(*colour) for colour in colours}
    assert {PART_COLOURS[part] for part in ("load", "compute", "stall")} <= seen
    assert PART_COLOURS["copy"] not in seen


@pytest.mark.parametrize("name", ["trace", "trace.svg", "trace.json.gz"])
def test_an_unknown_format_is_refused_by_name(tmp_path, name):
    with pytest.raises(UsageError, match=name):
        check_timeline(tmp_path / name)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(TimelineError, match="writing the trace"):
        write_timeline(TRACE, "title", tmp_path / "trace.json")


def test_a_trace_viewer_gets_named_tracks_and_microseconds():
    events = (TraceEvent("compute", HOST, 1.5, 2.0, 3), TraceEvent("load", "reader", 0.25, 1.0, 3, 1))
    found = json.loads(json.dumps(chrome_trace(Trace(events))))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["ph"] == "M"}
    spans = {e["name"]: e for e in found if e["ph"] == "X"}
    assert names == {0: HOST, 1: "reader"}
    assert (spans["compute 3"]["ts"], spans["compute 3"]["dur"], spans["compute 3"]["tid"]) == (1500, 2000, 0)
    assert spans["load 3"]["args"] == {"layer": 3, "chunk": 1}
