"""What a change of settings would cost, before it is made: what would be read again, and for how long. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragblend.app.settings import Settings

if TYPE_CHECKING:
    from ragblend.kvstore.policy import PrefillProfile

# Another model means other KV and, as chunks are counted in its tokens, other passages.
CUTS_AGAIN = ("model", "chunk_tokens", "chunk_overlap")
ENCODES_AGAIN = ("dtype",)


@dataclass(frozen=True)
class Cost:
    """changed: the settings that differ. seconds: an estimate from the measured profile; None without one.

    cuts_again: documents must be read, cut and embedded again; encodes_again: passages must be read by the model again.
    """

    changed: tuple[str, ...]
    cuts_again: bool
    encodes_again: bool
    documents: int
    passages: int
    seconds: float | None


def cost_of(
    before: Settings, after: Settings, documents: int, passages: int, profile: "PrefillProfile | None"
) -> Cost:
    """What it would take to bring a library of that size from one to the other."""
    changed = tuple(
        name for name in Settings.__dataclass_fields__ if getattr(before, name) != getattr(after, name)
    )
    cuts = any(name in CUTS_AGAIN for name in changed)
    encodes = cuts or any(name in ENCODES_AGAIN for name in changed)
    # A profile is one model's on one device: it says nothing about another one.
    same_machine = not {"model", "device", "dtype"} & set(changed)
    seconds = None
    if encodes and profile is not None and same_machine:
        seconds = (
            passages * before.chunk_tokens / after.chunk_tokens * profile.ms(0, after.chunk_tokens) / 1e3
        )
    return Cost(changed, cuts, encodes, documents if encodes else 0, passages if encodes else 0, seconds)
