"""NodeIndex: maps the node ids of a collection to token ids, KV keys, and hashes of passages' texts.

Token ids can be decoded to text, and short texts guessed from hashes, so this file is as secret as the documents: 0600,
deleted rows are overwritten, and the write-ahead log is emptied after every delete. A damaged file is deleted and
rebuilt.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ragblend.kvstore.files import make_private_folder
from ragblend.kvstore.keys import FORMAT_VERSION, ChunkKey, pack_tokens, unpack_tokens
from ragblend.kvstore.sqlite import SqliteFile

# AUTOINCREMENT: a later addition, also by another process, has a larger row id or number than all before. A key that is
# added to the outbox again gets a new number.
_TABLES = (
    """CREATE TABLE Nodes (
    collection TEXT NOT NULL, tokenizer TEXT NOT NULL, node_id TEXT NOT NULL, tokens BLOB NOT NULL,
    PRIMARY KEY (collection, tokenizer, node_id)
) WITHOUT ROWID""",
    """CREATE TABLE NodeKeys (
    key TEXT NOT NULL, collection TEXT NOT NULL, tokenizer TEXT NOT NULL, node_id TEXT NOT NULL,
    PRIMARY KEY (key, collection, tokenizer, node_id)
) WITHOUT ROWID""",
    """CREATE TABLE Entered (
    number INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL, node_id TEXT NOT NULL, tokenizer TEXT NOT NULL,
    UNIQUE (collection, node_id, tokenizer)
)""",
    """CREATE TABLE Outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, shared INTEGER NOT NULL, UNIQUE (key, shared)
)""",
    "CREATE INDEX NodeKeysByNode ON NodeKeys (collection, node_id, tokenizer)",
    """CREATE TABLE Passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL, node_id BLOB NOT NULL, head INTEGER NOT NULL,
    length INTEGER NOT NULL, whole INTEGER NOT NULL, proof BLOB NOT NULL
)""",
    "CREATE UNIQUE INDEX PassagesByNode ON Passages (collection, node_id)",
    "CREATE INDEX PassagesByWhole ON Passages (collection, whole, node_id)",
)
_NODE = "collection = ? AND tokenizer = ? AND node_id = ?"
# Prefix of the collection that hidden nodes (and the app's hidden documents) are in; users' names have no slash.
HIDDEN = "deleted/"
IS_HIDDEN = f"(collection >= '{HIDDEN}' AND collection < 'deleted0')"  # "0" follows "/"
# Keys that a node has (again) are left out. From the shared store, KV of hidden nodes is deleted too.
_TO_DELETE = f"""SELECT key, number FROM Outbox WHERE shared = ? AND key > ?
    AND NOT EXISTS (SELECT 1 FROM NodeKeys WHERE NodeKeys.key = Outbox.key
    AND NOT (shared AND {IS_HIDDEN})) ORDER BY key LIMIT ?"""


@dataclass(frozen=True)
class Scope:
    """The namespace of node ids: the collection, and the tokenizer (hex digest of its content)."""

    collection: str
    tokenizer: str


class PassageHashes(NamedTuple):
    """The stored hashes of a passage's text.

    head, whole: 64-bit hashes of its first characters and of all `length` of them (see `text_index.TextHashes`); proof:
    a digest over node id and text.
    """

    head: int
    length: int
    whole: int
    proof: bytes


class NodeIndex(SqliteFile):
    """The index in a small SQLite file, safe for several threads and processes."""

    what, version, tables = "node index", FORMAT_VERSION, _TABLES
    remedy = "it is filled as passages are added and encoded; `ragblend store repair` rebuilds it from the documents"

    @classmethod
    def open(cls, path: Path) -> "NodeIndex":
        """Open the index at `path`, created if absent. Raises StoreFormatError for another version, StoreError."""
        return cls(path)

    def _open(self) -> sqlite3.Connection:
        # Only at the first time: a folder that is removed while the index is open is not created again.
        if not self.generation and not self.path.parent.exists():
            make_private_folder(self.path.parent)
        return super()._open()

    def put_many(self, scope: Scope, nodes: Iterable[tuple[str, Sequence[int], ChunkKey | None]]) -> None:
        """Insert (node id, token ids, key) triples in one transaction. key: None if there is no KV yet.

        A node may have several keys (models, prefixes). If its token ids have changed, its old keys go into the outbox.
        """
        with self.transaction() as sql:
            removed_keys: set[str] = set()
            for node_id, token_ids, key in nodes:
                tokens, where = pack_tokens(token_ids), _where(scope, node_id)
                old = sql.execute(f"SELECT tokens FROM Nodes WHERE {_NODE}", where).fetchone()
                if old is not None and old[0] != tokens:
                    removed_keys |= _remove_keys(sql, _NODE, where)
                if old is None or old[0] != tokens:
                    sql.execute("INSERT OR REPLACE INTO Nodes VALUES (?, ?, ?, ?)", (*where, tokens))
                    columns = "Entered (collection, tokenizer, node_id)"
                    sql.execute(f"INSERT OR REPLACE INTO {columns} VALUES (?, ?, ?)", where)
                if key is not None:
                    sql.execute("INSERT OR IGNORE INTO NodeKeys VALUES (?, ?, ?, ?)", (key.digest, *where))
            _add_to_outbox(sql, removed_keys)

    def claim(self, scope: Scope, node_id: str, token_ids: Sequence[int], key: ChunkKey) -> bool:
        """Give a node a key before its KV is stored. False if there is no such node, or it has other token ids."""
        where = _where(scope, node_id)
        with self.transaction() as sql:
            found = sql.execute(f"SELECT tokens FROM Nodes WHERE {_NODE}", where).fetchone()
            if found is None or found[0] != pack_tokens(token_ids):
                return False
            sql.execute("INSERT OR IGNORE INTO NodeKeys VALUES (?, ?, ?, ?)", (key.digest, *where))
            return True

    def has(self, scope: Scope, node_id: str, key: ChunkKey) -> bool:
        """Whether the node still has the key; if not, the KV must not be stored."""
        query = f"SELECT 1 FROM NodeKeys WHERE key = ? AND {_NODE}"
        return bool(self.rows(query, key.digest, *_where(scope, node_id)))

    def get(self, scope: Scope, node_id: str) -> tuple[int, ...] | None:
        """The node's token ids; None if it was never encoded here."""
        found = self.column(f"SELECT tokens FROM Nodes WHERE {_NODE}", *_where(scope, node_id))
        return unpack_tokens(found[0]) if found else None

    def node_ids(self, scope: Scope) -> list[str]:
        """Every node id of one collection and tokenizer."""
        query = "SELECT node_id FROM Nodes WHERE collection = ? AND tokenizer = ? ORDER BY node_id"
        return [_id(found) for found in self.column(query, scope.collection, scope.tokenizer)]

    def changed_since(self, scope: Scope, number: int | None) -> tuple[int, list[str]]:
        """A number for the next call, and the node ids that were added or changed after `number` (None: all).

        The next call may return some of them again.
        """
        select, where = "SELECT node_id FROM Nodes WHERE collection = ? AND tokenizer = ?", list[object]()
        if number is not None:
            select, where = (
                "SELECT node_id FROM Entered WHERE number > ? AND collection = ? AND tokenizer = ?",
                [number],
            )
        with self.connection() as sql:
            last = sql.execute("SELECT max(number) FROM Entered").fetchone()[0] or 0
            found = sql.execute(select, (*where, scope.collection, scope.tokenizer)).fetchall()
        return max(last, number or 0), [_id(node_id) for (node_id,) in found]

    def keys(self, collection: str | None = None) -> set[ChunkKey]:
        """The keys of all nodes, in one collection or in all: those that `KVStore.gc(keep=...)` must keep."""
        select, where = "SELECT DISTINCT key FROM NodeKeys", () if collection is None else (collection,)
        return {ChunkKey(key) for key in self.column(select + " WHERE collection = ?" * len(where), *where)}

    def delete(self, collection: str, node_ids: Iterable[str]) -> None:
        """Delete nodes, also hidden ones, of every tokenizer, with the hashes of their texts.

        Their keys are added to the outbox, which leaves out those that another node has.
        """
        with self.transaction() as sql:
            removed_keys: set[str] = set()
            for node_id in node_ids:
                where = (collection, HIDDEN + collection, _text_value(node_id))
                removed_keys |= _remove_keys(sql, "collection IN (?, ?) AND node_id = ?", where)
                for table in ("Nodes", "Entered"):
                    sql.execute(f"DELETE FROM {table} WHERE collection IN (?, ?) AND node_id = ?", where)
                _unregister(sql, collection, node_id)
            _add_to_outbox(sql, removed_keys)
        self.erase_log()

    def delete_collection(self, collection: str) -> None:
        """Delete all nodes and texts of the collection, as `delete` does."""
        with self.transaction() as sql:
            where = (collection, HIDDEN + collection)
            removed_keys = _remove_keys(sql, "collection IN (?, ?)", where)
            for table in ("Nodes", "Entered", "Passages"):
                sql.execute(f"DELETE FROM {table} WHERE collection IN (?, ?)", where)
            _add_to_outbox(sql, removed_keys)
        self.erase_log()

    def set_hidden(
        self, collection: str, node_ids: Iterable[str], hidden: bool, shared: bool = False
    ) -> set[ChunkKey]:
        """Hide nodes, or show them again; returns their keys. A hidden node cannot be found, but its KV stays.

        shared: whether to delete their KV from the shared store, by adding the keys to its outbox.
        """
        old, new = (collection, HIDDEN + collection)[:: 1 if hidden else -1]
        of_node, keys = "WHERE collection = ? AND node_id = ?", set[str]()
        with self.transaction() as sql:
            for node_id in map(_text_value, node_ids):
                keys |= {key for (key,) in sql.execute(f"SELECT key FROM NodeKeys {of_node}", (old, node_id))}
                for table in ("Nodes", "NodeKeys"):
                    sql.execute(
                        f"UPDATE OR REPLACE {table} SET collection = ? {of_node}", (new, old, node_id)
                    )
                sql.execute(f"DELETE FROM Entered {of_node}", (old, node_id))
                tokenizers = f"SELECT collection, node_id, tokenizer FROM Nodes {of_node}"
                insert = f"INSERT OR REPLACE INTO Entered (collection, node_id, tokenizer) {tokenizers}"
                sql.execute(insert, (new, node_id))
            _add_to_outbox(sql, keys if shared else (), shared=True)
        return {ChunkKey(key) for key in keys}

    def outbox(self, at_most: int = -1, shared: bool = False, after: str = "") -> dict[ChunkKey, int]:
        """Keys without a node whose KV must still be deleted, each with its number.

        They are added in the transaction that deletes the node, so that after a kill the next process deletes the KV,
        which could be turned back into text. shared: those in the shared store; after: only keys after that one.
        """
        rows = self.rows(_TO_DELETE, shared, after, at_most)
        return {ChunkKey(digest): number for digest, number in rows}

    def add_to_outbox(self, key: ChunkKey) -> None:
        """Add a key whose node was deleted; `outbox` leaves it out if another node has it."""
        with self.transaction() as sql:
            _add_to_outbox(sql, [key.digest])

    def remove_from_outbox(self, done: Mapping[ChunkKey, int], also_shared: bool = False) -> None:
        """Remove keys whose KV was deleted, given as `outbox` returned them; those added again since then stay.

        also_shared: whether to move them to the shared store's outbox.
        """
        with self.transaction() as sql:
            sql.executemany("DELETE FROM Outbox WHERE number = ?", [(number,) for number in done.values()])
            if also_shared:
                _add_to_outbox(sql, (key.digest for key in done), shared=True)
        self.erase_log()

    # --- registered passages, which are searched for in prompts

    def register(self, collection: str, hashes: Mapping[str, PassageHashes | None]) -> int:
        """Set the text of each node id by its hashes (None: no text), in one transaction; returns how many are new."""
        select = "SELECT proof FROM Passages WHERE collection = ? AND node_id = ?"
        insert = (
            "INSERT INTO Passages (collection, node_id, head, length, whole, proof) VALUES (?, ?, ?, ?, ?, ?)"
        )
        with self.transaction() as sql:
            new = replaced = 0
            for node_id, found in hashes.items():
                where = (collection, _encoded(node_id))
                old = sql.execute(select, where).fetchone()
                if old is not None and found is not None and old[0] == found.proof:
                    continue
                replaced += _unregister(sql, collection, node_id)
                if found is not None:
                    sql.execute(
                        insert, (*where, _signed(found.head), found.length, _signed(found.whole), found.proof)
                    )
                    new += 1
        if replaced:
            self.erase_log()
        return new

    def unregister(self, collection: str, node_ids: Iterable[str]) -> int:
        """Remove the texts of these node ids; returns how many had one."""
        with self.transaction() as sql:
            count = sum(_unregister(sql, collection, node_id) for node_id in node_ids)
        self.erase_log()
        return count

    def count_registered(self, collection: str) -> int:
        """Number of registered texts of the collection."""
        return int(self.column("SELECT COUNT(*) FROM Passages WHERE collection = ?", collection)[0])

    def node_ids_with_prefix(self, collection: str, prefix: str) -> list[str]:
        """The node ids of registered texts that begin with `prefix`, in insertion order."""
        select = (
            "SELECT node_id FROM Passages WHERE collection = ? AND node_id >= ? AND node_id < ? ORDER BY id"
        )
        first = _encoded(prefix)
        return [_id(node_id) for node_id in self.column(select, collection, first, first + b"\xff")]

    def registered_since(self, collection: str, row_id: int) -> list[tuple[int, int, int, int]]:
        """Row id, and the hashes head, length and whole, of all registered texts with a larger row id, ascending."""
        # The plus keeps SQLite from using an index, after which it would have to sort.
        select = "SELECT id, head, length, whole FROM Passages WHERE id > ? AND +collection = ? ORDER BY id"
        rows = self.rows(select, row_id, collection)
        return [(found, head % 2**64, length, whole % 2**64) for found, head, length, whole in rows]

    def registered_with_hash(self, collection: str, whole: int) -> list[tuple[str, bytes]]:
        """Node id and proof of every registered text with that hash of the whole, sorted by node id."""
        select = "SELECT node_id, proof FROM Passages WHERE collection = ? AND whole = ? ORDER BY node_id"
        return [(_id(node_id), proof) for node_id, proof in self.rows(select, collection, _signed(whole))]

    def data_version(self) -> tuple[int, int, int]:
        """A version: it differs after any change, and its first number after the file was replaced."""
        with self.connection() as sql:
            data_version = int(sql.execute("PRAGMA data_version").fetchone()[0])  # other processes' commits
            return self.generation, data_version, sql.total_changes


