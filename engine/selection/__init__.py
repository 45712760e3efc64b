"""Policies: which rows of a prompt are computed again. One table, by the name that users pass."""

from ragblend.engine.selection.a3 import A3
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.baselines import Full, Heads, Naive, Prefix, Random, Recompute, Reuse
from ragblend.engine.selection.cacheblend import CacheBlend, GradualCacheBlend
from ragblend.engine.selection.epic import Epic
from ragblend.engine.selection.evidence import Attention, Change, Evidence, Probed, Shift
from ragblend.engine.selection.naming import base_name, find
from ragblend.engine.selection.probe import Probe
from ragblend.engine.selection.prophet import Prophet
from ragblend.engine.selection.transplant import Transplant

METHODS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Full(),
        Prefix(),
        Recompute(),
        Reuse(),
        Naive(),
        Random(),
        Heads(),
        Epic(),
        CacheBlend(),
        CacheBlend(measure="keys", name="cacheblend-k"),
        GradualCacheBlend(),
        A3(),
        A3(heads="each", name="a3-heads"),
        Prophet(),
        Probe(),
        Probe(shift="kernel", firsts=0.2, witnesses=48, name="probe-shift"),
    )
}
# What only a bench can run, beside the others.
ORACLES: dict[str, Policy] = {"transplant": Transplant()}
WITHOUT_RATIO = frozenset(name for name, policy in METHODS.items() if policy.fixed_ratio is not None)

__all__ = [
    "METHODS",
    "ORACLES",
    "WITHOUT_RATIO",
    "Attention",
    "Change",
    "Evidence",
    "Policy",
    "Probed",
    "Shift",
    "Transplant",
    "base_name",
    "policy_named",
]


def policy_named(method: str | Policy) -> Policy:
    """The policy of that name, `name:parameter=value,...` with parameters; or the policy itself. Raises UsageError."""
    if isinstance(method, Policy):
        return method
    policy = find(method, METHODS | ORACLES)
    if isinstance(policy, Transplant):
        policy.check(METHODS)
    return policy
