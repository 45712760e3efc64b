"""What one request is run with: the LLM's own fields, then its generate_kwargs, then the call's keyword arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragblend.engine.config import DecodeOptions
from ragblend.integrations.llama_index.nodes import named_passages
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

OTHER_NAMES = {"max_tokens": "max_new_tokens", "stop_sequences": "stop"}
OURS = ("method", "ratio", "passages", "nodes")


@dataclass(frozen=True)
class Call:
    """One request's method, ratio, decoding options, and the passages that its caller named."""

    method: str | None = None
    ratio: float | str | None = None
    decoding: dict[str, Any] = field(default_factory=dict)
    named: tuple[Passage, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """For `Backend.generate` and its kin."""
        return {"method": self.method, "ratio": self.ratio, **self.decoding}

    @classmethod
    def of(cls, *layers: Mapping[str, Any]) -> "Call":
        """The last layer that says something wins; None says nothing. Raises UsageError for a name nobody knows."""
        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= {name: value for name, value in common_names(layer).items() if value is not None}
        ours = {name: merged.pop(name, None) for name in OURS}
        DecodeOptions.of(merged)
        return cls(ours["method"], ours["ratio"], merged, named_passages(ours["passages"], ours["nodes"]))


def _names_of(known: str) -> list[str]:
    return [known, *(other for other, name in OTHER_NAMES.items() if name == known)]


def common_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's names for what users of other LLMs write: max_tokens, do_sample, ...

    Raises UsageError where two names say the same thing.
    """
    named: dict[str, Any] = {}
    for name, value in options.items():
        known = OTHER_NAMES.get(name, name)
        if known in named:
            raise UsageError(f"{' and '.join(_names_of(known))} mean the same; pass one of them")
        named[known] = value
    sampled = named.pop("do_sample", None)
    if sampled is False:  # transformers' way of saying temperature 0
        named["temperature"] = 0.0
    elif sampled and not named.get("temperature"):
        named["temperature"] = 1.0
    return named
