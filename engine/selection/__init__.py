"""Policies: which rows of a prompt are recomputed. Each method is an entry of one table.

    Static(choose)                   rows known from the plan                             static.py
    AfterLayer(deviation)            rows selected by their KV's change in one layer      after_layer.py
    ByAttention(layers, score)       rows selected by the question's attention            by_attention.py
    ... shift=KernelShift()          also corrects the rows that are not recomputed       shift.py

Results of each method: docs/methods.md. To add one, write its file and add an entry here: docs/add-a-policy.md.
"""

from dataclasses import replace
from importlib.metadata import entry_points

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
from ragblend.kvstore.errors import UsageError, did_you_mean

# A figure or name less probable than this is compared with what the passage alone says (docs/methods.md).
MIN_CONFIDENCE = 0.98
_TABLE: dict[str, Policy] = {
    # Baselines and controls.
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
        sure=MIN_CONFIDENCE,
    ),
}
_TABLE["auto"] = replace(_TABLE["probe-shift"], uses_tree=True)
METHODS: dict[str, Policy] = {name: replace(policy, name=name) for name, policy in _TABLE.items()}
# Replaces policies that need attention, for models whose attention cannot be collected.
ATTENTION_FREE: Policy = ByAttention(
    by_attention.later_layers, by_attention.rooted_squares, None, lambda plan: None,
    shift=KernelShift(), sure=MIN_CONFIDENCE, needs_attention=False, name="spread-shift",
)  # fmt: skip
CONTROLS = ("naive", "random", "recompute")  # for comparisons in benches only
WITHOUT_RATIO = frozenset(name for name, policy in METHODS.items() if policy.fixed_ratio is not None)

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
]


def policy_named(method: str | Policy) -> Policy:
    """The policy of that name, or `name:parameter=value,...`; a policy is returned as it is. Raises UsageError."""
    if isinstance(method, Policy):
        return method
    name = method.partition(":")[0]
    policy = METHODS.get(name) or policy_names.policy_from_package(name)
    if policy is None:
        known = method_names()
        raise UsageError(
            f"method {name!r} is unknown; there are {', '.join(known)}{did_you_mean(name, known)}"
        )
    return policy_names.with_parameters(policy, method) if ":" in method else policy


def method_names() -> list[str]:
    """All names that `policy_named` knows, those of other packages included. Imports none of them."""
    return list(dict.fromkeys([*METHODS, *sorted(entry_points(group=policy_names.GROUP).names)]))
