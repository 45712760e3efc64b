"""Under the hood of one answer: what the context was made of, what it cost, what ran when. All pure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragblend.ui.render_text import attributes, button, escape, milliseconds, plural, size, words
from ragblend.ui.render_timeline import timeline

if TYPE_CHECKING:
    from ragblend.app.hood import Hood, HoodSegment

KINDS = {
    "reused": "read from the store as it was",
    "recomputed": "stored, but computed again among its new neighbours",
    "fresh": "always computed: instructions, history, question",
    "missing": "not stored yet: computed now, stored for next time",
}
EMPTY = '<p class="rb-empty">Ask something, then see here what the answer was made of.</p>'
TEXT_START = 90


def hood_view(hood: "Hood | None", message_id: int | None, with_measure: bool = True) -> str:
    """The whole panel; for an answer that never reached the model it says so."""
    if hood is None:
        return '<p class="rb-empty">This answer did not reach the model, so there is nothing to see.</p>'
    parts = [
        headline(hood),
        "<h4>Context</h4>",
        context_bar(hood.segments),
        legend(hood.tokens),
        "<h4>Time to first token</h4>",
        speed(hood, message_id if with_measure else None),
        "<h4>Loading and computing</h4>",
        timeline(hood.timeline),
        "<h4>Figures</h4>",
        figures(hood),
        context_table(hood.segments),
    ]
    return f'<section class="rb-hood" aria-label="Under the hood">{"".join(parts)}</section>'


def headline(hood: "Hood") -> str:
    """One sentence: why it was fast, or why it was not."""
    tokens = hood.tokens
    prompt, reused = tokens.get("prompt", 0), tokens.get("reused", 0)
    if not reused:
        return f'<p class="rb-lead">All {prompt:,} tokens of the context were computed.</p>'
    share = 100 * reused / max(prompt, 1)
    return (
        f'<p class="rb-lead"><strong>{share:.0f}%</strong> of the context\'s {prompt:,} tokens came from the store, '
        "so the model did not have to read them again.</p>"
    )


def context_bar(segments: Sequence["HoodSegment"]) -> str:
    """The context from left to right, a stretch a run of tokens; tokens are told on hover."""
    total = sum(segment.tokens for segment in segments)
    if not total:
        return '<p class="rb-empty">No context was recorded.</p>'
    gap = total * 0.003
    width = total + gap * (len(segments) - 1)
    made, left = [], 0.0
    for segment in segments:
        made.append(_segment(segment, left))
        left += segment.tokens + gap
    label = f"Context of {total:,} tokens in {plural(len(segments), 'part')}; the table below says the same in words"
    return (
        f'<svg class="rb-bar" viewBox="0 0 {width:.1f} 10" preserveAspectRatio="none" role="img"'
        f"{attributes(aria_label=label)}>{''.join(made)}</svg>{_numbers(segments, gap, width)}"
    )


def _segment(segment: "HoodSegment", left: float) -> str:
    rects, at = [], left
    for run in segment.runs:
        tip = f"{run.tokens:,} {run.kind} · {describe(segment)}"
        rects.append(
            f'<rect class="k-{escape(run.kind)}" x="{at:.2f}" y="0" width="{run.tokens:.2f}" height="10">'
            f"<title>{escape(tip)}</title></rect>"
        )
        at += run.tokens
    return f"<g>{''.join(rects)}</g>"


def _numbers(segments: Sequence["HoodSegment"], gap: float, width: float) -> str:
    """The passages' numbers under the bar."""
    made, left = [], 0.0
    for segment in segments:
        if segment.number is not None:
            middle = 100 * (left + segment.tokens / 2) / width
            made.append(f'<span style="left:{middle:.2f}%">{segment.number}</span>')
        left += segment.tokens + gap
    return f'<div class="rb-bar-numbers" aria-hidden="true">{"".join(made)}</div>'


def describe(segment: "HoodSegment") -> str:
    """`[2] manual.pdf, p. 3: 412 tokens (340 reused, 72 recomputed)`."""
    number = f"[{segment.number}] " if segment.number is not None else ""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in segment.counts.items() if count)
    return f"{number}{segment.label}: {plural(segment.tokens, 'token')} ({counts})"


