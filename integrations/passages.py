"""PassageRegistry: which texts are known as chunks, so that they are found again in a prompt that a framework built.

The node index (`kvstore/nodes.py`) holds hashes and node ids, never text; with a wordlist short pieces could still be
guessed from hashes, so it is as private as the documents (0600), and what is deleted is overwritten.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar
from weakref import WeakValueDictionary

from ragblend.integrations.finding import MINIMUM, Known, TextIndex, known
from ragblend.integrations.recurring import RecurringText
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.nodes import NodeIndex, Print
from ragblend.kvstore.sqlite import DamagedFileError

log = logging.getLogger(__name__)
FILE_NAME = "nodes.sqlite"
LEARNT = "seen-"  # how the node ids of passages begin that were learnt from prompts
MOST_LEARNT = 10_000
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
    node_id: str | None


class _File:
    """A node index, open while a registry has this object: one for all collections of a home, as a key is one."""

    _open: ClassVar[WeakValueDictionary[Path, "_File"]] = WeakValueDictionary()
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path) -> None:
        self.nodes = NodeIndex.open(path)

    @classmethod
    def of(cls, path: Path) -> "_File":
        with cls._opening:
            if (file := cls._open.get(path)) is None:
                file = cls._open[path] = cls(path)
            return file

    def __del__(self) -> None:
        if hasattr(self, "nodes"):  # it was opened
            self.nodes.close()


class PassageRegistry:
    """The passages of one collection, for threads and processes. The file is opened when it is first needed."""

    _open: ClassVar[dict[tuple[Path, str], "PassageRegistry"]] = {}
    _opening: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, collection: str) -> None:
        self.path, self.collection = path, collection
        self._lock = threading.RLock()
        self._file: _File | None = None
        self.recurring = RecurringText()
        self.awaited = 0  # characters of the shortest passage that was retrieved since a prompt held any
        self._is_dropped = False
        self._learnt: dict[str, None] | None = None  # those in the file, what was found last at the end
        self._forget_index()

    @classmethod
    def open(cls, home: Path, collection: str = "default") -> "PassageRegistry":
        """The registry of a home's collection, one object in a process."""
        key = (home.resolve(), collection)
        with cls._opening:
            if key not in cls._open:
                cls._open[key] = cls(key[0] / FILE_NAME, collection)
            return cls._open[key]

    @classmethod
    def drop(cls, home: Path, collection: str) -> None:
        """The collection is no more: who opens one of that name gets nothing of what its prompts said.

        Also not what prompts that are being read say later: this object takes nothing any more.
        """
        with cls._opening:
            dropped = cls._open.pop((home.resolve(), collection), None)
        if dropped is not None:
            with dropped._lock:
                dropped._is_dropped = True

    def add(self, passages: Sequence[Passage]) -> int:
        """Register passages, all or none; how many were new. A node id that comes with another text loses its old one.

        A text of fewer than 16 characters is not registered: it would be found everywhere. A passage without a node id
        gets one from its text, see `node_id_of`.
        """
        latest = {node_id_of(passage): passage.text for passage in passages}
        with self._lock:
            if self._is_dropped:
                return 0
            return self._run(lambda nodes: nodes.register(self.collection, _prints(latest)))

    def learn(self, texts: Iterable[str], most: int = MOST_LEARNT) -> list[str]:
        """Register texts that came back in a prompt, by their own hashes; returns node ids that are too many now.

        Those are what was found in no prompt for longest; the caller forgets them with their KV.
        """
        passages = [Passage(text, learnt_id(text)) for text in texts]
        self.add(passages)
        with self._lock:
            self._touch(passage.node_id for passage in passages)
            learnt = list(self._learnt or ())
            over = learnt[: max(0, len(learnt) - most)]
            self._learnt = dict.fromkeys(learnt[len(over) :])
        return over

    def _touch(self, node_ids: Iterable[str | None]) -> None:
        """These were found just now."""
        if self._learnt is None:
            self._learnt = dict.fromkeys(self.named(LEARNT))
        for node_id in node_ids:
            if node_id is not None and node_id.startswith(LEARNT):
                self._learnt.pop(node_id, None)
                self._learnt[node_id] = None

    def remove(self, node_ids: Iterable[str]) -> int:
        """Remove passages, leaving nothing of them in the file; how many there were."""
        gone = list(node_ids)
        return self._run(lambda nodes: nodes.unregister(self.collection, gone))

    def named(self, beginning: str) -> list[str]:
        """The node ids that begin with that."""
        return self._run(lambda nodes: nodes.named(self.collection, beginning))

    def find(self, text: str) -> list[Found]:
        """The registered texts in `text`: disjoint, ascending, chosen longest first, of equally long ones the earliest.

        Of several node ids with one text it is the smallest. Never raises for what is wrong with the file: a question
        can do without.
        """
        if len(text) < MINIMUM:
            return []
        try:
            return self._run(lambda nodes: self._find(nodes, text))
        except StoreError as error:
            log.warning("no passages are looked for in this prompt: %s", error)
            return []

    def __len__(self) -> int:
        return self._run(lambda nodes: nodes.registered(self.collection))

    def close(self) -> None:
        """Let the file go, for everybody who has this object; who uses it again opens it again."""
        with self._lock:
            self._file = None
            self._forget_index()

    def _run(self, work: Callable[[NodeIndex], T]) -> T:
        """Once more, with a new file, if that one turns out to be damaged."""
        with self._lock:
            if self._file is None:
                self._file = _File.of(self.path)
            nodes = self._file.nodes
            try:
                return work(nodes)
            except DamagedFileError:
                return work(nodes)

    def _find(self, nodes: NodeIndex, text: str) -> list[Found]:
        self._refresh(nodes)

        def confirm(whole: int, start: int, stop: int) -> str | None:
            claims = nodes.claims(self.collection, whole)
            said = (node_id for node_id, proof in claims if _proof(node_id, text[start:stop]) == proof)
            return next(said, None)

        found = [Found(*place) for place in self._index.find(text, confirm)]
        self._touch(place.node_id for place in found)
        return found

    def _forget_index(self) -> None:
        self._index, self._last_id, self._held = TextIndex(), 0, 0
        self._seen = -1, -1, 0

    def _refresh(self, nodes: NodeIndex) -> None:
        """Read what was added since, by whomever. What was removed is noticed when it is found."""
        seen = nodes.changes()
        if seen == self._seen:
            return
        stale = self._held > _STALE and self._held > 2 * nodes.registered(self.collection) + _STALE
        if stale or seen[0] != self._seen[0]:
            self._forget_index()
        added = nodes.registered_since(self.collection, self._last_id)
        self._index.add([Known(*row[1:]) for row in added])
        self._held += len(added)
        self._last_id = added[-1][0] if added else self._last_id
        self._seen = seen


def _prints(texts: dict[str, str]) -> dict[str, Print | None]:
    """What is kept of each text; a text of fewer than MINIMUM characters is not looked for."""
    long = {node_id: text for node_id, text in texts.items() if len(text) >= MINIMUM}
    found = dict(zip(long, known(long.values()), strict=True))
    return {
        node_id: Print(*found[node_id], _proof(node_id, text)) if node_id in found else None
        for node_id, text in texts.items()
    }


def _proof(node_id: str, text: str) -> bytes:
    """SHA-256 over both: a flipped bit in either, or in the proof, and the row is no row."""
    name = _utf8(node_id)
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + _utf8(text)).digest()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # file names, and so node ids, may hold lone surrogates


def learnt_id(text: str) -> str:
    """The node id of a text that was learnt from prompts."""
    return f"{LEARNT}{hashlib.sha256(_utf8(text)).hexdigest()[:32]}"


def node_id_of(passage: Passage) -> str:
    """The passage's node id; without one a name made from its text, by which it can be removed."""
    if passage.node_id is not None:
        return passage.node_id
    return f"text-{hashlib.sha256(_utf8(passage.text)).hexdigest()[:32]}"
