"""PassageRegistry: the registered passages, which are found in prompts that frameworks build.

The node index (`kvstore/nodes.py`) holds hashes and node ids, never text; short texts can still be guessed from hashes,
so it is as private as the documents (0600), and deleted rows are overwritten.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar
from weakref import WeakValueDictionary

from ragblend.integrations.recurring import RecurringText
from ragblend.integrations.text_index import MIN_TEXT_CHARS, TextHashes, TextIndex, hash_texts
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.nodes import NodeIndex, PassageHashes
from ragblend.kvstore.sqlite import DamagedFileError

log = logging.getLogger(__name__)
FILE_NAME = "nodes.sqlite"
LEARNED_PREFIX = "seen-"  # of the node ids of learned passages
MAX_LEARNED = 10_000
_MAX_STALE = 1000  # how many removed texts the index in memory may hold, besides as many as are registered
T = TypeVar("T")


@dataclass(frozen=True)
class Passage:
    """A chunk's text exactly as it is in prompts, and its node's id."""

    text: str
    node_id: str | None = None


@dataclass(frozen=True)
class PassageSpan:
    """text[start:stop] is a passage; in Python characters."""

    start: int
    stop: int
    node_id: str | None


class _SharedNodeIndex:
    """A home's node index, shared by the registries of its collections, and open while one of them uses it."""

    _instances: ClassVar[WeakValueDictionary[Path, "_SharedNodeIndex"]] = WeakValueDictionary()
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path) -> None:
        self.nodes = NodeIndex.open(path)

    @classmethod
    def open(cls, path: Path) -> "_SharedNodeIndex":
        with cls._open_lock:
            if (shared := cls._instances.get(path)) is None:
                shared = cls._instances[path] = cls(path)
            return shared

    def __del__(self) -> None:
        if hasattr(self, "nodes"):  # it was opened
            self.nodes.close()


