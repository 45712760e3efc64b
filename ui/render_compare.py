"""Two ways to read one prompt, side by side. Pure."""

import difflib
import re
from typing import TYPE_CHECKING

from ragblend.ui.render_text import escape, milliseconds, plural, problem

if TYPE_CHECKING:
    from ragblend.app.comparing import Compared, Comparison, Side

WORD = re.compile(r"\s+|[^\s]+")
# All of the engine's methods, in the order in which they are offered; importing the engine's table would load torch.
LABELS = {
    "full": "Full prefill",
    "probe-shift": "Probe, and shift the rest",
    "probe": "Probe",
    "cacheblend": "CacheBlend",
    "cacheblend-gradual": "CacheBlend, gradual",
    "cacheblend-k": "CacheBlend by keys",
    "prophet": "ProphetKV",
    "a3": "A3",
    "a3-heads": "A3, head by head",
    "epic": "EPIC",
    "reuse": "Reuse, nothing recomputed",
    "prefix": "Prefix caching",
    "heads": "Passage beginnings",
    "random": "Random tokens",
    "naive": "Naive: keys not even moved",
    "recompute": "Recompute all",
}
WITHOUT_RATIO = frozenset({"full", "reuse", "prefix", "naive", "recompute"})


def comparison(found: "Comparison", running: bool) -> str:
    """As far as it has come: full prefill's figures, then both sides with where their answers differ."""
    parts = [
        f'<p class="rb-small">{plural(found.passages, "passage")}, {found.prompt_tokens:,} tokens, '
        "the same for both.</p>"
    ]
    if found.notice:
        parts.append(problem(found.notice, "info"))
    sides = "".join(_side(side, found) for side in found.sides)
    parts.append(f'<div class="rb-sides">{sides}</div>')
    if running:
        done = (found.full is not None) + len(found.sides)
        word = "Reading it in full, as the reference …" if not done else "Reading it the next way …"
        parts.append(
            '<div class="rb-status" role="status"><span class="rb-dots" '
            f'aria-hidden="true"><i></i><i></i><i></i></span>{word}</div>'
        )
    return "".join(parts)


def _side(one: "Compared", found: "Comparison") -> str:
    full = found.full
    assert full is not None
    factor = full.ttft_ms / one.ttft_ms if one.ttft_ms else 0.0
    other = next((each for each in found.sides if each is not one), None)
    cards = [
        ("to the first token", milliseconds(one.ttft_ms), f"full prefill {milliseconds(full.ttft_ms)}"),
        ("times sooner than full", f"{factor:.1f}", ""),
        ("divergence from full", f"{one.kl:.4f}", "KL in nats, 0 is the same"),
        ("same next token", f"{100 * one.same_next:.0f}%", "along full prefill's answer"),
    ]
    made = "".join(
        f"<div><dt>{escape(what)}</dt><dd><b>{escape(value)}</b> <span "
        f'class="rb-small">{escape(more)}</span></dd></div>'
        for what, value, more in cards
    )
    warning = problem(one.warning, "warning") if one.warning else ""
    share = f"{one.tokens['reused']:,} tokens reused, {one.tokens['recomputed']:,} recomputed"
    return (
        f'<section class="rb-panel"><h3>{escape(label(one.side))}</h3>{warning}<div class="rb-diff">'
        f"{difference(one.text, other.text if other else one.text)}</div>"
        f'<dl class="rb-figures">{made}</dl><p class="rb-small">{share}</p></section>'
    )


def label(side: "Side") -> str:
    """CacheBlend, 15%."""
    name = LABELS.get(side.method, side.method)
    return name if side.ratio is None else f"{name}, {100 * side.ratio:.0f}%"


def difference(text: str, other: str) -> str:
    """The text, with what the other one does not say marked, word by word."""
    words, others = WORD.findall(text), WORD.findall(other)
    made = []
    for kind, _, _, start, stop in difflib.SequenceMatcher(None, others, words, autojunk=False).get_opcodes():
        piece = escape("".join(words[start:stop]))
        if piece:
            made.append(piece if kind == "equal" else f"<ins>{piece}</ins>")
    return "".join(made)
