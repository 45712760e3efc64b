"""Which rows policies select: on made-up evidence, and by budget arithmetic."""

import importlib
import sys

import pytest
import torch
from benches import Unread, make_prompt, make_text

from ragblend.engine.plan import Span, make_plan
from ragblend.engine.selection import ATTENTION_FREE, METHODS, Evidence, Static, method_names, policy_named
from ragblend.engine.selection.base import Policy, every_row, fresh_rows, needed_rows, pick_top
from ragblend.kvstore.errors import UsageError

TOKENS, LAYERS = 120, 10


def plan_of(ratio=0.3, layers=LAYERS, share=0.25, seed=0):
    """10 literal, 20 exact, 30 reusable, 20 missing, 30 reusable, 10 literal tokens."""
    spans = (
        Span(10, 20, Unread(), exact=True),
        Span(30, 30, Unread()),
        Span(60, 20, None),
        Span(80, 30, Unread()),
    )
    return make_plan(torch.arange(TOKENS), spans, layers, ratio, share, seed)


def evidence_of(plan, rows, deviating, layer=1):
    """Evidence in which the rows `deviating` deviate, the more the later they come in that list."""
    random = torch.Generator().manual_seed(0)
    old_keys, old_values = (torch.randn(2, rows.numel(), 4, generator=random) for _ in range(2))
    keys, values = old_keys.clone(), old_values.clone()
    for strength, row in enumerate(deviating, start=1):
        at = int((rows == row).nonzero())
        keys[:, at] += strength
        values[:, at] += strength
    for row in plan.always.nonzero().squeeze(1).tolist():  # of these nothing was stored
        if row in rows:
            at = int((rows == row).nonzero())
            old_keys[:, at], old_values[:, at] = float("nan"), float("nan")
    return Evidence(layer, rows, keys, values, old_keys, old_values)


TEXTS = [make_text(seed, words=12) for seed in range(3)]


def test_a_plan_classifies_every_token():
    plan = plan_of()
    counts = torch.bincount(plan.kinds.long(), minlength=5).tolist()
    assert counts == [20, 20, 0, 20, 60]
    assert (plan.always_tokens, plan.missing_tokens) == (40, 20)
    assert (plan.candidate_tokens, plan.stored_tokens) == (60, 80)
    lost = plan.without([plan.spans[1]])
    assert (lost.missing_tokens, lost.candidate_tokens, lost.stored_tokens) == (50, 30, 50)
    assert lost.spans[0] == plan.spans[0]


def test_what_is_not_loaded_at_the_beginning_is_settled_and_probed():
    """As nothing before it is stored; behind a stored passage it is neither."""
    spans = tuple(Span(start, 10, Unread()) for start in (5, 20, 35))
    plan = make_plan(torch.arange(50), spans, 2, 0.3, 0.2).without([spans[0], spans[2]], not_loaded=True)
    assert (plan.not_loaded_tokens, plan.missing_tokens, plan.always_tokens) == (20, 0, 40)
    assert plan.settled_tokens == 20  # up to the stored passage
    assert fresh_rows(plan).tolist() == [*range(20), *range(30, 35), *range(45, 50)]
    assert needed_rows(plan).tolist() == [*range(20), *range(30, 50)]
    assert plan.settled_rows(fresh_rows(plan)) == 20


def test_pick_top_selects_the_best_candidates_and_all_needed_rows():
    plan = plan_of()
    rows = torch.arange(TOKENS)
    scores = torch.zeros(TOKENS)
    scores[[12, 5, 65]] = 99.0  # exact, literal, missing: no candidates
    scores[[33, 85, 109]] = torch.tensor([1.0, 3.0, 2.0])
    picked = pick_top(plan, rows, scores, 2)
    candidates = picked[plan.candidates[picked]].tolist()
    assert candidates == [85, 109]
    assert torch.equal(picked[plan.always[picked]], plan.always.nonzero().squeeze(1))
    assert torch.equal(picked, picked.sort().values)
    assert pick_top(plan, rows, scores, 0).numel() == 40
    assert pick_top(plan, rows, scores, 10_000).numel() == 100


@pytest.mark.parametrize("method", ["cacheblend", "cacheblend-gradual"])
@pytest.mark.parametrize("ratio", [0.0, 0.12, 0.2, 0.5, 0.7, 0.74])
def test_the_total_cost_equals_the_ratio(method, ratio):
    """Layer 0 for all candidates, the attention's share of the check layer, and what is kept in each layer."""
    plan, policy = plan_of(ratio), METHODS[method]
    rows = policy.rows(plan)
    spent = 0.0
    for layer in range(LAYERS):
        if policy.peeks(plan, layer):
            spent += 0.25 * (rows.numel() - plan.always_tokens)
            rows = policy.narrow(plan, evidence_of(plan, rows, []), layer)
        spent += rows.numel() - plan.always_tokens
        if policy.narrows(plan, layer):
            fewer = policy.narrow(plan, evidence_of(plan, rows, []), layer + 1)
            assert set(fewer.tolist()) <= set(rows.tolist())
            rows = fewer
    assert spent / (LAYERS * plan.stored_tokens) == pytest.approx(ratio, abs=0.01)


