"""Which methods at which ratios: the lists that `--methods` and `--ratios` name, checked before any work."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Variant:
    """One method, at one ratio if it takes one."""

    method: str
    ratio: float | None = None

    def __str__(self) -> str:
        return self.method if self.ratio is None else f"{self.method} {self.ratio:g}"

    @property
    def arguments(self) -> dict[str, Any]:
        """What to pass to `engine.prefill` beside the prompt."""
        return {"method": self.method} if self.ratio is None else {"method": self.method, "ratio": self.ratio}


def parse_variants(
    methods: str, ratios: str, known: Collection[str], without_ratio: Collection[str]
) -> tuple[Variant, ...]:
    """Every method in the list at every ratio in the list, in their order, without repeats.

    methods, ratios: separated by commas; known: the methods there are; without_ratio: those of them that
    spend the same whatever the ratio, and so run once. Raises UsageError.
    """
    names = _items(methods, "--methods")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"--methods: there is no method {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )
    values = [_ratio(item) for item in _items(ratios, "--ratios")] if set(names) - set(without_ratio) else []
    found = [
        Variant(name, value) for name in names for value in ([None] if name in without_ratio else values)
    ]
    return tuple(dict.fromkeys(found))


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """A list of whole numbers from 1, separated by commas, without repeats. Raises UsageError."""
    counts = []
    for item in _items(text, option):
        if not item.isascii() or not item.isdigit() or int(item) < 1:
            raise UsageError(f"{option}: {item!r} is not a whole number from 1")
        counts.append(int(item))
    return tuple(dict.fromkeys(counts))


def parse_choices(text: str, option: str, choices: Sequence[str]) -> tuple[str, ...]:
    """A list of some of the choices, separated by commas, without repeats. Raises UsageError."""
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
