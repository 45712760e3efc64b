"""Policies by what users write: a name, and parameters after a colon (`probe:passes=2,shift=none`)."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ragblend.engine.selection.base import Policy
from ragblend.kvstore.errors import UsageError


def base_name(method: str) -> str:
    """The name without parameters."""
    return method.partition(":")[0]


def find(method: str, known: Mapping[str, Policy]) -> Policy:
    """The policy of that name, with these parameters. Raises UsageError with what there is, and the nearest."""
    name, colon, text = method.partition(":")
    if name not in known:
        raise UsageError(f"method {name!r} is unknown; there are {', '.join(known)}{_near(name, known)}")
    return _with(known[name], method, text) if colon else known[name]


def _with(policy: Policy, method: str, text: str) -> Policy:
    there = {key: value for key, value in policy.parameters.items() if isinstance(value, int | float | str)}
    wanted: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        key = key.strip()
        names = ", ".join(f"{name}={standing}" for name, standing in there.items()) or "none"
        if not equals:
            raise UsageError(
                f"method {method!r}: a parameter is written name=value behind the colon; there are {names}"
            )
        if key not in there:
            raise UsageError(
                f"method {policy.name!r} has no parameter {key!r}; there are {names}{_near(key, there)}"
            )
        wanted[key] = _value(method, key, value.strip(), there[key])
    return replace(policy, name=method, **wanted)


def _value(method: str, key: str, text: str, standing: object) -> object:
    """The text as what stands there by default is: a whole number, a number, or a word."""
    if isinstance(standing, str):
        return text
    kind = int if isinstance(standing, int) else float
    try:
        return kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise UsageError(f"method {method!r}: {key} must be a {what}, not {text!r}") from None


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
