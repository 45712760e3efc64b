"""Parses method names with parameters (`epic:first=16`), and finds policies of other packages.

A package adds a policy by an entry point, `every-nth = "its.module:POLICY"` in the group `ragblend.policies`. It is
imported when that name is used, and cannot replace one of ours.
"""

from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

from ragblend.engine.selection.base import NOT_PARAMETERS, Policy
from ragblend.kvstore.errors import UsageError, did_you_mean

GROUP = "ragblend.policies"


def policy_from_package(name: str) -> Policy | None:
    """The policy that a package adds under that name, or None. Raises UsageError, which names the package."""
    points = entry_points(group=GROUP, name=name)
    found = {f"{p.dist.name} {p.dist.version}" if p.dist is not None else p.module: p for p in points}
    if not found:
        return None
    if len(found) > 1:
        raise UsageError(f"the packages {' and '.join(found)} both add a method {name!r}; remove one of them")
    ((package, point),) = found.items()
    try:
        policy = point.load()
        if not isinstance(policy, Policy):
            raise TypeError(f"{point.value} is a {type(policy).__name__}, not a Policy")
        return replace(policy, name=name)
    except Exception as error:  # another package's code may raise anything
        raise UsageError(
            f"the method {name!r} of the package {package} cannot be used: {type(error).__name__}: {error}; "
            "repair or remove that package"
        ) from error


def with_parameters(policy: Policy, method: str) -> Policy:
    """The policy with the parameters after the colon, named `method`. Raises UsageError."""
    defaults, wanted = policy.parameters, dict[str, Any]()
    names = ", ".join(f"{name}={default}" for name, default in defaults.items()) or "none"
    for item in method.partition(":")[2].split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UsageError(
                f"method {method!r}: a parameter is written name=value behind the colon; there are {names}"
            )
        if key not in defaults:
            near = did_you_mean(key, defaults)
            raise UsageError(f"method {policy.name!r} has no parameter {key!r}; there are {names}{near}")
        wanted[key] = _value(method, key, value, defaults[key])
    try:
        return _replaced(policy, wanted | {"name": method})
    except UsageError as error:
        raise UsageError(f"method {method!r}: {error}") from None


def _replaced(policy: Policy, wanted: dict[str, Any]) -> Policy:
    """The policy with these values for its fields, or for those of its parts."""
    changed = {}
    for each in fields(policy):
        part = getattr(policy, each.name)
        if each.name in wanted:
            changed[each.name] = wanted[each.name]
        elif each.name not in NOT_PARAMETERS and hasattr(part, "__dataclass_fields__"):
            own = {key: value for key, value in wanted.items() if key in part.__dataclass_fields__}
            changed[each.name] = replace(part, **own)
    return replace(policy, **changed)


def _value(method: str, key: str, text: str, default: object) -> object:
    """The text as a value of the default's type: int, float or str."""
    if isinstance(default, str):
        return text
    kind = int if isinstance(default, int) else float
    try:
        return kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise UsageError(f"method {method!r}: {key} must be a {what}, not {text!r}") from None
