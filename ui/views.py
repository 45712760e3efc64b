"""Renders the page's HTML: each view is a macro of `templates/*.html`; the functions here are their helpers. Pure.

Every value is escaped, and characters that change the writing direction are replaced; only `markdown` produces HTML.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from heapq import nlargest
from itertools import starmap
from pathlib import Path
from typing import Any

import nh3
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.ext import Extension
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from ragblend.app.answering.breakdown import KINDS, counts_of, has_breakdown
from ragblend.app.answering.chats import INTERRUPTED
from ragblend.app.answering.citations import CitedAnswer
from ragblend.app.answering.timeline import NESTED, PART_COLOURS
from ragblend.app.model_offers import Offer, short_text
from ragblend.app.models import LocalModel
from ragblend.app.words import plural, size
from ragblend.engine.trace import Trace, TraceEvent
from ragblend.measuring.variants import Variant

TAGS = "p br hr em strong del code pre blockquote ul ol li a h1 h2 h3 h4 h5 h6 table thead tbody tr th td"
# No images: fetching one tells its server that the document was read.
ATTRIBUTES = {"a": {"href"}, "ol": {"start"}}
SCHEMES = {"http", "https", "mailto"}
# Private-use characters around the number of an insert, until the HTML is sanitised.
OPEN_MARK, CLOSE_MARK = "\ue000", "\ue001"
INSERT_MARKS = re.compile(f"[{OPEN_MARK}{CLOSE_MARK}]")
INSERT = re.compile(f"{OPEN_MARK}([0-9]+){CLOSE_MARK}")
CODE_SPAN = re.compile(r"`([^`\n]{1,200})`")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
WORD_OR_SPACE = re.compile(r"\s+|[^\s]+")
BESIDE_A_TAG = re.compile(r"(?<=[>}])\n\s*|\n\s*(?=[<{])")

# The engine's methods, without those that only benches use, in the order of the menu. Repeated here, because importing
# the engine's table would load torch.
LABELS = {
    "probe-shift": "Re-read what the question needs, adjust the rest (recommended)",
    "full": "Re-read everything (exact, slowest)",
    "probe": "Re-read what the question needs (probe)",
    "cacheblend": "Re-read what differs most between passages (CacheBlend)",
    "cacheblend-gradual": "Re-read what differs most, less in each layer (CacheBlend, gradual)",
    "cacheblend-k": "Re-read what differs most, by its keys (CacheBlend)",
    "prophet": "Re-read what the question attends to, in all layers (ProphetKV)",
    "qcfuse": "Re-read what the question attends to, in middle layers (QCFuse)",
    "a3": "Re-read what the question attends to, in one layer (A3)",
    "epic": "Re-read the first words of each passage (EPIC)",
    "auto": "Reuse passages already read in this order, re-read what the question needs in others (auto)",
    "exact": "Reuse only passages already read in this order (exact)",
    "prefix": "Reuse only the beginning of an earlier prompt (prefix caching)",
    "reuse": "Re-read nothing (fastest)",
}
WITHOUT_RATIO = frozenset({"full", "reuse", "prefix", "exact"})
RATIO_WORDS = (
    (0.0, "Fastest, least exact: nothing is re-read."),
    (0.1, "Fast: a little is re-read."),
    (0.25, "Recommended: fast, and usually matches a full re-read."),
    (0.6, "More exact, slower: much is re-read."),
    (1.0, "Exact, slowest: everything is re-read."),
)
MAX_EVENTS = 3000  # in one timeline: a long context on a deep model has tens of thousands


class Views:
    """A template file; each of its macros is an attribute, a function that returns HTML."""

    def __init__(self, name: str) -> None:
        self._file = f"{name}.html"

    def __getattr__(self, macro: str) -> Callable[..., str]:
        found = getattr(_environment().get_template(self._file).module, macro)
        return lambda *values, **named: str(found(*values, **named))


chat, compare, frame, login = Views("chat"), Views("compare"), Views("frame"), Views("login")
hood, library, parts, passage = Views("hood"), Views("library"), Views("parts"), Views("passage")
settings, store = Views("settings"), Views("store")


def problem(message: str, kind: str = "error") -> str:
    """A box with a message; kind: error, warning or info."""
    return parts.note(message, kind)


class _OneLine(Extension):
    """Removes line breaks beside tags, so that templates can be wrapped without adding spaces to the page."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return BESIDE_A_TAG.sub("", source)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        extensions=[_OneLine],
    )
    environment.filters |= {
        "day": day,
        "duration": duration,
        "lines": lambda text: escape(text).replace("\n", Markup("<br>")),
        "milliseconds": milliseconds,
        "size": size,
        "thousands": lambda count: f"{count:,}",
        "with_code": lambda message: Markup(CODE_SPAN.sub(r"<code>\1</code>", str(escape(message)))),
    }
    environment.globals |= {
        "INTERRUPTED": INTERRUPTED,
        "NESTED": NESTED,
        "PARTS": tuple(PART_COLOURS),
        "cited_text": cited_text,
        "context_bar": context_bar,
        "counts_of": counts_of,
        "difference": difference,
        "has_breakdown": has_breakdown,
        "label": label,
        "markdown": markdown,
        "offer_text": short_text,
        "plural": plural,
        "hit_rate_curve": hit_rate_curve,
        "speedup": speedup,
        "timeline_of": timeline_of,
    }
    return environment


