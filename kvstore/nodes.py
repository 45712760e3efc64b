"""NodeIndex: which token ids, and which KV, a node id of a collection stands for.

Token ids can be decoded to text, so this file is as secret as the documents: 0600, deleted rows are
overwritten, and the write-ahead log is emptied after every delete. It is rebuildable: a damaged file is removed
and made anew.
"""

import logging
import re
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ragblend.kvstore.chunks import ChunkKey
from ragblend.kvstore.closing import Closing
from ragblend.kvstore.errors import StoreError, StoreFormatError
from ragblend.kvstore.files import make_private_file, make_private_folder
from ragblend.kvstore.keys import FORMAT_VERSION, pack_tokens, unpack_tokens
from ragblend.kvstore.sqlite import DAMAGED, connect_rebuildable, error_code, index_failed, transaction

log = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS Nodes (
    collection TEXT NOT NULL, tokenizer TEXT NOT NULL, node_id TEXT NOT NULL, tokens BLOB NOT NULL,
    PRIMARY KEY (collection, tokenizer, node_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS NodeKeys (
    key TEXT NOT NULL, collection TEXT NOT NULL, tokenizer TEXT NOT NULL, node_id TEXT NOT NULL,
    PRIMARY KEY (key, collection, tokenizer, node_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS Doomed (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS NodeKeysByNode ON NodeKeys (collection, node_id, tokenizer);
"""
_DIGEST = re.compile("[0-9a-f]{64}")
_NODE = "collection = ? AND tokenizer = ? AND node_id = ?"


@dataclass(frozen=True)
class Scope:
    """What a node id's token ids depend on: the collection, and the tokenizer (hex digest of its content)."""

    collection: str
    tokenizer: str


class NodeIndex(Closing):
    """A small SQLite file, safe for threads and for several processes."""

    def __init__(self, path: Path, sql: sqlite3.Connection) -> None:
        self.path = path
        self._sql = sql
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path) -> "NodeIndex":
        """Open the index at `path`, made if absent; StoreFormatError for another version's, StoreError."""
        try:
            if not path.parent.exists():
                make_private_folder(path.parent)
            make_private_file(path)
        except OSError as error:
            raise StoreError(f"opening the node index {path} failed: {error}. Check who owns it.") from error
        try:
            try:
                return cls(path, _connect(path))
            except sqlite3.DatabaseError as error:
                if error_code(error) not in DAMAGED:
                    raise
            log.warning("the node index %s is damaged; it is made anew and fills as nodes are encoded", path)
            for suffix in ("", "-wal", "-shm"):  # not set aside: its bytes are text, and deletion is complete
                Path(f"{path}{suffix}").unlink(missing_ok=True)
            make_private_file(path)
            return cls(path, _connect(path))
        except sqlite3.Error as error:
            raise index_failed(error, path) from error

    def put_many(
        self, scope: Scope, nodes: Iterable[tuple[str, Sequence[int], ChunkKey]]
    ) -> tuple[ChunkKey, ...]:
        """Enter (node id, token ids, key) triples, all or none.

        A node may gain a key (another model, another prefix). If its token ids have changed, its old keys are
        taken from it. Returns what is doomed now, see `doomed`.
        """
        with self._transaction() as sql:
            dropped: set[str] = set()
            for node_id, token_ids, key in nodes:
                tokens, where = _pack(node_id, token_ids), (scope.collection, scope.tokenizer, node_id)
                old = sql.execute(f"SELECT tokens FROM Nodes WHERE {_NODE}", where).fetchone()
                if old is not None and old[0] != tokens:
                    dropped |= _drop_keys(sql, _NODE, where)
                sql.execute("INSERT OR REPLACE INTO Nodes VALUES (?, ?, ?, ?)", (*where, tokens))
                sql.execute("INSERT OR IGNORE INTO NodeKeys VALUES (?, ?, ?, ?)", (key.digest, *where))
            return _doom(sql, dropped)

    def get(self, scope: Scope, node_id: str) -> tuple[int, ...] | None:
        """The node's token ids; None if it was never encoded here, or its row is damaged."""
        with self._connection() as sql:
            where = (scope.collection, scope.tokenizer, node_id)
            found = sql.execute(f"SELECT tokens FROM Nodes WHERE {_NODE}", where).fetchone()
        return _unpack(node_id, found[0]) if found else None

    def node_ids(self, scope: Scope) -> list[str]:
        """Every node id of one collection and tokenizer."""
        with self._connection() as sql:
            select = "SELECT node_id FROM Nodes WHERE collection = ? AND tokenizer = ? ORDER BY node_id"
            return [node_id for (node_id,) in sql.execute(select, (scope.collection, scope.tokenizer))]

    def nodes_with(self, key: ChunkKey) -> list[tuple[Scope, str]]:
        """Every node whose KV is found under `key`."""
        with self._connection() as sql:
            select = "SELECT collection, tokenizer, node_id FROM NodeKeys WHERE key = ?"
            return [(Scope(c, t), node_id) for c, t, node_id in sql.execute(select, (key.digest,))]

    def keys(self) -> set[ChunkKey]:
        """Every key that some node has: what `KVStore.gc(keep=...)` must keep."""
        with self._connection() as sql:
            return set(_chunk_keys(key for (key,) in sql.execute("SELECT DISTINCT key FROM NodeKeys")))

    def delete(self, collection: str, node_ids: Iterable[str]) -> tuple[ChunkKey, ...]:
        """Remove nodes, for every tokenizer. Returns what is doomed now, see `doomed`."""
        with self._transaction() as sql:
            dropped: set[str] = set()
            for node_id in node_ids:
                where = (collection, node_id)
                dropped |= _drop_keys(sql, "collection = ? AND node_id = ?", where)
                sql.execute("DELETE FROM Nodes WHERE collection = ? AND node_id = ?", where)
            unused = _doom(sql, dropped)
        self._truncate_log()
        return unused

    def doomed(self) -> tuple[ChunkKey, ...]:
        """Keys that lost their last node, and whose KV the store has still to delete.

        They are noted in the transaction that took the node away, until `buried` says that it is done: a kill in
        between leaves KV that can be turned into text, and the next call finds it.
        """
        with self._connection() as sql:
            return _doom(sql, set())

    def buried(self, keys: Iterable[ChunkKey]) -> None:
        """The store has deleted these."""
        with self._transaction() as sql:
            sql.executemany("DELETE FROM Doomed WHERE key = ?", [(key.digest,) for key in keys])
        self._truncate_log()

    def close(self) -> None:
        with self._lock:
            self._sql.close()

    def _truncate_log(self) -> None:
        with self._connection() as sql:
            busy = sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            log.warning("%s-wal keeps deleted token ids until its other readers are done", self.path)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._sql
        except sqlite3.Error as error:
            raise index_failed(error, self.path) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as sql, transaction(sql):
            yield sql


def _connect(path: Path) -> sqlite3.Connection:
    def refused(found: int) -> StoreFormatError:
        return StoreFormatError(
            f"opening the node index {path}: expected format {FORMAT_VERSION}, found {found}. Remove "
            "that file and run `ragblend store repair`: it is rebuilt from the documents."
        )

    return connect_rebuildable(path, _SCHEMA, FORMAT_VERSION, refused)


def _drop_keys(sql: sqlite3.Connection, where: str, arguments: tuple[str, ...]) -> set[str]:
    dropped = {key for (key,) in sql.execute(f"SELECT key FROM NodeKeys WHERE {where}", arguments)}
    sql.execute(f"DELETE FROM NodeKeys WHERE {where}", arguments)
    return dropped


def _doom(sql: sqlite3.Connection, keys: set[str]) -> tuple[ChunkKey, ...]:
    """Note the keys; all that are noted, but for those that a node has (again)."""
    sql.executemany("INSERT OR IGNORE INTO Doomed VALUES (?)", [(key,) for key in keys])
    unused = (
        "SELECT key FROM Doomed WHERE NOT EXISTS (SELECT 1 FROM NodeKeys WHERE NodeKeys.key = Doomed.key) "
        "ORDER BY key"
    )
    return tuple(_chunk_keys(key for (key,) in sql.execute(unused)))


def _chunk_keys(digests: Iterable[str]) -> Iterator[ChunkKey]:
    # A flipped bit may leave what is no digest: it names no value.
    return (ChunkKey(digest) for digest in digests if _DIGEST.fullmatch(digest))


def _pack(node_id: str, token_ids: Sequence[int]) -> bytes:
    """Token ids and a checksum: a flipped bit in SQLite's file is no error to SQLite, but another text."""
    packed = pack_tokens(token_ids)
    return packed + struct.pack("<I", zlib.crc32(packed, zlib.crc32(node_id.encode())))


def _unpack(node_id: str, row: object) -> tuple[int, ...] | None:
    if isinstance(row, bytes) and len(row) % 4 == 0:
        token_ids = unpack_tokens(row[:-4])
        if _pack(node_id, token_ids) == row:
            return token_ids
    log.warning("the token ids of node %s are damaged; encode it again", node_id)
    return None
