"""One prompt, token by token: what each method reused, computed again, or had to compute anyway."""

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ragblend.app.bench.html_parts import number, page, paragraph, share, table
from ragblend.app.bench.records import Record
from ragblend.app.bench.variants import Variant

if TYPE_CHECKING:
    from ragblend.app.bench.inspecting import Look

# By the engine's `Kind`; what is stored and not exact is shown by how much of it was computed.
FRESH, MISSING, EXACT, REUSABLE = range(4)
CLASSES = {FRESH: "f", MISSING: "m", EXACT: "e"}
STEPS = 9
STYLE = """
.prompt { white-space: pre-wrap; font: 13px/1.7 ui-monospace, monospace; border: 1px solid #ddd; padding: 1rem; }
.prompt i { font-style: normal; } .legend i { font-style: normal; padding: 0 .4rem; margin-right: .6rem; }
.f { background: #cfe2f7; } .m { background: #e6c9f0; } .e { background: #dff0d8; } .r0 { background: #f1f1f1; }
""" + "".join(
    f".r{n} {{ background: rgba(224, 92, 20, {0.15 + 0.085 * n:.2f}); }}\n" for n in range(1, STEPS + 1)
)
SCRIPT = """
const states = JSON.parse(document.getElementById('states').textContent);
const tokens = document.querySelectorAll('.prompt i');
document.getElementById('variant').addEventListener('change', event => {
  const state = states[event.target.selectedIndex];
  tokens.forEach((token, place) => {
    token.className = /[0-9]/.test(state[place]) ? 'r' + state[place] : state[place]; });
  document.getElementById('counts').textContent = event.target.selectedOptions[0].dataset.counts;
});
"""


def prompt_page(look: "Look", records: Sequence[Record]) -> str:
    """The page of one prompt; records: what was measured on it, in the order to show."""
    question = look.question
    shown = sorted(
        look.shares, key=lambda variant: variant.ratio is None
    )  # first one that recomputes something
    states = {variant: "".join(token_states(look.kinds, look.shares[variant])) for variant in shown}
    body = [
        '<p><a href="report.html">The report</a></p>',
        f"<h1>{escape(question.text)}</h1>",
        paragraph(f"Right: {' / '.join(question.answers)}", "note"),
        _answers(records),
        _legend(),
        *_prompt(look, states),
    ]
    return page(" ".join(question.text.split())[:80], body, STYLE, SCRIPT if states else "")


def token_states(kinds: Sequence[int], shares: Sequence[float]) -> list[str]:
    """One letter a token: f(resh), m(issing), e(xact), or how many ninths of its layers were computed again, 0 to 9.

    A selection that looks at all tokens in a layer or two of many leaves them at 0: those are reused in the others.
    """
    return [
        CLASSES[kind] if kind in CLASSES else str(round(STEPS * part))
        for kind, part in zip(kinds, shares, strict=True)
    ]


def counts(states: str) -> str:
    """What the letters come to, in words."""
    again = sum(state in "123456789" for state in states)
    parts = [(states.count("0"), "reused"), (again, "recomputed"), (states.count("f"), "fresh")]
    parts += [(states.count("e"), "exact as stored"), (states.count("m"), "missing")]
    return ", ".join(f"{count:,} {what}" for count, what in parts if count)


def _prompt(look: "Look", states: dict[Variant, str]) -> list[str]:
    if not states:
        return [paragraph("No method that reuses stored KV was measured.", "note")]
    options = "".join(
        f'<option data-counts="{escape(counts(state))}">{escape(str(variant))}</option>'
        for variant, state in states.items()
    )
    first = next(iter(states.values()))
    shown = "".join(
        f'<i class="{f"r{state}" if state.isdigit() else state}">{escape(text)}</i>'
        for text, state in zip(look.tokens, first, strict=True)
    )
    # Inside a script element only this needs hiding from the parser; the letters hold nothing of it anyway.
    data = json.dumps(list(states.values())).replace("<", "\\u003c")
    return [
        f'<p>Method: <select id="variant" autocomplete="off">{options}</select>',
        f'<span id="counts">{escape(counts(first))}</span></p>',
        f'<div class="prompt">{shown}</div>',
        f'<script type="application/json" id="states">{data}</script>',
    ]


def _legend() -> str:
    parts = [
        ("r0", "reused"),
        ("r3", "recomputed in some layers"),
        ("r9", "in all"),
        ("f", "fresh: always computed"),
    ]
    parts += [("e", "exact as stored"), ("m", "missing: not stored, computed in place")]
    return f'<p class="legend">{"".join(f"<i class={kind}>{text}</i>" for kind, text in parts)}</p>'


def _answers(records: Sequence[Record]) -> str:
    rows = [
        [
            str(Variant(record.method, record.ratio)),
            number(record.kl),
            share(record.recomputed_fraction),
            "–" if record.exact_match is None else "yes" if record.exact_match else "no",
            " ".join(record.answer.split()),
        ]
        for record in records
    ]
    return table(["method", "KL", "spent", "as full's", "answer"], rows, (0, 4))
