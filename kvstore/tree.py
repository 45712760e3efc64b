"""The knowledge tree: the KV of chunks, each computed behind exactly what stood before it, so that nothing is repaired.

RAGCache (arXiv 2404.12457) sections 4 and 5. A node is a chunk, with the few words that join it to the one before,
behind a path of other nodes behind a prefix. Its key is a digest of that path, its KV a value of the store like any
other, whose header names its parent: what was encoded alone has none, what was fused is in no file. On the first level
a node is the chunk's own KV, stored once, because a chunk right behind its encoding prefix is exact.

What has nodes below it is not evicted, what is deleted goes with all below it, and what has lost its parent is swept.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.codec import RAW, Source
from ragblend.kvstore.keys import ChunkKey

if TYPE_CHECKING:
    from ragblend.kvstore.store import KVStore

# In the ledger's file, beside `Uses`: the nodes below the first level, those whose count alone is remembered included.
SCHEMA = """
CREATE TABLE IF NOT EXISTS Branches (
    digest TEXT PRIMARY KEY, parent TEXT NOT NULL, CHECK (typeof(digest) = 'text' AND typeof(parent) = 'text')
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS BranchesByParent ON Branches (parent);
"""
_STORED = "(SELECT bytes FROM Uses AS Known WHERE Known.digest = {}) > 0"
IS_LEAF = f"""NOT EXISTS (SELECT 1 FROM Branches
    WHERE Branches.parent = Uses.digest AND {_STORED.format("Branches.digest")})"""
_BELOW = """WITH RECURSIVE Below(digest) AS ({} UNION SELECT Branches.digest FROM Branches JOIN Below
    ON Branches.parent = Below.digest) SELECT digest FROM Below"""
_OF_ONE = _BELOW.format("VALUES (?)")
_UNREACHABLE = _BELOW.format(
    f"SELECT digest FROM Branches WHERE COALESCE(NOT {_STORED.format('Branches.parent')}, 1)"
)
FORGET_GONE = "DELETE FROM Branches WHERE digest NOT IN (SELECT digest FROM Uses)"


@dataclass(frozen=True)
class Node:
    """One place in the tree.

    token_ids: of what joins it to its parent, and of its chunk; start: position of the first one; parent: None on the
    first level.
    """

    key: ChunkKey
    token_ids: tuple[int, ...]
    start: int
    parent: ChunkKey | None

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


def match(store: "KVStore", path: Sequence[Node], geometry: Geometry) -> list[Source]:
    """The longest part of the path that is stored, from its first node on, opened; each node counts as asked for.

    What a codec has rounded is not exact: a chunk's own KV that was packed so ends the path.
    """
    opened = [store.open_chunk(n.key, n.token_ids, geometry, n.start, n.parent) for n in path]
    found = list(takewhile(lambda source: source is not None and source.codec is RAW, opened))
    for source in opened[len(found) :]:
        if source is not None:
            source.close()
    return [source for source in found if source is not None]


def below(sql: sqlite3.Connection, digest: str) -> list[str]:
    """That value, and all nodes that stand behind it."""
    return [each for (each,) in sql.execute(_OF_ONE, (digest,))]


def unreachable(sql: sqlite3.Connection) -> list[str]:
    """Nodes whose parent is not stored, and those behind them."""
    return [each for (each,) in sql.execute(_UNREACHABLE)]
