"""PassageRegistry: which texts are known as chunks, so that they are found again in a prompt that a framework built.

The file (`passage_file.py`) holds hashes and node ids (`passage_rows.py`), never text; with a wordlist short pieces
could still be guessed from hashes, so it is as private as the documents (0600), and what is deleted is overwritten.
"""

import hashlib
import logging
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ragblend.integrations.finding import MINIMUM, TextIndex
from ragblend.integrations.passage_file import PassageFile
from ragblend.integrations.passage_rows import SCHEMA, VERSION, Claim, PassageRows, blob
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.sqlite import transaction

log = logging.getLogger(__name__)
FILE_NAME = "passages.sqlite"
_STALE = 1000  # removed texts that may stay in memory, besides as many as there are texts


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
        self._rows = PassageRows(collection)
        self._file = PassageFile(path, SCHEMA, VERSION, self._forget_index)
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
        return self._file.run(lambda sql: self._add(sql, latest))

    def remove(self, node_ids: Iterable[str]) -> int:
        """Remove passages, leaving nothing of them in the file; how many there were."""
        nodes = list(node_ids)
        return self._file.run(lambda sql: self._remove(sql, nodes))

    def find(self, text: str) -> list[Found]:
        """The registered texts in `text`: disjoint, ascending, chosen longest first, of equally long ones the earliest.

        Of several node ids with one text it is the smallest. Never raises for what is wrong with the file: a question
        can do without.
        """
        if len(text) < MINIMUM:
            return []
        try:
            return self._file.run(lambda sql: self._find(sql, text))
        except StoreError as error:
            log.warning("no passages are looked for in this prompt: %s", error)
            return []

    def __len__(self) -> int:
        return self._file.run(self._rows.count)

    def close(self) -> None:
        """Close the file, for everybody who has this object; who uses it again opens it again."""
        self._file.close()

    def _add(self, sql: sqlite3.Connection, texts: dict[str, str]) -> int:
        with transaction(sql):
            changes = self._rows.put(sql, texts)
        if changes.replaced:
            self._file.truncate_log(sql)
        self._changed = True
        return changes.new

    def _remove(self, sql: sqlite3.Connection, nodes: Sequence[str]) -> int:
        with transaction(sql):
            removed = self._rows.delete(sql, nodes)
        self._file.truncate_log(sql)
        self._changed = True
        return removed

    def _find(self, sql: sqlite3.Connection, text: str) -> list[Found]:
        self._refresh(sql)
        claims: dict[int, list[Claim]] = {}

        def confirm(whole: int, start: int, stop: int) -> str | None:
            if whole not in claims:
                claims[whole] = self._rows.claims(sql, whole)
            if not claims[whole]:
                self._index.discard(whole)  # removed, here or by another process
            said = (claim.node_id for claim in claims[whole] if claim.holds(text[start:stop]))
            return next(said, None)

        return [Found(*found) for found in self._index.find(text, confirm)]

    def _forget_index(self) -> None:
        self._index, self._last_id, self._held = TextIndex(), 0, 0
        self._seen_version, self._changed = -1, True

    def _refresh(self, sql: sqlite3.Connection) -> None:
        """Read what was added since, by whomever. What was removed is noticed when it is found."""
        version = int(sql.execute("PRAGMA data_version").fetchone()[0])  # counts the commits of others
        if version == self._seen_version and not self._changed:
            return
        if self._held > _STALE and self._held > 2 * self._rows.count(sql) + _STALE:
            self._forget_index()
        added = list(self._rows.added_since(sql, self._last_id))
        hashes = [keys for _, keys in added if keys is not None]
        self._index.add(hashes)
        self._held += len(hashes)
        self._last_id = added[-1][0] if added else self._last_id
        self._seen_version, self._changed = version, False


def node_id_of(passage: Passage) -> str:
    """The passage's node id; without one a name made from its text, by which it can be removed."""
    if passage.node_id is not None:
        return passage.node_id
    return f"text-{hashlib.sha256(blob(passage.text)).hexdigest()[:32]}"
