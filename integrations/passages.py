"""PassageRegistry: which texts are known as chunks, so that they are found again in a prompt that a framework built.

The file holds hashes and node ids, never text; with a wordlist short pieces could still be guessed from hashes, so it
is as private as the documents (0600), and what is deleted is overwritten. It is rebuildable: a damaged file is removed
and made anew.
"""

import hashlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from ragblend.integrations.finding import MINIMUM, TextIndex, fingerprints
from ragblend.integrations.hashing import Keys
from ragblend.kvstore.errors import StoreError, StoreFormatError
from ragblend.kvstore.files import make_private_file, make_private_folder
from ragblend.kvstore.sqlite import error_code, index_failed, integrity

log = logging.getLogger(__name__)
FILE_NAME = "passages.sqlite"
_VERSION = 1  # of the table, and of the hashes in it
_TIMEOUT_S = 30.0
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# Row ids only grow (AUTOINCREMENT), so what another process added is what has a larger one than was seen.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS Passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, collection TEXT NOT NULL, node_id BLOB NOT NULL,
    whole INTEGER NOT NULL, hashes BLOB NOT NULL, proof BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS PassagesByNode ON Passages (collection, node_id);
CREATE INDEX IF NOT EXISTS PassagesByWhole ON Passages (collection, whole, node_id);
"""
_STALE = 1000  # removed texts that may stay in memory, besides as many as there are texts
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """A chunk's text exactly as it stands in prompts, and its node's id."""

    text: str
    node_id: str | None = None


@dataclass(frozen=True)
class Found:
    """A registered text stands at text[start:stop], in Python characters."""

    start: int
    stop: int
    node_id: str


class PassageRegistry:
    """The passages of one collection, for threads and processes. The file is opened when it is first needed."""

    _open: ClassVar[dict[tuple[Path, str], "PassageRegistry"]] = {}
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, collection: str) -> None:
        self.path, self.collection = path, collection
        self._lock = threading.RLock()
        self._sql: sqlite3.Connection | None = None
        self._inode = 0
        self._forget_index()

    @classmethod
    def open(cls, home: Path, collection: str = "default") -> "PassageRegistry":
        """The registry of a home's collection, one object in a process."""
        key = (home.resolve(), collection)
        with cls._opening:
            if key not in cls._open:
                cls._open[key] = cls(key[0] / FILE_NAME, collection)
            return cls._open[key]

    def add(self, passages: Sequence[Passage]) -> int:
        """Register passages, all or none; how many were new. A node id that comes with another text loses its old one.

        A text of fewer than 16 characters is not registered: it would be found everywhere. A passage without a node id
        gets one from its text, see `node_id_of`.
        """
        latest = {node_id_of(passage): passage.text for passage in passages}
        return self._run(lambda sql: self._add(sql, latest))

    def remove(self, node_ids: Iterable[str]) -> int:
        """Remove passages, leaving nothing of them in the file; how many there were."""
        nodes = list(node_ids)
        return self._run(lambda sql: self._remove(sql, nodes))

    def find(self, text: str) -> list[Found]:
        """The registered texts in `text`: disjoint, ascending, chosen longest first, of equally long ones the earliest.

        Of several node ids with one text it is the smallest. Never raises for what is wrong with the file: a question
        can do without.
        """
        if len(text) < MINIMUM:
            return []
        try:
            return self._run(lambda sql: self._find(sql, text))
        except StoreError as error:
            log.warning("no passages are looked for in this prompt: %s", error)
            return []

    def __len__(self) -> int:
        return self._run(self._count)

    def close(self) -> None:
        """Close the file, for everybody who has this object; who uses it again opens it again."""
        with self._lock:
            if self._sql is not None:
                self._sql.close()
            self._sql = None
            self._forget_index()

    def _add(self, sql: sqlite3.Connection, texts: dict[str, str]) -> int:
        proofs = {node: _proof(node, text) for node, text in texts.items()}
        with _transaction(sql):
            known = {node: self._proof_in(sql, node) for node in texts}
            changed = [node for node in texts if known[node] != proofs[node]]
            replaced = self._delete(sql, [node for node in changed if known[node] is not None])
            new = [node for node in changed if len(texts[node]) >= MINIMUM]
            for node, keys in zip(new, fingerprints(texts[node] for node in new), strict=True):
                row = (self.collection, _blob(node), _signed(int(keys[-1])), _pack(keys), proofs[node])
                sql.execute(
                    "INSERT INTO Passages (collection, node_id, whole, hashes, proof) VALUES (?, ?, ?, ?, ?)",
                    row,
                )
        if replaced:
            self._truncate_log(sql)
        self._changed = True
        return len(new)

    def _remove(self, sql: sqlite3.Connection, nodes: Sequence[str]) -> int:
        with _transaction(sql):
            removed = self._delete(sql, nodes)
        self._truncate_log(sql)
        self._changed = True
        return removed

    def _delete(self, sql: sqlite3.Connection, nodes: Iterable[str]) -> int:
        delete = "DELETE FROM Passages WHERE collection = ? AND node_id = ?"
        return sum(sql.execute(delete, (self.collection, _blob(node))).rowcount for node in nodes)

    def _proof_in(self, sql: sqlite3.Connection, node: str) -> object:
        select = "SELECT proof FROM Passages WHERE collection = ? AND node_id = ?"
        found = sql.execute(select, (self.collection, _blob(node))).fetchone()
        return found[0] if found else None

    def _count(self, sql: sqlite3.Connection) -> int:
        select = "SELECT COUNT(*) FROM Passages WHERE collection = ?"
        return int(sql.execute(select, (self.collection,)).fetchone()[0])

    def _truncate_log(self, sql: sqlite3.Connection) -> None:
        if sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            log.warning("%s-wal keeps deleted hashes until its other readers are done", self.path)

    def _find(self, sql: sqlite3.Connection, text: str) -> list[Found]:
        self._refresh(sql)
        rows: dict[int, list[tuple[str, object]]] = {}

        def confirm(whole: int, start: int, stop: int) -> str | None:
            if whole not in rows:
                rows[whole] = self._rows(sql, whole)
            if not rows[whole]:
                self._index.discard(whole)  # removed, here or by another process
            said = (node for node, proof in rows[whole] if _proof(node, text[start:stop]) == proof)
            return next(said, None)

        return [Found(*found) for found in self._index.find(text, confirm)]

    def _rows(self, sql: sqlite3.Connection, whole: int) -> list[tuple[str, object]]:
        select = "SELECT node_id, proof FROM Passages WHERE collection = ? AND whole = ? ORDER BY node_id"
        rows = sql.execute(select, (self.collection, _signed(whole)))
        return [(_text(node), proof) for node, proof in rows]

    def _forget_index(self) -> None:
        self._index, self._last_id, self._held = TextIndex(), 0, 0
        self._seen_version, self._changed = -1, True

    def _refresh(self, sql: sqlite3.Connection) -> None:
        """Read what was added since, by whomever. What was removed is noticed when it is found."""
        version = int(sql.execute("PRAGMA data_version").fetchone()[0])  # counts the commits of others
        if version == self._seen_version and not self._changed:
            return
        if self._held > _STALE and self._held > 2 * self._count(sql) + _STALE:
            self._forget_index()
        # The plus keeps SQLite from an index, after which it would have to sort.
        select = "SELECT id, hashes FROM Passages WHERE id > ? AND +collection = ? ORDER BY id"
        rows = sql.execute(select, (self._last_id, self.collection)).fetchall()
        prints = [keys for _, packed in rows if (keys := _unpack(packed)) is not None]
        self._index.add(prints)
        self._held += len(prints)
        self._last_id = rows[-1][0] if rows else self._last_id
        self._seen_version, self._changed = version, False

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` with the connection; once more, with a new file, if that one turns out to be damaged."""
        with self._lock:
            try:
                try:
                    return work(self._connected())
                except sqlite3.DatabaseError as error:
                    if error_code(error) not in _DAMAGE:
                        raise
                    self._make_anew()
                    return work(self._connected())
            except sqlite3.Error as error:
                raise index_failed(error, self.path) from error
            except OSError as error:
                raise StoreError(
                    f"using the passage registry {self.path} failed: {error}. Check who owns it."
                ) from error

    def _connected(self) -> sqlite3.Connection:
        if self._sql is not None and _inode(self.path) == self._inode:
            return self._sql
        self.close()  # or another process has put a new file in the place of a damaged one
        if not self.path.parent.exists():
            make_private_folder(self.path.parent)
        make_private_file(self.path)
        self._inode = _inode(self.path)
        self._sql = _connect(self.path)
        return self._sql

    def _make_anew(self) -> None:
        self.close()
        if _inode(self.path) != self._inode:
            return  # another process has done it
        log.warning(
            "the passage registry %s is damaged; it is made anew and fills as passages come", self.path
        )
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)


def node_id_of(passage: Passage) -> str:
    """The passage's node id; without one a name made from its text, by which it can be removed."""
    if passage.node_id is not None:
        return passage.node_id
    return f"text-{hashlib.sha256(_blob(passage.text)).hexdigest()[:32]}"


def _connect(path: Path) -> sqlite3.Connection:
    sql = sqlite3.connect(path, timeout=_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        version = sql.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            raise StoreFormatError(
                f"opening the passage registry {path}: expected format {_VERSION}, found {version}. Remove that "
                "file: it fills again as passages are registered."
            )
        problems = integrity(sql, 1)
        if problems:
            damage = sqlite3.DatabaseError(problems[0])
            damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damage
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            sql.execute(f"PRAGMA {pragma}").fetchall()
        sql.executescript(_SCHEMA)
        sql.execute(f"PRAGMA user_version = {_VERSION}")
    except BaseException:
        sql.close()
        raise
    return sql


@contextmanager
def _transaction(sql: sqlite3.Connection) -> Iterator[None]:
    sql.execute("BEGIN IMMEDIATE")
    try:
        yield
        sql.execute("COMMIT")
    except BaseException:
        if sql.in_transaction:
            sql.execute("ROLLBACK")
        raise


def _proof(node_id: str, text: str) -> bytes:
    """SHA-256 over both: a flipped bit in either, or in the proof, and the row is no row."""
    name = _blob(node_id)
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + _blob(text)).digest()


def _blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # file names, and so node ids, may hold lone surrogates


def _text(blob: object) -> str:
    """A row's node id; what damage has made no UTF-8 becomes something else, and its proof fails."""
    try:
        return blob.decode("utf-8", "surrogatepass") if isinstance(blob, bytes) else ""
    except UnicodeDecodeError:
        return ""


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def _pack(keys: Keys) -> bytes:
    return keys.astype("<u8").tobytes()


def _unpack(packed: object) -> Keys | None:
    """A row's hashes; None if damage has left what cannot be any. Other damage only makes a text unfindable."""
    if isinstance(packed, bytes) and len(packed) % 8 == 0 and len(packed) >= 16:
        return np.frombuffer(packed, dtype="<u8")
    return None


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
