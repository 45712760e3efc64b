"""`--compare A,B`: which two variants of a run are to be compared."""

from collections.abc import Sequence

from ragblend.app.bench.variants import Variant
from ragblend.kvstore.errors import UsageError

AT = "@"
Pair = tuple[Variant, Variant]


def parse_pairs(texts: Sequence[str], variants: Sequence[Variant]) -> tuple[Pair, ...]:
    """Each text names two methods, `A,B`, either with its ratio, `A@0.05`; without one it is at every ratio of the run.

    Unless both ratios are named, the two are compared at equal ones; what takes no ratio, with every one. Raises
    UsageError if the run has no such variants, or a mode, whose distributions are of other prompts.
    """
    found: dict[Pair, None] = {}
    for text in texts:
        first, second = _sides(text, variants)
        both = text.count(AT) > 1
        pairs = [(a, b) for a in first for b in second if a != b and (both or _equal_ratio(a, b))]
        if not pairs:
            raise UsageError(
                f"--compare {text!r}: the two have no ratio in common; name them, as in A@0.05,B@0.15"
            )
        found |= dict.fromkeys(pairs)
    return tuple(found)


def _sides(text: str, variants: Sequence[Variant]) -> tuple[list[Variant], list[Variant]]:
    """A method's own parameters may hold commas, so every comma is tried as the one between the two."""
    commas = [place for place, letter in enumerate(text) if letter == ","]
    for comma in commas:
        first, second = (_named(side.strip(), variants) for side in (text[:comma], text[comma + 1 :]))
        if first and second:
            return first, second
    there = ", ".join(str(each).replace(" ", AT) for each in variants if each.mode is None)
    raise UsageError(
        f"--compare {text!r}: give two methods of this run as A,B or A{AT}RATIO,B{AT}RATIO; there are {there}"
    )


def _named(side: str, variants: Sequence[Variant]) -> list[Variant]:
    method, at, ratio = side.rpartition(AT)
    if not at:
        return [each for each in variants if each.method == side and each.mode is None]
    try:
        return [each for each in variants if each.method == method and each.ratio == float(ratio)]
    except ValueError:
        return []


def _equal_ratio(first: Variant, second: Variant) -> bool:
    return None in (first.ratio, second.ratio) or first.ratio == second.ratio