def test_epic_selects_equally_many_rows_of_each_chunk():
    plan = plan_of(ratio=0.25)
    rows = METHODS["epic"].rows(plan)
    chosen = rows[plan.candidates[rows]].tolist()
    assert chosen == [*range(30, 40), *range(80, 90)]


def test_every_policy_computes_all_rows_of_a_plan_without_stored_kv():
    plan = make_plan(torch.arange(9), (Span(2, 3, None),), 4, 0.3, 0.2)
    for policy in METHODS.values():
        rows = policy.rows(plan)
        assert rows.tolist() == list(range(9))
        if policy.peeks(plan, 1):
            assert policy.narrow(plan, evidence_of(plan, rows, []), 1).tolist() == list(range(9))


class Forgetful(Policy):
    """Begins with every row, and keeps the first half after layer 0."""

    def rows(self, plan, probed=None):
        return every_row(plan)

    def narrows(self, plan, layer):
        return layer == 0

    def narrow(self, plan, evidence, next_layer):
        return evidence.rows[: evidence.rows.numel() // 2]


@pytest.mark.parametrize(
    "forgetful",
    [
        Static(lambda plan: every_row(plan)[::3], name="thirds"),
        Static(needed_rows, lambda span: False, name="loads-nothing"),
        Forgetful(name="narrows"),
    ],
    ids=lambda policy: policy.name,
)
def test_policies_that_omit_needed_rows_are_refused(stored, forgetful):
    """It would attend to whatever stood in the buffers, and answer nonsense without a word."""
    with pytest.raises(UsageError, match=f"'{forgetful.name}' left out [0-9]+ rows"):
        stored.engine.prefill(make_prompt(TEXTS), method=forgetful, ratio=0.3)


# --- methods by name, with parameters, and from other packages


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("prob", "did you mean 'probe'"),
        ("prob", "cacheblend-gradual"),
        ("", "there are full"),
        ("a3:kernl=1", "did you mean 'kernel'"),
        ("a3:kernl=1", "kernel=5"),
        ("a3:kernel", "name=value"),
        ("a3:", "name=value"),
        ("a3:kernel=two", "whole number"),
        ("a3:kernel=4", "odd"),
        ("epic:first=-1", "first must be at least 0"),
        ("cacheblend:check_layer=-1", "check_layer"),
        ("full:x=1", "there are sure=0.0"),
        ("full:choose=1", "no parameter"),
        ("probe:name=x", "no parameter"),
    ],
)
def test_unknown_methods_and_parameters_are_reported(method, said):
    with pytest.raises(UsageError, match=said):
        policy_named(method)


def test_parameters_set_the_policy_and_its_parts():
    assert policy_named("cacheblend") is METHODS["cacheblend"]
    assert policy_named(ATTENTION_FREE) is ATTENTION_FREE
    policy = policy_named("cacheblend:check_layer=2, shares=3/1")
    assert (policy.check_layer, policy.shares, policy.name) == (
        2,
        "3/1",
        "cacheblend:check_layer=2, shares=3/1",
    )
    assert policy_named("a3:kernel=1").parameters == {"kernel": 1, "figure_gain": 0.0, "sure": 0.0}
    assert METHODS["a3"].parameters == {"kernel": 5, "figure_gain": 0.0, "sure": 0.0}


MODULE = """
from ragblend.engine.selection.base import every_row
from ragblend.engine.selection.static import Beginnings, Static

EVERYTHING = Static(every_row)
FIRST = Static(Beginnings(first=2))
KIND = Static
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(name, **entry points): a distribution of that name, version 1.0, on the path."""

    def install(name, **points):
        (tmp_path / f"{name}.py").write_text(MODULE)
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{point} = {name}:{value}" for point, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[ragblend.policies]", *lines]))
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    return install


def test_other_packages_add_policies(package):
    package("their_policies", everything="EVERYTHING", first="FIRST")
    assert "their_policies" not in sys.modules  # listing imports nothing
    assert {"everything", "first"} <= set(method_names())
    assert "their_policies" not in sys.modules
    assert policy_named("everything").name == "everything"
    assert policy_named("first:first=3").parameters == {"first": 3, "sure": 0.0}
    assert policy_named("epic") is METHODS["epic"] and "everything" not in METHODS
    with pytest.raises(UsageError, match="everything"):
        policy_named("unheard of")


def test_packages_cannot_replace_our_methods(package):
    package("their_policies", **{"probe-shift": "EVERYTHING"})
    assert policy_named("probe-shift") is METHODS["probe-shift"]
    assert method_names().count("probe-shift") == 1


@pytest.mark.parametrize("value", ["ABSENT", "KIND", "__doc__"])
def test_broken_policies_are_reported_with_their_package(package, value):
    package("broken_policies", theirs=value)
    with pytest.raises(
        UsageError, match=r"method 'theirs' of the package broken_policies 1\.0 cannot be used"
    ):
        policy_named("theirs")
    assert policy_named("epic") is METHODS["epic"]


def test_names_that_two_packages_add_are_refused(package):
    package("one_package", theirs="EVERYTHING")
    package("other_package", theirs="FIRST")
    with pytest.raises(UsageError, match=r"(one|other)_package 1\.0 and (one|other)_package 1\.0"):
        policy_named("theirs")
