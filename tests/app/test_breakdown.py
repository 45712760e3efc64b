"""The breakdown of an answer: every token is in one segment with its kind, and the figures are complete."""

from ragblend.app.answering.answer import Answer
from ragblend.app.answering.breakdown import (
    KINDS,
    NO_PROFILE,
    breakdown_of,
    counts_of,
    full_prefill_fields,
    segments_of,
)
from ragblend.engine.config import Report, Timings, TokenCounts
from ragblend.engine.controller import DeviceProfile, Tier
from ragblend.engine.prompts.segments import Chunk, Literal, Prompt, with_ids
from ragblend.engine.trace import Trace, TraceEvent
from ragblend.kvstore.policy import PrefillProfile

PROMPT = Prompt(
    [
        with_ids(Literal("You are."), range(2)),
        with_ids(Chunk("first passage", "n1"), range(4)),
        with_ids(Literal("\n\n"), range(1)),
        with_ids(Literal("more"), range(1)),
        with_ids(Chunk("second passage", "n2"), range(3)),
        with_ids(Literal("Why?"), range(2)),
    ]
)
SERVED = "ff" + "rrcr" + "f" + "f" + "mmm" + "ff"
LABELS = {"n1": (2, "a.txt, p. 1"), "n2": (1, "b.txt")}
PROFILE = DeviceProfile(
    "x",
    PrefillProfile("x", (0, 10), (1, 101), ((10.0, 110.0), (10.0, 110.0))),
    (Tier("disk", 1.0),),
    5.0,
)


def report(**changes):
    trace = Trace((TraceEvent("compute", "host", 0.123456, 1.0, 3), TraceEvent("load", "w0", 0.0, 2.0, 0, 1)))
    counts = TokenCounts(prompt=13, reused=3, recomputed=1, fresh=6, missing=3, generated=7)
    times = {"load_ms": 2.0, "stall_ms": 0.5, "prefill_ms": 7.0, "ttft_ms": 8.0, "total_ms": 30.0}
    timings = Timings(**times, tokens_per_s=20.0)
    return Report("cacheblend", 0.15, counts, 0.15, timings, 1, 1, trace=trace, served=SERVED, **changes)


def breakdown(**options):
    answer = Answer("", "m", "cpu", (), 3.0, report())
    return breakdown_of(answer, PROMPT, LABELS, "float32", **options)


def test_segments_are_the_whole_context_in_order():
    segments = breakdown()["segments"]
    assert [(s["label"], s["number"], s["tokens"]) for s in segments] == [
        ("Instructions", None, 2),
        ("a.txt, p. 1", 2, 4),
        ("Between passages", None, 2),
        ("b.txt", 1, 3),
        ("Question", None, 2),
    ]
    assert segments[1]["runs"] == [("r", 2), ("c", 1), ("r", 1)]
    assert counts_of(segments[1]) == {"reused": 3, "recomputed": 1, "fresh": 0, "missing": 0, "not_loaded": 0}
    assert segments[2]["text"] == "more" and counts_of(segments[3])["missing"] == 3
    assert (breakdown()["ttft_ms"], breakdown()["retrieve_ms"]) == (11.0, 3.0)
    for kind in KINDS.values():
        assert sum(counts_of(segment)[kind] for segment in segments) == breakdown()["tokens"][kind]


def test_prompt_that_was_not_fused_is_all_fresh():
    assert {letter for s in segments_of(PROMPT, "", LABELS) for letter, _ in s["runs"]} == {"f"}


def test_full_prefill_is_an_estimate_until_it_is_measured():
    def said(hood):
        return hood["full_prefill_ms"], hood["full_prefill_is"], hood["full_prefill_why"]

    assert said(breakdown()) == (None, "", NO_PROFILE)
    assert said(breakdown(profile=PROFILE)) == (10 + 12, "estimate", "")
    assert said(breakdown() | full_prefill_fields(99.04, "measured")) == (99.0, "measured", "")
