"""Which values go when there is no room: pure functions over table rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """What a policy may know of a stored value; used_at is seconds, larger is later."""

    digest: str
    nbytes: int
    used_at: float


def least_recently_used(entries: Iterable[Entry]) -> list[Entry]:
    """The order to evict in: longest unused first; ties by digest, so that two runs agree."""
    return sorted(entries, key=lambda entry: (entry.used_at, entry.digest))


def choose_victims(in_order: Sequence[Entry], excess_bytes: int) -> list[Entry]:
    """The shortest run of `in_order` that frees at least `excess_bytes`; none when there is no excess."""
    victims: list[Entry] = []
    for entry in in_order:
        if excess_bytes <= 0:
            break
        victims.append(entry)
        excess_bytes -= entry.nbytes
    return victims