def legend(tokens: dict) -> str:
    items = "".join(
        f'<li title="{escape(meaning)}"><i class="k-{kind}"></i>{kind} <b>{tokens.get(kind, 0):,}</b></li>'
        for kind, meaning in KINDS.items()
    )
    return f'<ul class="rb-legend">{items}</ul>'


def context_table(segments: Sequence["HoodSegment"]) -> str:
    """The bar in words: for screen readers, and for whoever wants the numbers."""
    head = "".join(f'<th scope="col">{kind}</th>' for kind in KINDS)
    rows = "".join(_row(segment) for segment in segments)
    return (
        '<details class="rb-table"><summary>Context as a table</summary><div class="scroll"><table><thead><tr>'
        '<th scope="col">part</th><th '
        f'scope="col">tokens</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _row(segment: "HoodSegment") -> str:
    number = f"[{segment.number}] " if segment.number is not None else ""
    counts: Mapping[Any, int] = segment.counts
    cells = "".join(f"<td>{counts.get(kind, 0):,}</td>" for kind in KINDS)
    start = segment.text if len(segment.text) <= TEXT_START else segment.text[:TEXT_START] + "…"
    return (
        f'<tr><th scope="row" title="{escape(start)}">{number}{escape(segment.label)}</th>'
        f"<td>{segment.tokens:,}</td>{cells}</tr>"
    )


def speed(hood: "Hood", message_id: int | None) -> str:
    """This answer's time to first token beside what full prefill takes, and the button that measures it."""
    full = hood.full_prefill_ms
    longest = max(hood.ttft_ms, full or 0.0, 0.001)
    rows = [_speed_row("this answer", hood.ttft_ms, longest, "mine")]
    if full is not None:
        word = "full prefill, measured" if hood.full_prefill_is == "measured" else "full prefill, estimate"
        rows.append(_speed_row(word, full, longest, "full"))
    made = f'<div class="rb-speed">{"".join(rows)}</div>'
    if full is not None and hood.method != "full" and hood.ttft_ms > 0:
        made += f'<p class="rb-small">{_times(full / hood.ttft_ms)}</p>'
    if full is None and hood.full_prefill_why:
        made += f'<p class="rb-small">No estimate of full prefill: {words(hood.full_prefill_why)}.</p>'
    if message_id is not None and hood.method != "full" and hood.full_prefill_is != "measured":
        title = "Runs full prefill over the same prompt: takes as long as it says"
        made += button("Measure full prefill", "measure", title=title, kind="outlined", message=message_id)
    return made


def _times(factor: float) -> str:
    if factor >= 1.05:
        return f"Started {factor:.1f} times sooner."
    return "No sooner than full prefill this time." if factor > 0.95 else "Later than full prefill this time."


def _speed_row(label: str, value: float, longest: float, kind: str) -> str:
    width = max(0.5, 100 * value / longest)
    return (
        f'<div class="row"><span class="label">{escape(label)}</span><span class="track"><i class="{kind}" '
        f'style="width:{width:.1f}%"></i></span><b>{milliseconds(value)}</b></div>'
    )


def figures(hood: "Hood") -> str:
    """Every number of the answer."""
    ratio = "" if hood.ratio is None else f", {100 * hood.ratio:.0f}% recomputed"
    pairs = [
        ("method", f"{hood.method}{ratio}"),
        ("model", hood.model),
        ("device", f"{hood.device}, {hood.dtype}"),
        ("retrieval", milliseconds(hood.retrieve_ms)),
        ("prefill", milliseconds(hood.prefill_ms)),
        ("loading", milliseconds(hood.load_ms)),
        ("waiting for loads", milliseconds(hood.stall_ms)),
        ("whole answer", milliseconds(hood.total_ms)),
        ("speed", f"{hood.tokens_per_s:.1f} tokens/s, {hood.tokens.get('generated', 0):,} written"),
        ("store", f"{plural(hood.hits, 'hit')}, {hood.misses:,} missing"),
        *((f"memory ({name})", size(count)) for name, count in hood.memory_bytes.items()),
    ]
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="rb-figures">{rows}</dl>'
