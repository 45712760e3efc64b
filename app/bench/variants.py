"""Which methods at which ratios: the lists that `--methods` and `--ratios` name, checked before any work."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ragblend.kvstore.errors import UsageError

# Frameworks' own ways to read passages, mostly in more than one call (`modes.py`), which are compared with the methods.
LANGCHAIN_MODES = ("map_reduce", "map_rerank", "refine")
LLAMA_INDEX_MODES = ("llama-tree_summarize", "llama-refine")
MODES = LANGCHAIN_MODES + LLAMA_INDEX_MODES


@dataclass(frozen=True)
class Variant:
    """One method, at one ratio if it takes one; or a mode, whose calls are read in full (`refine`) or by a method
    (`refine+cacheblend`).
    """

    method: str
    ratio: float | None = None

    def __str__(self) -> str:
        return self.method if self.ratio is None else f"{self.method} {self.ratio:g}"

    @property
    def mode(self) -> str | None:
        """The mode's name, None for a method."""
        name = _mode_and_method(self.method)[0]
        return name if name in MODES else None

    @property
    def oracle(self) -> bool:
        """Whether it needs the reference's KV, and so comes after it."""
        return _base_name(self.method) == "transplant"

    @property
    def arguments(self) -> dict[str, Any]:
        """What to pass to `engine.prefill` beside the prompt, or to every call of a mode."""
        method = self.method if self.mode is None else _mode_and_method(self.method)[1] or "full"
        return {"method": method} if self.ratio is None else {"method": method, "ratio": self.ratio}


def parse_variants(
    methods: str,
    ratios: str,
    known: Collection[str],
    without_ratio: Collection[str],
    modes: Collection[str] = (),
) -> tuple[Variant, ...]:
    """Every method in the list at every ratio in the list, in their order, without repeats.

    methods, ratios: separated by commas; known: the methods there are; without_ratio: those of them that
    spend the same whatever the ratio, and so run once; modes: what may stand beside or before a method
    (`refine`, `refine+cacheblend`). A method's parameters come after a colon (`probe:passes=2,shift=none`).
    Raises UsageError.
    """
    names = _with_parameters(_items(methods, "--methods"))
    for name in names:
        _check_name(name, known, modes)
    fixed = {
        name for name in names if name in modes or _base_name(_mode_and_method(name)[1]) in without_ratio
    }
    values = [_ratio(item) for item in _items(ratios, "--ratios")] if set(names) - fixed else []
    found = [Variant(name, value) for name in names for value in ([None] if name in fixed else values)]
    return tuple(dict.fromkeys(found))


def _with_parameters(items: list[str]) -> list[str]:
    """Items such as `shift=none` belong to the method before them, which has a colon."""
    names: list[str] = []
    for item in items:
        if names and ":" in names[-1] and "=" in item and ":" not in item:
            names[-1] += f",{item}"
        else:
            names.append(item)
    return names


def _base_name(method: str) -> str:
    return method.partition(":")[0]


def _check_name(name: str, known: Collection[str], modes: Collection[str]) -> None:
    mode, method = _mode_and_method(name)
    base = _base_name(method)
    if name in modes:
        return
    # `refine+full` would be the mode alone, under another name.
    if base in known and (method == name or (mode in modes and base != "full")):
        if base != method:
            from ragblend.engine.selection import policy_named

            policy_named(method)  # raises UsageError with the parameters that there are
        return
    also = f", the modes {', '.join(modes)}, and MODE+METHOD of them but full" if modes else ""
    raise UsageError(f"--methods: there is no method {name!r}; there are {', '.join(sorted(known))}{also}")


def _mode_and_method(name: str) -> tuple[str, str]:
    """Either may be empty: of a method the first, of a mode by itself the second."""
    mode, plus, method = name.partition("+")
    return (mode, method) if (plus and ":" not in mode) or name in MODES else ("", name)


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
