"""Policies: which rows of a prompt are computed again. Each method is a row of one table: a kind, and what it does.

    Static(choose)                   rows known from the plan                            static.py
    AfterLayer(deviation)            rows narrowed from what one layer shows              after_layer.py
    ByAttention(layers, score)       rows by what the question attends to                 by_attention.py
    ... shift=KernelShift()          and what to add to the rows that are not computed    shift.py

What each method is worth: docs/methods.md. How to add one: docs/add-a-policy.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ragblend.engine.selection import by_attention, policy_names
from ragblend.engine.selection.after_layer import AfterLayer, key_deviation, value_deviation
from ragblend.engine.selection.base import (
    Attention,
    Evidence,
    Policy,
    ProbeResult,
    every_row,
    inexact_rows,
    needed_rows,
)
from ragblend.engine.selection.by_attention import Anchors, AveragePool, ByAttention
from ragblend.engine.selection.shift import Delta, KernelShift, LayerChange
from ragblend.engine.selection.static import Beginnings, Static, random_rows
from ragblend.kvstore.errors import UsageError

# Below this probability a figure or name is read again in full (docs/methods.md).
SURE = 0.8
_TABLE: dict[str, Policy] = {
    # The ends of the scale, and controls.
    "full": Static(every_row, lambda span: False, fixed_ratio=1.0),
    "prefix": Static(inexact_rows, lambda span: span.exact, fixed_ratio=1.0),
    "exact": Static(needed_rows, fixed_ratio=1.0, uses_tree=True, exact=True),
    "recompute": Static(every_row, fixed_ratio=1.0),
    "reuse": Static(needed_rows, fixed_ratio=0.0),
    "naive": Static(needed_rows, fixed_ratio=0.0, moves_keys=False),
    "random": Static(random_rows),
    # Published.
    "epic": Static(Beginnings()),
    "cacheblend": AfterLayer(value_deviation),
    "cacheblend-k": AfterLayer(key_deviation),
    "cacheblend-gradual": AfterLayer(value_deviation, shares="1.5/0.5"),
    "a3": ByAttention(by_attention.second_layer, by_attention.merged_heads, AveragePool(kernel=5)),
    "prophet": ByAttention(range, by_attention.summed_rows),
    "qcfuse": ByAttention(
        by_attention.middle_layers, by_attention.summed_rows, anchors=Anchors(digest_ratio=0.1)
    ),
    # Ours.
    "probe": ByAttention(
        by_attention.later_layers,
        by_attention.rooted_squares,
        probe=by_attention.question_rows,
        cheaper_layers=by_attention.second_quarter,
    ),
    "probe-shift": ByAttention(
        by_attention.later_layers,
        by_attention.rooted_squares,
        probe=by_attention.question_rows,
        cheaper_layers=by_attention.second_quarter,
        shift=KernelShift(),
        figure_gain=2.0,
        sure=SURE,
    ),
}
_TABLE["auto"] = replace(_TABLE["probe-shift"], uses_tree=True)
METHODS: dict[str, Policy] = {name: replace(policy, name=name) for name, policy in _TABLE.items()}
# For every policy that needs attention, where a model does not show it.
ATTENTION_FREE: Policy = ByAttention(
    by_attention.later_layers, by_attention.rooted_squares, None, lambda plan: None,
    shift=KernelShift(), sure=SURE, needs_attention=False, name="spread-shift",
)  # fmt: skip
CONTROLS = ("naive", "random", "recompute")  # to compare with, in benches; nobody is served by them
WITHOUT_RATIO = frozenset(name for name, policy in METHODS.items() if policy.fixed_ratio is not None)
_added: dict[str, Policy] = {}

__all__ = [
    "ATTENTION_FREE",
    "CONTROLS",
    "METHODS",
    "WITHOUT_RATIO",
    "AfterLayer",
    "Attention",
    "ByAttention",
    "Delta",
    "Evidence",
    "KernelShift",
    "LayerChange",
    "Policy",
    "ProbeResult",
    "Static",
    "method_names",
    "policy_named",
    "registered",
]


def policy_named(method: str | Policy) -> Policy:
    """The policy of that name, `name:parameter=value,...` with parameters; or the policy itself. Raises UsageError."""
    if isinstance(method, Policy):
        return method
    name = method.partition(":")[0]
    policy = METHODS.get(name) or _added.get(name) or policy_names.policy_from_package(name)
    if policy is None:
        raise policy_names.unknown_method(name, method_names())
    return policy_names.with_parameters(policy, method) if ":" in method else policy


def method_names() -> list[str]:
    """All that `policy_named` knows: ours, those that were registered, and those of other packages."""
    return list(dict.fromkeys([*METHODS, *_added, *policy_names.entry_point_names()]))


@contextmanager
def registered(policy: Policy) -> Iterator[None]:
    """Inside the block `policy_named` knows one more. Raises UsageError for a name that there is, or none."""
    if not policy.name or policy.name in METHODS or policy.name in _added:
        raise UsageError(f"a policy cannot be added under the name {policy.name!r}: it must be a new one")
    _added[policy.name] = policy
    try:
        yield
    finally:
        del _added[policy.name]
