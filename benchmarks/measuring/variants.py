"""Parses `--methods`, `--ratios`, `--compare` and other lists of the benches."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ragblend.kvstore.errors import UsageError

ALL_METHODS = "all"
EXACT = ("full", "exact", "prefix", "recompute")  # methods that compute full prefill in one way or another
RATIO_SIGN = "@"  # in --compare, between a method and its ratio


@dataclass(frozen=True)
class Variant:
    """One method, at one ratio if it takes one."""

    method: str
    ratio: float | None = None

    def __str__(self) -> str:
        return self.method if self.ratio is None else f"{self.method} {self.ratio:g}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `engine.prefill` beside the prompt."""
        return {"method": self.method} if self.ratio is None else {"method": self.method, "ratio": self.ratio}


def label(method: str, ratio: float | None) -> str:
    """A variant's name in tables and plots, with the ratio in percent."""
    return method if ratio is None else f"{method} {100 * ratio:g}%"


def parse_variants(
    methods: str, ratios: str, known: Collection[str], without_ratio: Collection[str]
) -> tuple[Variant, ...]:
    """Every method in the list at every ratio in the list, in their order, without repeats.

    methods, ratios: separated by commas; known: all methods; without_ratio: those that ignore the ratio, and run once.
    A method's parameters come after a colon (`cacheblend:check_layer=2`). Raises UsageError.
    """
    names = split_methods(methods)
    for name in names:
        _check_name(name, known)
    fixed = {name for name in names if base_name(name) in without_ratio}
    values = [_ratio(item) for item in _items(ratios, "--ratios")] if set(names) - fixed else []
    found = [Variant(name, value) for name in names for value in ([None] if name in fixed else values)]
    return tuple(dict.fromkeys(found))


def expand_all(methods: str, known: dict[str, Any]) -> str:
    """Replace `all` in a list of methods by every policy that can differ from full prefill, and `full`."""
    names = [name for name, policy in known.items() if name not in EXACT and not policy.uses_tree]
    every = ",".join(["full", *names])
    return ",".join(every if item.strip() == ALL_METHODS else item for item in methods.split(","))


def split_methods(methods: str) -> list[str]:
    """Split a list of methods. An item like `shares=3/1` is a parameter of the previous method, which has a colon."""
    names: list[str] = []
    for item in _items(methods, "--methods"):
        if names and ":" in names[-1] and "=" in item and ":" not in item:
            names[-1] += f",{item}"
        else:
            names.append(item)
    return names


def base_name(method: str) -> str:
    return method.partition(":")[0]


def _check_name(name: str, known: Collection[str]) -> None:
    if base_name(name) not in known:
        raise UsageError(f"--methods: there is no method {name!r}; there are {', '.join(sorted(known))}")
    if ":" in name:
        from ragblend.engine.selection import policy_named

        policy_named(name)  # raises UsageError with the known parameters


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Parse whole numbers from 1, separated by commas; repeats are dropped. Raises UsageError."""
    counts = []
    for item in _items(text, option):
        if not item.isascii() or not item.isdigit() or int(item) < 1:
            raise UsageError(f"{option}: {item!r} is not a whole number from 1")
        counts.append(int(item))
    return tuple(dict.fromkeys(counts))


def parse_choices(text: str, option: str, choices: Sequence[str]) -> tuple[str, ...]:
    """Parse some of the choices, separated by commas; repeats are dropped. Raises UsageError."""
    items = _items(text, option)
    for item in items:
        if item not in choices:
            raise UsageError(f"{option}: {item!r} is unknown; there are {', '.join(choices)}")
    return tuple(dict.fromkeys(items))


def _items(text: str, option: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise UsageError(f"{option} is empty; give one or more values separated by commas")
    return items


def _ratio(item: str) -> float:
    try:
        value = float(item)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:  # also false for nan
        raise UsageError(
            f"--ratios: {item!r} is not a number from 0 to 1 (0.15 recomputes 15% of the reused tokens)"
        )
    return value


Pair = tuple[Variant, Variant]


def parse_pairs(texts: Sequence[str], variants: Sequence[Variant]) -> tuple[Pair, ...]:
    """Parse pairs of methods, `A,B`. A ratio can be given, as in `A@0.05`; without it all ratios of the run are meant.

    Unless both ratios are given, two methods are compared at equal ratios, and a method that takes no ratio is compared
    with the other at every ratio. Raises UsageError if the run has no such variants.
    """
    found: dict[Pair, None] = {}
    for text in texts:
        first, second = _sides(text, variants)
        both = text.count(RATIO_SIGN) > 1
        two = [(a, b) for a in first for b in second if a != b]
        pairs = [(a, b) for a, b in two if both or None in (a.ratio, b.ratio) or a.ratio == b.ratio]
        if not pairs:
            raise UsageError(
                f"--compare {text!r}: the two have no ratio in common; name them, as in A@0.05,B@0.15"
            )
        found |= dict.fromkeys(pairs)
    return tuple(found)


def _sides(text: str, variants: Sequence[Variant]) -> tuple[list[Variant], list[Variant]]:
    """Split a pair. Methods' parameters may contain commas, so every comma is tried as the separator."""
    commas = [place for place, letter in enumerate(text) if letter == ","]
    for comma in commas:
        first, second = (_named(side.strip(), variants) for side in (text[:comma], text[comma + 1 :]))
        if first and second:
            return first, second
    known = ", ".join(str(each).replace(" ", RATIO_SIGN) for each in variants)
    raise UsageError(
        f"--compare {text!r}: give two methods of this run as A,B or A{RATIO_SIGN}RATIO,B{RATIO_SIGN}RATIO; there are "
        f"{known}"
    )


def _named(side: str, variants: Sequence[Variant]) -> list[Variant]:
    method, at, ratio = side.rpartition(RATIO_SIGN)
    if not at:
        return [each for each in variants if each.method == side]
    try:
        return [each for each in variants if each.method == method and each.ratio == float(ratio)]
    except ValueError:
        return []
