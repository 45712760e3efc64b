"""The registry's table: a row for each passage, which holds hashes and a node id, never text.

What is damaged in a row makes its passage unfindable, never a wrong find: the proof is over node id and text.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ragblend.integrations.finding import MINIMUM, fingerprints
from ragblend.integrations.hashing import Keys

VERSION = 1  # of the table, and of the hashes in it
# Row ids only grow (AUTOINCREMENT), so what another process added is what has a larger one than was seen.
SCHEMA = """
CREATE TABLE IF NOT EXISTS Passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL, node_id BLOB NOT NULL,
    whole INTEGER NOT NULL, hashes BLOB NOT NULL, proof BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS PassagesByNode ON Passages (collection, node_id);
CREATE INDEX IF NOT EXISTS PassagesByWhole ON Passages (collection, whole, node_id);
"""


@dataclass(frozen=True)
class Changes:
    """Passages that were new (with their text), and rows that went for them."""

    new: int
    replaced: int


@dataclass(frozen=True)
class Claim:
    """What a row says of the text whose hash it has: its node's id, and the proof of it."""

    node_id: str
    proof: object

    def holds(self, text: str) -> bool:
        return proof_of(self.node_id, text) == self.proof


class PassageRows:
    """The rows of one collection; the caller holds the transaction."""

    def __init__(self, collection: str) -> None:
        self.collection = collection

    def put(self, sql: sqlite3.Connection, texts: Mapping[str, str]) -> Changes:
        """Have each node id stand for that text, and no other; a text under 16 characters has no row."""
        proofs = {node: proof_of(node, text) for node, text in texts.items()}
        known = {node: self._proof_in(sql, node) for node in texts}
        changed = [node for node in texts if known[node] != proofs[node]]
        replaced = self.delete(sql, [node for node in changed if known[node] is not None])
        new = [node for node in changed if len(texts[node]) >= MINIMUM]
        insert = "INSERT INTO Passages (collection, node_id, whole, hashes, proof) VALUES (?, ?, ?, ?, ?)"
        for node, keys in zip(new, fingerprints(texts[node] for node in new), strict=True):
            whole, hashes = _signed(int(keys[-1])), keys.astype("<u8").tobytes()
            sql.execute(insert, (self.collection, blob(node), whole, hashes, proofs[node]))
        return Changes(len(new), replaced)

    def delete(self, sql: sqlite3.Connection, nodes: Iterable[str]) -> int:
        """How many of them there were."""
        delete = "DELETE FROM Passages WHERE collection = ? AND node_id = ?"
        return sum(sql.execute(delete, (self.collection, blob(node))).rowcount for node in nodes)

    def count(self, sql: sqlite3.Connection) -> int:
        select = "SELECT COUNT(*) FROM Passages WHERE collection = ?"
        return int(sql.execute(select, (self.collection,)).fetchone()[0])

    def added_since(self, sql: sqlite3.Connection, row_id: int) -> Iterator[tuple[int, Keys | None]]:
        """Row id and hashes of what has a larger row id, ascending; None for hashes that damage has made none."""
        # The plus keeps SQLite from an index, after which it would have to sort.
        select = "SELECT id, hashes FROM Passages WHERE id > ? AND +collection = ? ORDER BY id"
        for found, packed in sql.execute(select, (row_id, self.collection)).fetchall():
            yield found, _unpack(packed)

    def claims(self, sql: sqlite3.Connection, whole: int) -> list[Claim]:
        """What is said of texts with that hash, by node id."""
        select = "SELECT node_id, proof FROM Passages WHERE collection = ? AND whole = ? ORDER BY node_id"
        rows = sql.execute(select, (self.collection, _signed(whole)))
        return [Claim(_text(node), proof) for node, proof in rows]

    def _proof_in(self, sql: sqlite3.Connection, node: str) -> object:
        select = "SELECT proof FROM Passages WHERE collection = ? AND node_id = ?"
        found = sql.execute(select, (self.collection, blob(node))).fetchone()
        return found[0] if found else None


def proof_of(node_id: str, text: str) -> bytes:
    """SHA-256 over both: a flipped bit in either, or in the proof, and the row is no row."""
    name = blob(node_id)
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + blob(text)).digest()


def blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # file names, and so node ids, may hold lone surrogates


def _text(found: object) -> str:
    """A row's node id; what damage has made no UTF-8 becomes something else, and its proof fails."""
    try:
        return found.decode("utf-8", "surrogatepass") if isinstance(found, bytes) else ""
    except UnicodeDecodeError:
        return ""


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def _unpack(packed: object) -> Keys | None:
    if isinstance(packed, bytes) and len(packed) % 8 == 0 and len(packed) >= 16:
        return np.frombuffer(packed, dtype="<u8")
    return None
