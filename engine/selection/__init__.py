"""Policies: which rows of a prompt are computed again. One table, by the name that users pass."""

import difflib

from ragblend.engine.selection.base import Evidence, Policy
from ragblend.engine.selection.baselines import Full, Heads, Naive, Prefix, Random, Recompute, Reuse
from ragblend.engine.selection.cacheblend import CacheBlend, GradualCacheBlend
from ragblend.kvstore.errors import UsageError

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
        CacheBlend(),
        CacheBlend(measure="keys", name="cacheblend-k"),
        GradualCacheBlend(),
    )
}
WITHOUT_RATIO = frozenset(name for name, policy in METHODS.items() if policy.fixed_ratio is not None)

__all__ = ["METHODS", "WITHOUT_RATIO", "Evidence", "Policy", "policy_named"]


def policy_named(method: str | Policy) -> Policy:
    """The policy of that name, or the policy itself. Raises UsageError with the nearest name."""
    if isinstance(method, Policy):
        return method
    if method in METHODS:
        return METHODS[method]
    near = difflib.get_close_matches(method, METHODS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"method {method!r} is unknown; there are {', '.join(METHODS)}{hint}")
