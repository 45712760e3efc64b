"""Uses: how often each value on the disk was asked for and what it costs, and therefore which one goes next.

The arithmetic is policy.py's, as in the memory tiers; the order is kept by an index of SQLite's, in rows beside those
of the store. So a store of 100,000 values opens without reading them, all processes see one order, and a use or a
victim costs O(log n). Uses are numbered: no clock is asked, so none can jump.

Retrievals wait in memory and are written with the next change: a hit costs no write and no fsync. Who is killed before
that loses the order of these uses and nothing else.
"""

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from ragblend.kvstore.policy import (
    DEFAULT_POLICY,
    POLICIES,
    Entry,
    Policy,
    clock_after,
    computed,
    joined,
    used,
)
from ragblend.kvstore.ranking import REMEMBERED
from ragblend.kvstore.use_rows import (
    Known,
    State,
    Stored,
    enter,
    forget,
    half_life_of,
    in_order,
    keep,
    mend,
    rank_anew,
    rank_the_unranked,
    read_gone,
    read_state,
    read_stored,
    save_state,
    trim_gone,
)

_TRIM_EVERY = 1000  # evictions: the rows of what is gone are counted one by one


class Uses:
    """How values were used, for one process. Methods that take a connection are called inside a transaction of it.

    wanted: what to rank by, None for whatever the rows are ranked by; `settle` makes it everybody's, until somebody
    opens the store who wants another. `policy` is the one that was so when the rows were last looked at.
    """

    def __init__(self, wanted: Policy | None = None, remembered: int = REMEMBERED) -> None:
        self._wanted, self.remembered = wanted, remembered
        self.policy = wanted or POLICIES[DEFAULT_POLICY]
        self._lock = threading.Lock()
        # used_at of what waits counts this process's retrievals; the rows know all but those since _written.
        self._count, self._written = 0.0, 0.0
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        self._flushing: OrderedDict[str, Entry] = OrderedDict()
        self._in_transaction: tuple[float, list[str]] = 0.0, []
        self._evicted = 0

    def used(self, digest: str) -> None:
        """Count a retrieval, found or not; the next `flush` writes it."""
        with self._lock:
            self._count += 1.0
            before = self._waiting.pop(digest, Entry(digest, 0))
            self._waiting[digest] = used(before, self._count, half_life_of(self.policy))
            _forget_oldest(self._waiting, self.remembered)

    @property
    def waiting(self) -> int:
        """Values whose retrievals are not written."""
        return len(self._waiting)

    def flush(self, sql: sqlite3.Connection) -> State:
        """Write the retrievals that wait, as later than all that others have written; what holds then.

        Those of a value without a row (never stored, or deleted) stay in memory until it is put: of what was deleted
        nothing may come back. If the transaction fails, everything still waits.
        """
        state = self._flush(sql)
        save_state(sql, state)
        return state

    def _flush(self, sql: sqlite3.Connection) -> State:
        state = read_state(sql, self.policy)
        self.policy = state.policy
        waiting, count = self._waiting_now()
        shift, known = state.uses - self._written, []
        state = state._replace(uses=count + shift)
        for entry in waiting:
            later = entry._replace(used_at=entry.used_at + shift)
            found = read_stored(sql, entry.digest)
            if found is not None and found.known:
                enter(sql, state, found.rowid, joined(found.entry, later, half_life_of(state.policy)))
            elif (gone := read_gone(sql, entry.digest)) is not None:
                keep(sql, joined(gone, later, half_life_of(state.policy)))
            else:
                continue
            known.append(entry.digest)
        self._in_transaction = count, known
        return state

    def begun(self) -> None:
        """A transaction begins: what one wrote that failed is not written."""
        self._in_transaction = self._written, []

    def flushed(self) -> None:
        """The transaction of the last `flush` is committed."""
        with self._lock:
            self._written, known = self._in_transaction
            self._in_transaction = self._written, []
            for digest in known:
                self._flushing.pop(digest, None)

    def arrival(self, known: Known, new: Entry, cost: float) -> tuple[State, Entry]:
        """A value was computed, at `cost` a token, and is stored now; what to rank, nobody having asked counts as once.

        Else all that one ingests would go before anything that was asked for once, however long ago.
        """
        state, before = known.state, known.before
        if before is None or not before.known:
            entry = self._asked_before(known, new)
        else:
            entry = before.entry._replace(nbytes=new.nbytes)
        entry = computed(entry, cost)
        if not entry.frequency:
            state = State(state.policy, state.uses + 1.0, state.clock)
            entry = entry._replace(used_at=state.uses, frequency=1.0)
        return state, entry

    def victims(self, sql: sqlite3.Connection, excess_bytes: int, spare: str) -> list[Stored]:
        """The lowest values that together free `excess_bytes`; fewer if only `spare` is left."""
        victims: list[Stored] = []
        if excess_bytes > 0:
            for victim in in_order(sql, spare):
                victims.append(victim)
                excess_bytes -= victim.entry.nbytes
                if excess_bytes <= 0:
                    break
        return victims

    def gone(self, sql: sqlite3.Connection, state: State, victims: Sequence[Stored]) -> None:
        """These were evicted; the clock moves on, and their counts are kept if the policy wants them."""
        if state.policy.fades:
            for victim in victims:
                keep(sql, victim.entry)
        clock = clock_after(state.clock, [victim.entry for victim in victims])
        save_state(sql, State(state.policy, state.uses, clock))
        self._evicted += len(victims)
        if self._evicted >= _TRIM_EVERY:
            self._evicted = 0
            trim_gone(sql, self.remembered)

    def forget(self, sql: sqlite3.Connection, digests: Iterable[str]) -> None:
        """These were deleted: nothing of them may stay, their counts included."""
        for digest in digests:
            forget(sql, digest)
            with self._lock:
                self._waiting.pop(digest, None)
                self._flushing.pop(digest, None)

    def keep_only(self, sql: sqlite3.Connection, wanted: Collection[str]) -> None:
        """Forget every other value."""
        with self._lock:
            known = {*self._waiting, *self._flushing}
        known.update(digest for (digest,) in sql.execute("SELECT digest FROM Gone"))
        self.forget(sql, known - set(wanted))

    def settle(self, sql: sqlite3.Connection) -> None:
        """Bring the rows in line with the store's after damage or an older version; rank by the policy wanted."""
        state, wanted = read_state(sql, self.policy), self._wanted
        mend(sql, state)
        if wanted is not None and wanted.name != state.policy.name:
            state = rank_anew(sql, state._replace(policy=wanted, clock=0.0))
        self._wanted, self.policy = None, state.policy
        save_state(sql, rank_the_unranked(sql, state))
        trim_gone(sql, self.remembered)

    def _waiting_now(self) -> tuple[list[Entry], float]:
        with self._lock:
            half_life = half_life_of(self.policy)
            for digest, entry in self._waiting.items():
                before = self._flushing.pop(
                    digest, None
                )  # of a flush that failed, or of a value without a row
                self._flushing[digest] = joined(before, entry, half_life) if before else entry
            self._waiting.clear()
            _forget_oldest(self._flushing, self.remembered)
            return list(self._flushing.values()), self._count

    def _asked_before(self, known: Known, new: Entry) -> Entry:
        """What is known of a value that comes in: its count from before it was evicted, or retrievals that wait."""
        with self._lock:
            asked = self._flushing.pop(new.digest, None)
        if not known.state.policy.fades:  # others count from when the value came in
            return new
        if known.gone is not None:
            return known.gone._replace(nbytes=new.nbytes)
        if asked is None:
            return new
        return asked._replace(nbytes=new.nbytes, used_at=asked.used_at + known.state.uses - self._count)


def _forget_oldest(entries: OrderedDict[str, Entry], at_most: int) -> None:
    while len(entries) > at_most:
        entries.popitem(last=False)