def _unregister(sql: sqlite3.Connection, collection: str, node_id: str) -> int:
    delete = "DELETE FROM Passages WHERE collection = ? AND node_id = ?"
    return sql.execute(delete, (collection, _encoded(node_id))).rowcount


def _encoded(node_id: str) -> bytes:
    return node_id.encode("utf-8", "surrogatepass")  # file names, and so node ids, may hold lone surrogates


def _text_value(node_id: str) -> str | bytes:
    """The node id for a text column; as bytes if it is not UTF-8. SQLite stores these too; they never equal a text."""
    try:
        node_id.encode()
    except UnicodeEncodeError:
        return _encoded(node_id)
    return node_id


def _id(found: str | bytes) -> str:
    """The inverse of `_text_value` and of `_encoded`."""
    return found if isinstance(found, str) else found.decode("utf-8", "surrogatepass")


def _where(scope: Scope, node_id: str) -> tuple[str | bytes, ...]:
    """The arguments of _NODE."""
    return scope.collection, scope.tokenizer, _text_value(node_id)


def _signed(key: int) -> int:
    """A 64-bit hash as SQLite's signed integer."""
    return key - (1 << 64) if key >> 63 else key


def _remove_keys(sql: sqlite3.Connection, where: str, arguments: tuple[str | bytes, ...]) -> set[str]:
    removed = {key for (key,) in sql.execute(f"SELECT key FROM NodeKeys WHERE {where}", arguments)}
    sql.execute(f"DELETE FROM NodeKeys WHERE {where}", arguments)
    return removed


def _add_to_outbox(sql: sqlite3.Connection, keys: Iterable[str], shared: bool = False) -> None:
    insert = "INSERT OR REPLACE INTO Outbox (key, shared) VALUES (?, ?)"
    sql.executemany(insert, [(key, shared) for key in keys])
