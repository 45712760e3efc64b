"""The store of one home as HTML: what is kept where, how often it was of use, what is wrong. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragblend.ui.render_text import attributes, escape, plural, problem, size

if TYPE_CHECKING:
    from ragblend.app.store_view import Sample
    from ragblend.app.upkeep import Finding, Repaired

TIERS = {"disk": "Disk", "memory": "Memory", "device": "Accelerator"}
GIB = 1 << 30


def overview(stats: dict[str, Any], documents: int, passages: int) -> str:
    """Cards, and a bar for each tier. stats: what `ragblend store stats --json` says."""
    hits = sum(tier["hits"] for tier in stats["tiers"].values())
    misses = stats["tiers"].get("disk", {}).get("misses", 0)
    cards = [
        (size(stats["bytes"]), f"of {size(stats['budget_bytes'])} used"),
        (f"{stats['entries']:,}", "passages with stored KV"),
        (hit_rate(hits, misses), f"found: {hits:,} of {hits + misses:,} asked for, ever"),
        (f"{documents:,}", f"documents, {plural(passages, 'passage')}"),
    ]
    made = "".join(
        f'<div class="rb-card"><div class="value">{escape(value)}</div><div class="what">{escape(what)}</div></div>'
        for value, what in cards
    )
    tiers = "".join(tier(name, found) for name, found in stats["tiers"].items() if "bytes" in found)
    return (
        f'<div class="rb-cards">{made}</div>{tiers}<p class="rb-small">Full tiers evict by '
        f"{escape(stats['policy'])}.</p>"
    )


def hit_rate(hits: int, misses: int) -> str:
    return f"{100 * hits / (hits + misses):.0f}%" if hits + misses else "–"


def tier(name: str, found: dict[str, Any]) -> str:
    """How full one tier is."""
    budget = found["budget_bytes"]
    share = min(100.0, 100 * found["bytes"] / budget) if budget else 0.0
    now = found["this_process"]
    said = f"{size(found['bytes'])} of {size(budget)}" if budget else "off"
    counts = f"since start: {now['hits']:,} found, {now['misses']:,} not, {now['evictions']:,} evicted"
    label = TIERS.get(name, name)
    meter = attributes(
        role="meter", aria_label=label, aria_valuenow=round(share), aria_valuemin="0", aria_valuemax="100"
    )
    return (
        f'<div class="rb-tier"><div class="head"><strong>{escape(label)}</strong><span>{said} · {counts}</span></div>'
        f'<div class="rb-progress"{meter}><i style="width:{share:.1f}%"></i></div></div>'
    )


def hit_rates(samples: Sequence["Sample"]) -> str:
    """The share of passages found, over the time since the page was started."""
    points = rates(samples)
    if len(points) < 2:
        return (
            '<p class="rb-empty">Ask a few questions: how often the store had the passage is drawn here.</p>'
        )
    first, last = points[0][0], points[-1][0]
    span = max(last - first, 1e-9)
    path = " ".join(f"{100 * (at - first) / span:.2f},{40 - 38 * rate:.2f}" for at, rate in points)
    label = f"Share of passages found over time, now {100 * points[-1][1]:.0f}%"
    return (
        '<svg class="rb-spark" viewBox="0 0 100 42" preserveAspectRatio="none" '
        f'role="img"{attributes(aria_label=label)}>'
        f'<line x1="0" y1="2" x2="100" y2="2"/><line x1="0" y1="40" x2="100" y2="40"/><path d="M{path}"/></svg>'
        f'<p class="rb-small">{escape(label)}.</p>'
    )


def rates(samples: Sequence["Sample"]) -> list[tuple[float, float]]:
    """(when, share found by then) for each sample that asked for anything."""
    return [
        (sample.at_s, sample.hits / (sample.hits + sample.misses))
        for sample in samples
        if sample.hits + sample.misses
    ]


def findings(found: Sequence["Finding"]) -> str:
    """What a check found."""
    if not found:
        return problem("Everything is sound.", "info")
    rows = "".join(f"<li><b>{escape(each.part)}</b> {escape(each.message)}</li>" for each in found)
    said = f"{plural(len(found), 'problem')} found. Repair makes again what can be made."
    return f'{problem(said, "warning")}<ul class="rb-checks">{rows}</ul>'


def repaired(done: "Repaired") -> str:
    vectors, encoded = plural(done.vectors, "vector"), plural(done.encoded, "passage")
    return problem(
        f"{vectors} indexed, {plural(done.damaged_kv, 'damaged KV value')} taken out, {encoded} encoded.",
        "info",
    )
