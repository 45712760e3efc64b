"""The pictures of docs/methods.md show what a prefill did: rows by layer become states."""

import pytest
import torch

from benchmarks.method_pictures import RecordedRun, RowState, recording, row_states
from ragblend.engine.plan import Span, TokenKind, make_plan
from ragblend.engine.selection import METHODS
from ragblend.measuring import quality
from ragblend.measuring.prefilling import temporarily_stored

LAYERS = 4
STORED = object()  # a plan asks only whether there is stored KV


@pytest.fixture
def letters():
    """The states that a method's run is drawn as: one string a layer, one letter a token, the first layer first.

    The prompt: two tokens of instructions, an exact passage of two, a separator, a moved passage of three, a question
    of two.
    """
    spans = (Span(2, 2, STORED, exact=True), Span(5, 3, STORED))
    plan = make_plan(torch.arange(10), spans, LAYERS, ratio=0.3, attention_share=0.2)
    always = plan.always.nonzero().squeeze(1).tolist()

    def drawn(method, steps, probed=()):
        each = [(layer, torch.tensor(sorted([*always, *rows]))) for layer, rows in steps]
        seen = RecordedRun(plan, each, [torch.tensor(rows) for rows in probed])
        found = row_states(seen, METHODS[method]).tolist()
        return ["".join(RowState(state).name[0] for state in row) for row in found]

    return drawn


@pytest.mark.parametrize(
    ("method", "steps", "probed", "drawn"),
    [
        ("reuse", [(0, [])], [], ["FFEEFRRRFF"] * LAYERS),
        ("naive", [(0, [])], [], ["FFEEFNNNFF"] * LAYERS),
        ("full", [(0, [2, 3, 5, 6, 7])], [], ["FFCCFCCCFF"] * LAYERS),
        # A selection at a layer is drawn from that layer on.
        (
            "cacheblend-gradual", [(0, [5, 6, 7]), (1, [5, 7]), (3, [5])], [],
            ["FFEEFCCCFF", "FFEEFCRCFF", "FFEEFCRCFF", "FFEEFCRRFF"],
        ),
        # Fresh rows of a probe are drawn as such up to its last layer. But what nothing can change, which is all before
        # the moved passage, goes on where the probe left it.
        ("a3", [(0, [6])], [[0, 1, 4, 8, 9]], ["FFEEFRCRPP"] * 2 + ["FFEEFRCRFF"] * 2),
        ("prophet", [(0, [6])], [[0, 1, 4, 8, 9]], ["FFEEFRCRPP"] * LAYERS),
        # Of so few tokens the question is run through half of the layers; only moved rows are shifted.
        ("probe-shift", [(0, [6])], [[8, 9]], ["FFEEFSCSPP"] * 2 + ["FFEEFSCSFF"] * 2),
    ],
)  # fmt: skip
def test_rows_are_drawn_as_they_were_obtained(letters, method, steps, probed, drawn) -> None:
    assert letters(method, steps, probed) == drawn


@pytest.fixture
def prompt(shared_engine, questions):
    with temporarily_stored(shared_engine, questions[0].passages):
        yield quality.build_prompt(shared_engine, questions[0], 5)


@pytest.mark.parametrize("method", [name for name, policy in METHODS.items() if policy.fixed_ratio is None])
def test_recorded_shares_equal_the_reports(shared_engine, prompt, method) -> None:
    policy, seen = recording(METHODS[method])
    through = shared_engine.prefill(prompt, method=policy, ratio=0.4)
    plainly = shared_engine.prefill(prompt, method=method, ratio=0.4)
    assert torch.equal(through.logits, plainly.logits)  # watching changes nothing
    assert through.report.method == method
    stored_tokens = seen.plan.kinds >= TokenKind.EXACT
    shares = seen.computed().float().mean(0)
    assert shares[seen.plan.always].eq(1).all()
    spent, report = float(shares[stored_tokens].mean()), plainly.report
    if method.startswith("cacheblend"):
        # The check of one layer is a part of a layer, which the report counts and the tokens do not show.
        assert spent == pytest.approx(report.recomputed_fraction, abs=1 / seen.plan.layers)
    elif report.probe_rows:
        # What fresh tokens were run for twice is paid from the ratio as well.
        assert spent == pytest.approx(report.tokens.recomputed / seen.plan.stored_tokens, abs=1e-6)
        assert spent < report.recomputed_fraction
    else:
        assert spent == pytest.approx(report.recomputed_fraction, abs=1e-6)
