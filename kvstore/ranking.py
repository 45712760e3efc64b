"""The order to evict in, kept up to date at every use: one `Ranking` a tier, one `History` for all tiers of a store.

    hit    entry = history.used(digest);  ranking.rank(entry)
    miss   history.used(digest)
    put    entry = history.computed(digest, nbytes, tokens, cost);  ranking.rank(entry)
           victims = ranking.take(excess_bytes, spare={digest});  history.gone(victim.digest) or a lower tier's rank()

No locks in here: whoever changes the store holds its lock already.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable
from heapq import heapify, heappop, heappush

from ragblend.kvstore.policy import (
    HALF_LIFE_USES,
    Entry,
    Policy,
    clock_after,
    computed,
    ranked,
    sound,
    used,
)

REMEMBERED = 20_000  # values that are gone and whose count goes on; about 5 MB
_SLACK = 64


class History:
    """What is known of each value, stored or not: how often it was asked for, and what it costs to compute."""

    def __init__(
        self, policy: Policy, half_life: float = HALF_LIFE_USES, remembered: int = REMEMBERED
    ) -> None:
        self.policy, self.half_life, self.remembered = policy, half_life, remembered
        self.uses = 0.0
        self._stored: dict[str, Entry] = {}
        self._gone: OrderedDict[str, Entry] = OrderedDict()  # the longest unused first

    def restore(self, entry: Entry, stored: bool = True) -> Entry:
        """Take in an entry of an earlier session, whose row may be damaged; the entry as it counts from now on.

        The count of uses goes on behind the latest of them.
        """
        entry = sound(entry)
        self.uses = max(self.uses, entry.used_at)
        (self._stored if stored else self._gone)[entry.digest] = entry
        return entry

    def used(self, digest: str) -> Entry:
        """Count a retrieval of that value, found or not; the entry as it is now."""
        self.uses += 1.0
        half_life = self.half_life if self.policy.fades else None
        stored = self._stored.get(digest)
        if stored is not None:
            entry = self._stored[digest] = used(stored, self.uses, half_life)
            return entry
        entry = used(self._gone.pop(digest, Entry(digest, 0)), self.uses, half_life)
        if self.policy.fades:
            self._remember(entry)
        return entry

    def computed(self, digest: str, nbytes: int, tokens: int, cost: float) -> Entry:
        """The value was computed at `cost` ms a token and is stored from now on; the entry to rank.

        That is its first use, if nobody has asked for it yet: else all that one ingests would go before anything that
        was asked for once, however long ago, and a full store would keep one new passage.
        """
        entry = self._stored.get(digest) or self._gone.pop(digest, Entry(digest, 0))
        entry = computed(entry._replace(nbytes=nbytes, tokens=tokens), cost)
        if not entry.frequency:
            self.uses += 1.0
            entry = entry._replace(used_at=self.uses, frequency=1.0)
        self._stored[digest] = entry
        return entry

    def gone(self, digest: str) -> None:
        """The value left the last tier; only its count is kept, if the policy wants it and while there is room."""
        entry = self._stored.pop(digest, None)
        if entry is not None and self.policy.fades:
            self._remember(entry)

    def forget(self, digest: str) -> None:
        """The document was deleted: nothing of it may stay, its count included."""
        self._stored.pop(digest, None)
        self._gone.pop(digest, None)

    def entries(self) -> Iterable[tuple[Entry, bool]]:
        """Everything to keep for the next session, as `restore` takes it: entry, and whether it is stored."""
        yield from ((entry, True) for entry in self._stored.values())
        yield from ((entry, False) for entry in self._gone.values())

    def _remember(self, entry: Entry) -> None:
        self._gone[entry.digest] = entry
        self._gone.move_to_end(entry.digest)
        while len(self._gone) > self.remembered:
            self._gone.popitem(last=False)


class Ranking:
    """The values of one tier by priority: O(log n) a change and a victim, whatever the tier holds.

    `clock` is RAGCache's, one for each tier: the largest priority that was ever evicted from it.
    """

    def __init__(self, policy: Policy, half_life: float = HALF_LIFE_USES, clock: float = 0.0) -> None:
        self.policy, self.half_life, self.clock = policy, half_life, clock
        self.nbytes = 0
        self._entries: dict[str, Entry] = {}
        # Each entry has an item that is not above its priority. An entry whose priority rose keeps its old item until
        # that comes to the top, so a hit costs no heap operation; removed entries leave items that nobody owns.
        self._heap: list[tuple[float, float, str]] = []
        self._lowest: dict[str, tuple[float, float, str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def rank(self, entry: Entry) -> Entry:
        """Enter a value, or move it to where its entry belongs by now; the entry with its priority."""
        entry = ranked(entry, self.policy, self.clock, self.half_life)
        before = self._entries.get(entry.digest)
        self.nbytes += entry.nbytes - (before.nbytes if before else 0)
        self._entries[entry.digest] = entry
        item = (entry.priority, entry.used_at, entry.digest)
        lowest = self._lowest.get(entry.digest)
        if lowest is None or item < lowest:
            self._push(item)
        return entry

    def restore(self, entries: Iterable[Entry]) -> None:
        """Enter many at once by the priorities that they were saved with, under this same policy.

        The clock goes on from the lowest of them: whatever was evicted before had less. (After a change of policy use
        `rank`, in the order of use.)
        """
        for entry in entries:
            self.drop(entry.digest)
            self._entries[entry.digest] = entry
            self._lowest[entry.digest] = (entry.priority, entry.used_at, entry.digest)
            self.nbytes += entry.nbytes
        self._settle()
        if self._heap:
            self.clock = max(self.clock, self._heap[0][0])

    def drop(self, digest: str) -> Entry | None:
        """Take a value out that left the tier for other reasons than room; None if it is not here."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.nbytes -= entry.nbytes
            del self._lowest[digest]
        return entry

    def take(self, excess_bytes: int, spare: Container[str] = ()) -> list[Entry]:
        """Take out the lowest values until `excess_bytes` are free; fewer if only `spare` is left.

        The clock moves on. A victim that could not be removed after all goes back by `rank`.
        """
        victims: list[Entry] = []
        spared = []
        while excess_bytes > 0 and self._heap:
            item = heappop(self._heap)
            digest = item[2]
            if self._lowest.get(digest) != item:
                continue  # dropped, or it has a lower item
            entry = self._entries[digest]
            now = (entry.priority, entry.used_at, digest)
            if now != item:
                self._push(now)
            elif digest in spare:
                spared.append(item)
            else:
                victims.append(entry)
                self.drop(digest)
                excess_bytes -= entry.nbytes
        for item in spared:
            heappush(self._heap, item)
        self.clock = clock_after(self.clock, victims)
        return victims

    def _push(self, item: tuple[float, float, str]) -> None:
        self._lowest[item[2]] = item
        heappush(self._heap, item)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._settle()

    def _settle(self) -> None:
        """Rebuild the heap without what nobody owns."""
        self._heap = list(self._lowest.values())
        heapify(self._heap)
