"""Under the hood of one answer, as plain data: how each token was served, what was done when, what full prefill takes.

It is made when the answer is there, and kept with it as JSON. Pure, but for `memory_bytes`.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import psutil  # type: ignore[import-untyped]

from ragblend.engine.trace import TraceEvent

if TYPE_CHECKING:
    from ragblend.engine.config import Report
    from ragblend.engine.controller import DeviceProfile
    from ragblend.engine.prompt import Prompt

Kind = Literal["reused", "recomputed", "fresh", "missing"]
KINDS: dict[str, Kind] = {"r": "reused", "c": "recomputed", "f": "fresh", "m": "missing"}
LETTERS = {kind: letter for letter, kind in KINDS.items()}
TEXT_CHARACTERS = 80
NO_PROFILE = "this model was never measured on this device: `ragblend doctor --profile` does it"
TIMES = ("load_ms", "stall_ms", "prefill_ms", "total_ms", "tokens_per_s")


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that were served the same way."""

    kind: Kind
    tokens: int


@dataclass(frozen=True)
class HoodSegment:
    """A passage of the context, or the words between two. number: the source's; None for words.

    text: its beginning.
    """

    label: str
    number: int | None
    tokens: int
    runs: tuple[Run, ...]
    text: str = ""

    @property
    def counts(self) -> dict[Kind, int]:
        found: Counter[Kind] = Counter()
        for run in self.runs:
            found[run.kind] += run.tokens
        return {kind: found[kind] for kind in KINDS.values()}


@dataclass(frozen=True)
class Hood:
    """What the panel shows. full_prefill_ms: what reading all of the prompt takes; None with the reason why not."""

    model: str
    device: str
    dtype: str
    method: str
    ratio: float | None
    segments: tuple[HoodSegment, ...]
    tokens: dict[str, int]
    retrieve_ms: float
    load_ms: float
    stall_ms: float
    prefill_ms: float
    ttft_ms: float
    total_ms: float
    tokens_per_s: float
    full_prefill_ms: float | None
    full_prefill_is: Literal["estimate", "measured", ""]
    full_prefill_why: str
    timeline: tuple[TraceEvent, ...]
    memory_bytes: dict[str, int]
    hits: int
    misses: int
    notice: str | None = None
    stopped: bool = False

    def measured(self, full_prefill_ms: float) -> "Hood":
        """The same, with full prefill measured."""
        return replace(self, full_prefill_ms=full_prefill_ms, full_prefill_is="measured", full_prefill_why="")

    def to_json(self) -> dict[str, Any]:
        """Short enough to be kept with every answer: runs as pairs, events as lists."""
        segments = [
            {**asdict(segment), "runs": [[LETTERS[run.kind], run.tokens] for run in segment.runs]}
            for segment in self.segments
        ]
        return {**asdict(self), "segments": segments, "timeline": [*map(astuple, self.timeline)], "hood": 1}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Hood | None":
        """None for a report that has no such data, as that of an error."""
        if value.get("hood") != 1:
            return None
        segments = tuple(
            HoodSegment(**each | {"runs": tuple(Run(KINDS[letter], count) for letter, count in each["runs"])})
            for each in value["segments"]
        )
        timeline = tuple(TraceEvent(*each) for each in value["timeline"])
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        return cls(**{**known, "segments": segments, "timeline": timeline})


def look(
    report: "Report",
    prompt: "Prompt",
    labels: Mapping[str, tuple[int, str]],
    *,
    model: str,
    device: str,
    dtype: str,
    retrieve_ms: float = 0.0,
    profile: "DeviceProfile | None" = None,
    notice: str | None = None,
    stopped: bool = False,
) -> Hood:
    """labels: for each passage's node id its number and name. The prompt is the tokenized one that was run."""
    times = {name: round(getattr(report.timings, name), 2) for name in TIMES}
    names = ("prompt", "reused", "recomputed", "fresh", "missing", "generated")
    estimate = profile.rows_ms(0, len(prompt.token_ids)) if profile else None
    return Hood(
        model=model,
        device=device,
        dtype=dtype,
        method=report.method,
        ratio=report.ratio,
        segments=segments_of(prompt, report.served, labels),
        tokens={name: getattr(report.tokens, name) for name in names},
        retrieve_ms=round(retrieve_ms, 2),
        ttft_ms=round(retrieve_ms + report.timings.ttft_ms, 2),
        full_prefill_ms=None if estimate is None else round(estimate, 1),
        full_prefill_is="" if estimate is None else "estimate",
        full_prefill_why=NO_PROFILE if estimate is None else "",
        timeline=tuple(
            replace(e, start_ms=round(e.start_ms, 2), duration_ms=round(e.duration_ms, 2))
            for e in (report.trace.events if report.trace else ())
        ),
        memory_bytes=memory_bytes(device),
        hits=report.hits,
        misses=report.misses,
        notice=notice,
        stopped=stopped,
        **times,
    )


def segments_of(
    prompt: "Prompt", served: str, labels: Mapping[str, tuple[int, str]]
) -> tuple[HoodSegment, ...]:
    """The context in order; words that follow one another are one segment. Without `served` all counts as fresh."""
    from ragblend.engine.prompt import Chunk

    served = served or "f" * len(prompt.token_ids)
    pieces: list[tuple[int | None, str, str, str]] = []  # number, label, letters, text
    for segment, start in zip(prompt.segments, prompt.offsets, strict=True):
        letters, text = served[start : start + len(segment.token_ids or ())], segment.text or ""
        if isinstance(segment, Chunk):
            number, name = labels.get(segment.node_id or "", (None, "Passage"))
            pieces.append((number, name, letters, text))
        elif pieces and not pieces[-1][1]:
            _, _, before, words = pieces.pop()
            pieces.append((None, "", before + letters, words + text))
        else:
            pieces.append((None, "", letters, text))
    last = len(pieces) - 1
    return tuple(
        HoodSegment(name or _words_label(place, last), number, len(letters), _runs(letters), _beginning(text))
        for place, (number, name, letters, text) in enumerate(pieces)
        if letters
    )


def memory_bytes(device: str) -> dict[str, int]:
    """What this process holds, and on an accelerator what torch has given out."""
    found = {"process": int(psutil.Process().memory_info().rss)}
    torch = sys.modules.get("torch")
    if torch is not None and device.startswith("cuda"):
        found["device"] = int(torch.cuda.memory_allocated())
    return found


def _words_label(place: int, last: int) -> str:
    if place == 0:
        return "Instructions"
    return "Question" if place == last else "Words between"


def _runs(letters: str) -> tuple[Run, ...]:
    return tuple(Run(KINDS[letter], len(list(group))) for letter, group in groupby(letters))


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARACTERS else line[: TEXT_CHARACTERS - 1] + "…"