def _visible(value: object) -> str:
    """Replace control characters and those that change the writing direction."""
    text = CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return Markup(text) if isinstance(value, Markup) else text


# --- texts


def markdown(pieces: str | Sequence[str | int], insert: Callable[[int], str] = str) -> Markup:
    """Render Markdown of a document or model as safe HTML: no scripts, styles, images or raw HTML.

    pieces: a text, or texts with numbers between them; insert(number) gives the safe HTML to put there.
    """
    parts = [pieces] if isinstance(pieces, str) else pieces
    text = "".join(
        f"{OPEN_MARK}{part}{CLOSE_MARK}"
        if isinstance(part, int)
        else CONTROL_CHARACTERS.sub("", INSERT_MARKS.sub("", part))
        for part in parts
    )
    html = nh3.clean(
        _parser().render(text),
        tags=set(TAGS.split()),
        attributes=ATTRIBUTES,
        url_schemes=SCHEMES,
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )
    return Markup(INSERT.sub(lambda found: insert(int(found[1])), html))


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])


def cited_text(cited: CitedAnswer, caller: Callable[..., str]) -> Markup:
    """The answer as safe HTML; caller renders a citation."""
    pieces = cited.pieces()
    marked = [piece if isinstance(piece, str) else number for number, piece in enumerate(pieces)]
    return markdown(marked, lambda number: caller(pieces[number]))


def difference(text: str, other: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether the other text has it, too; compared word by word."""
    words, others = WORD_OR_SPACE.findall(text), WORD_OR_SPACE.findall(other)
    matcher = difflib.SequenceMatcher(None, others, words, autojunk=False)
    pieces = [
        ("".join(words[start:stop]), kind == "equal") for kind, _, _, start, stop in matcher.get_opcodes()
    ]
    return [piece for piece in pieces if piece[0]]


def label(side: Variant) -> str:
    """A method and its ratio for the user, such as `Re-read the first words of each passage (EPIC), 15%`."""
    name = LABELS.get(side.method, side.method)
    return name if side.ratio is None else f"{name}, {100 * side.ratio:.0f}%"


def ratio_meaning(ratio: float) -> str:
    """What a share of re-read tokens means for the user."""
    return next(words for most, words in RATIO_WORDS if ratio <= most)


def model_choices(
    here: Sequence[LocalModel], fitting: Sequence[Offer], current: str
) -> list[tuple[str, str]]:
    """The entries of the model picker: a label with size and speed, and the model's name."""
    local = {one.name: f"{one.name} ({one.kind}, {size(one.bytes)}, here)" for one in here}
    downloads = {offer.model.name: f"{short_text(offer)}, to download" for offer in fitting}
    labels = {current: current} | downloads | local
    return [(label, name) for name, label in labels.items()]


# --- numbers


def milliseconds(value: float | None) -> str:
    """870 ms, 1.24 s, 12.3 s; a dash for None."""
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    return f"{value / 1000:.2f} s" if value < 10_000 else f"{value / 1000:.1f} s"


def speedup(report: Mapping[str, Any]) -> float | None:
    """Full prefill's time to first token divided by this answer's; None for full prefill, or where it is unknown."""
    full, own = report.get("full_prefill_ms"), report.get("ttft_ms", 0)
    return full / own if full and own > 0 and report.get("method") != "full" else None


def duration(seconds: float) -> str:
    """40 s, 3 min, 2 h 5 min."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def day(when: str) -> str:
    """An ISO time as a short day: 5 Mar, or 5 Mar 2024 for another year than this."""
    try:
        moment = datetime.fromisoformat(when)
    except ValueError:
        return ""
    year = "" if moment.year == datetime.now(moment.tzinfo).year else f" {moment.year}"
    return f"{moment.day} {moment:%b}{year}"


# --- pictures


def context_bar(segments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The bar of a prompt's context: for each segment its middle and its runs of tokens, each with its start."""
    gap = sum(segment["tokens"] for segment in segments) * 0.003
    bars, left = [], 0.0
    for segment in segments:
        at, runs = left, []
        for letter, tokens in segment["runs"]:
            runs.append((at, KINDS[letter], tokens))
            at += tokens
        bars.append({"segment": segment, "runs": runs, "middle": left + segment["tokens"] / 2})
        left += segment["tokens"] + gap
    return {"segments": bars, "width": left - gap}


def timeline_of(timeline: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The timeline to draw: the tracks in order, the longest events, and the total time of each part."""
    trace = Trace(tuple(starmap(TraceEvent, timeline)))
    totals = {part: trace.total_ms(part) for part in PART_COLOURS}
    return {
        "end": max(event.stop_ms for event in trace.events),
        "shown": nlargest(MAX_EVENTS, trace.events, key=lambda event: event.duration_ms),
        "tracks": trace.tracks,
        "sums": "; ".join(f"{part} {milliseconds(total)}" for part, total in totals.items() if total),
        "parts": {event.part for event in trace.events},
    }


def hit_rate_curve(samples: Sequence[tuple[float, int, int]]) -> list[tuple[float, float]]:
    """(time, hit rate until then) of each sample in which there were hits or misses."""
    return [(at_s, hits / (hits + misses)) for at_s, hits, misses in samples if hits + misses]