class PassageRegistry:
    """The passages of one collection, safe for several threads and processes. The file is opened on first use.

    retrieved_chars: length of the shortest passage retrieved since the last prompt with a passage; 0 for none.
    """

    _instances: ClassVar[dict[tuple[Path, str], "PassageRegistry"]] = {}
    _open_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, collection: str) -> None:
        self.path, self.collection = path, collection
        self._lock = threading.RLock()
        self._file: _SharedNodeIndex | None = None
        self.recurring = RecurringText()
        self.retrieved_chars = 0
        self._is_dropped = False
        self._learned: dict[str, None] | None = None  # node ids in the file, the most recently used last
        self._clear_index()

    @classmethod
    def open(cls, home: Path, collection: str = "default") -> "PassageRegistry":
        """The registry of a home's collection; one object per process."""
        key = (home.resolve(), collection)
        with cls._open_lock:
            if key not in cls._instances:
                cls._instances[key] = cls(key[0] / FILE_NAME, collection)
            return cls._instances[key]

    @classmethod
    def drop(cls, home: Path, collection: str) -> None:
        """Forget a deleted collection: a new one of that name must not learn from its prompts.

        Running prompts add nothing to the dropped registry either.
        """
        with cls._open_lock:
            dropped = cls._instances.pop((home.resolve(), collection), None)
        if dropped is not None:
            with dropped._lock:
                dropped._is_dropped = True

    def add(self, passages: Sequence[Passage]) -> int:
        """Register passages in one transaction; returns how many were new. A node id with a new text loses its old one.

        A text of fewer than 16 characters is not registered: it would be found everywhere. A passage without a node id
        gets one from its text, see `node_id_of`.
        """
        latest = {node_id_of(passage): passage.text for passage in passages}
        with self._lock:
            if self._is_dropped:
                return 0
            return self._run(lambda nodes: nodes.register(self.collection, _hashes_of(latest)))

    def learn(self, texts: Iterable[str], limit: int = MAX_LEARNED) -> list[str]:
        """Register texts that recurred in a prompt; returns the least recently used node ids above the limit, which the
        caller must delete with their KV.
        """
        passages = [Passage(text, learned_node_id(text)) for text in texts]
        self.add(passages)
        with self._lock:
            self._mark_used(passage.node_id for passage in passages)
            learned = list(self._learned or ())
            over_limit = learned[: max(0, len(learned) - limit)]
            self._learned = dict.fromkeys(learned[len(over_limit) :])
        return over_limit

    def _mark_used(self, node_ids: Iterable[str | None]) -> None:
        if self._learned is None:
            self._learned = dict.fromkeys(self.node_ids_with_prefix(LEARNED_PREFIX))
        for node_id in node_ids:
            if node_id is not None and node_id.startswith(LEARNED_PREFIX):
                self._learned.pop(node_id, None)
                self._learned[node_id] = None

    def remove(self, node_ids: Iterable[str]) -> int:
        """Remove passages completely from the file; returns how many there were."""
        removed = list(node_ids)
        return self._run(lambda nodes: nodes.unregister(self.collection, removed))

    def node_ids_with_prefix(self, prefix: str) -> list[str]:
        """The node ids that begin with `prefix`."""
        return self._run(lambda nodes: nodes.node_ids_with_prefix(self.collection, prefix))

    def find(self, text: str) -> list[PassageSpan]:
        """The registered texts in `text`: disjoint, ascending, chosen longest first, of equally long ones the earliest.

        Of several node ids with one text the smallest is taken. A damaged file is logged, and nothing is found: a
        question must not fail because of it.
        """
        if len(text) < MIN_TEXT_CHARS:
            return []
        try:
            return self._run(lambda nodes: self._find(nodes, text))
        except StoreError as error:
            log.warning("no passages are looked for in this prompt: %s", error)
            return []

    def __len__(self) -> int:
        return self._run(lambda nodes: nodes.count_registered(self.collection))

    def close(self) -> None:
        """Close the file for all users of this object; the next use opens it again."""
        with self._lock:
            self._file = None
            self._clear_index()

    def _run(self, work: Callable[[NodeIndex], T]) -> T:
        """Run `work` on the open file, and again if the file was damaged and has been rebuilt."""
        with self._lock:
            if self._file is None:
                self._file = _SharedNodeIndex.open(self.path)
            nodes = self._file.nodes
            try:
                return work(nodes)
            except DamagedFileError:
                return work(nodes)

    def _find(self, nodes: NodeIndex, text: str) -> list[PassageSpan]:
        self._refresh(nodes)

        def confirm(whole: int, start: int, stop: int) -> str | None:
            claims = nodes.registered_with_hash(self.collection, whole)
            confirmed = (node_id for node_id, proof in claims if _proof(node_id, text[start:stop]) == proof)
            return next(confirmed, None)

        found = [PassageSpan(*span) for span in self._index.find(text, confirm)]
        self._mark_used(span.node_id for span in found)
        return found

    def _clear_index(self) -> None:
        self._index, self._last_id, self._indexed_count = TextIndex(), 0, 0
        self._version = -1, -1, 0

    def _refresh(self, nodes: NodeIndex) -> None:
        """Index passages that any process has added since. Removed ones are detected when they are found."""
        version = nodes.data_version()
        if version == self._version:
            return
        is_stale = (
            self._indexed_count > _MAX_STALE
            and self._indexed_count > 2 * nodes.count_registered(self.collection) + _MAX_STALE
        )
        if is_stale or version[0] != self._version[0]:
            self._clear_index()
        added = nodes.registered_since(self.collection, self._last_id)
        self._index.add([TextHashes(*row[1:]) for row in added])
        self._indexed_count += len(added)
        self._last_id = added[-1][0] if added else self._last_id
        self._version = version


def _hashes_of(texts: dict[str, str]) -> dict[str, PassageHashes | None]:
    """The hashes to store for each node id; None for a text too short to be looked for."""
    long = {node_id: text for node_id, text in texts.items() if len(text) >= MIN_TEXT_CHARS}
    found = dict(zip(long, hash_texts(long.values()), strict=True))
    return {
        node_id: PassageHashes(*found[node_id], _proof(node_id, text)) if node_id in found else None
        for node_id, text in texts.items()
    }


def _proof(node_id: str, text: str) -> bytes:
    """SHA-256 over node id and text, which distinguishes a found text from another one with the same key."""
    name = utf8(node_id)
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + utf8(text)).digest()


def utf8(text: str) -> bytes:
    """The text in UTF-8. File names, and so node ids, and a damaged document's text may hold lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def learned_node_id(text: str) -> str:
    """The node id of a text that was learned from prompts."""
    return f"{LEARNED_PREFIX}{hashlib.sha256(utf8(text)).hexdigest()[:32]}"


def node_id_of(passage: Passage) -> str:
    """The passage's node id, or one made from its text, by which it can be removed."""
    if passage.node_id is not None:
        return passage.node_id
    return f"text-{hashlib.sha256(utf8(passage.text)).hexdigest()[:32]}"
