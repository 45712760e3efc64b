"""Admission: a value's row, its place in the order of eviction, and whom it displaces, in few statements.

What is displaced first hands its row over: an UPDATE changes fewer pages than an INSERT and a DELETE elsewhere, and
a commit is paid by the page.
"""

import sqlite3
from typing import NamedTuple

from ragblend.kvstore import index, use_rows
from ragblend.kvstore.policy import Entry
from ragblend.kvstore.uses import Uses


class Newcomer(NamedTuple):
    """A value whose file is written; cost: of computing one of its tokens."""

    digest: str
    filename: str
    nbytes: int
    cost: float


class Admitted(NamedTuple):
    """unnamed: files that no row names any more; evicted: how many of them were other values'."""

    unnamed: list[str | None]
    evicted: int


def admit(sql: sqlite3.Connection, uses: Uses, new: Newcomer, budget_bytes: int) -> Admitted:
    """Let a row name the new file, and evict what is too much then; inside a transaction."""
    if uses.waiting:
        uses.flush(sql)
    known = use_rows.read_known(sql, new.digest, uses.policy)
    excess_bytes = _excess_bytes(known, new, budget_bytes)
    victims = uses.victims(sql, excess_bytes, new.digest)
    if sum(victim.entry.nbytes for victim in victims) < excess_bytes:
        uses.settle(sql)  # rows that damage has made unknown
        known = use_rows.read_known(sql, new.digest, uses.policy)
        victims = uses.victims(sql, _excess_bytes(known, new, budget_bytes), new.digest)
    given = known.before or next(iter(victims), None)
    rowid = index.enter(sql, new.digest, new.filename, new.nbytes, given.rowid if given else None)
    state, entry = uses.arrival(known, Entry(new.digest, new.nbytes), new.cost)
    use_rows.enter(sql, state, rowid, entry)
    if known.gone is not None:
        use_rows.forget(sql, new.digest)
    for victim in victims:
        if victim is not given:
            index.drop(sql, victim.rowid)
    uses.gone(sql, state, victims)
    replaced = [known.before.filename] if known.before else []
    return Admitted([*replaced, *(victim.filename for victim in victims)], len(victims))


def _excess_bytes(known: use_rows.Known, new: Newcomer, budget_bytes: int) -> int:
    before_bytes = known.before.entry.nbytes if known.before else 0
    return known.stored_bytes - before_bytes + new.nbytes - budget_bytes
