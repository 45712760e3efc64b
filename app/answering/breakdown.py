"""The breakdown of one answer as plain data: how each token was served, the timeline, the time of full prefill.

It is stored with the answer as JSON, and shown under the hood. Pure, except for `memory_bytes`.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from itertools import groupby
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from ragblend.app.answering.answer import Answer
from ragblend.engine.controller import DeviceProfile
from ragblend.engine.prompts.segments import Chunk, Prompt

# How a token was served, by its letter in `Report.served`.
KINDS = {"r": "reused", "c": "recomputed", "f": "fresh", "m": "missing", "n": "not_loaded"}
TEXT_CHARACTERS = 80  # of each segment's text that are stored
NO_PROFILE = "this model has not been measured on this device yet; run `ragblend doctor --profile`"
TIMES = ("load_ms", "stall_ms", "prefill_ms", "total_ms", "tokens_per_s")


def breakdown_of(
    answer: Answer,
    prompt: Prompt,
    labels: Mapping[str, tuple[int, str]],
    dtype: str,
    profile: DeviceProfile | None = None,
) -> dict[str, Any]:
    """Describe an answer. labels: node id -> number and name of a passage; prompt: the tokenized prompt that was run.

    In the result full_prefill_ms is None if it is unknown, and full_prefill_why says why; timeline has the fields of
    each `TraceEvent`.
    """
    report, device = answer.report, answer.device
    estimate = profile.rows_ms(0, len(prompt.token_ids)) if profile else None
    return {
        "hood": 1,  # the version of this format
        "model": answer.model,
        "device": device,
        "dtype": dtype,
        "method": report.method,
        "ratio": report.ratio,
        "segments": segments_of(prompt, report.served, labels),
        "tokens": asdict(report.tokens),
        "retrieve_ms": round(answer.retrieve_ms, 2),
        "ttft_ms": round(answer.ttft_ms, 2),
        **{name: round(getattr(report.timings, name), 2) for name in TIMES},
        **full_prefill_fields(estimate, "" if estimate is None else "estimate"),
        "timeline": [
            astuple(replace(e, start_ms=round(e.start_ms, 2), duration_ms=round(e.duration_ms, 2)))
            for e in (report.trace.events if report.trace else ())
        ],
        "memory_bytes": memory_bytes(device),
        "hits": report.hits,
        "misses": report.misses,
        "unsupported_figures": list(report.unsupported_figures),
        "read_again_at": report.read_again_at,
        "notice": answer.notice,
        "stopped": False,
    }


def full_prefill_fields(ms: float | None, how: Literal["estimate", "measured", ""]) -> dict[str, Any]:
    """The breakdown's fields for the time of full prefill. ms: None if unknown; how: how it was found."""
    why = NO_PROFILE if ms is None else ""
    return {
        "full_prefill_ms": None if ms is None else round(ms, 1),
        "full_prefill_is": how,
        "full_prefill_why": why,
    }


def has_breakdown(report: Mapping[str, Any]) -> bool:
    """Whether the report has a breakdown; the report of an error has none."""
    return report.get("hood") == 1


def segments_of(prompt: Prompt, served: str, labels: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """The prompt's passages and the texts between them, in order, with how their tokens were served.

    served: a letter of KINDS per token; empty: all are fresh. In the result number is None for what is not a passage,
    runs has (letter, count) of equal letters in a row, and text is the segment's beginning.
    """
    served = served or "f" * len(prompt.token_ids)
    pieces: list[tuple[int | None, str, str, str]] = []  # number, label, letters, text
    for segment, start in zip(prompt.segments, prompt.offsets, strict=True):
        letters, text = served[start : start + len(segment.token_ids or ())], segment.text or ""
        if isinstance(segment, Chunk):
            number, name = labels.get(segment.node_id or "", (None, "Passage"))
            pieces.append((number, name, letters, text))
        elif pieces and not pieces[-1][1]:  # adjacent literals are one piece
            _, _, letters_before, text_before = pieces.pop()
            pieces.append((None, "", letters_before + letters, text_before + text))
        else:
            pieces.append((None, "", letters, text))
    last = len(pieces) - 1
    return [
        {
            "label": name or _literal_label(index, last),
            "number": number,
            "tokens": len(letters),
            "runs": [(letter, len(list(group))) for letter, group in groupby(letters)],
            "text": _beginning(text),
        }
        for index, (number, name, letters, text) in enumerate(pieces)
        if letters
    ]


def counts_of(segment: Mapping[str, Any]) -> dict[str, int]:
    """How many of a segment's tokens were served in each way."""
    counts = dict.fromkeys(KINDS.values(), 0)
    for letter, tokens in segment["runs"]:
        counts[KINDS[letter]] += tokens
    return counts


def memory_bytes(device: str) -> dict[str, int]:
    """The process's resident memory, and torch's allocated memory on an accelerator."""
    found = {"process": int(psutil.Process().memory_info().rss)}
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda"):
        found["device"] = int(torch.cuda.memory_allocated(device))
    return found


def _literal_label(index: int, last: int) -> str:
    if index == 0:
        return "Instructions"
    return "Question" if index == last else "Between passages"


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARACTERS else line[: TEXT_CHARACTERS - 1] + "…"
