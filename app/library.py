"""The registry of documents: what was ingested, its text and its embeddings. Never lost, never rebuilt.

Everything else (Chroma's index, all KV) can be made again from this one SQLite file.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragblend.app.database import Database, now
from ragblend.app.documents import Document, FileFacts, Passage, State, document_id
from ragblend.app.library_schema import REGISTRY
from ragblend.kvstore.errors import LibraryError

Embeddings = NDArray[np.float32]
BATCH_ROWS = 500
PASSAGE_COUNT = "(SELECT count(*) FROM chunks WHERE document_id = documents.id) AS passages"
COLUMNS = f"documents.*, {PASSAGE_COUNT} FROM documents"


class Library:
    """All reads and writes of the registry; every change is one transaction. Safe to share between threads."""

    def __init__(self, database: Database) -> None:
        self.path = database.path
        self._database = database

    @classmethod
    def open(cls, path: Path) -> "Library":
        """Open or make the registry at `path`. Raises LibraryError."""
        return cls(Database(path, REGISTRY))

    def close(self) -> None:
        self._database.close()

    # --- documents -------------------------------------------------------------------------------

    def documents(self, collection: str) -> list[Document]:
        rows = self._database.rows(f"SELECT {COLUMNS} WHERE collection = ? ORDER BY path", collection)
        return [_document(row) for row in rows]

    def document(self, collection: str, path: str) -> Document | None:
        rows = self._database.rows(f"SELECT {COLUMNS} WHERE id = ?", document_id(collection, path))
        return _document(rows[0]) if rows else None

    def counts_by_state(self, collection: str) -> dict[str, int]:
        """How many documents are in each state."""
        query = "SELECT state, count(*) AS n FROM documents WHERE collection = ? GROUP BY state"
        found = {row["state"]: row["n"] for row in self._database.rows(query, collection)}
        return {state.value: found.get(state.value, 0) for state in State}

    def ids_where(
        self, where: str, values: Sequence[object], order: str, limit: int = -1, offset: int = 0
    ) -> list[str]:
        """The ids of documents that fulfil the condition (SQL, over the table's columns), in that order; -1: of all."""
        query = f"SELECT id FROM documents WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        return [row["id"] for row in self._database.rows(query, *values, limit, offset)]

    def documents_with(self, ids: Sequence[str]) -> dict[str, Document]:
        """The documents with these ids; ids that nobody knows are left out."""
        found: dict[str, Document] = {}
        for batch in _batches(ids):
            rows = self._database.rows(f"SELECT {COLUMNS} WHERE id IN ({','.join('?' * len(batch))})", *batch)
            found |= {row["id"]: _document(row) for row in rows}
        return found

    def paths_below(self, collection: str, folder: str) -> list[str]:
        """The paths of all documents in a folder, however deep."""
        query = "SELECT path FROM documents WHERE collection = ? AND path > ? AND path < ? ORDER BY path"
        start = folder.rstrip("/") + "/"
        return [
            row["path"] for row in self._database.rows(query, collection, start, start[:-1] + "0")
        ]  # "0" follows "/"

    def find(self, collection: str, reference: str) -> Document:
        """The one document with this id (or its beginning), path or file name. Raises LibraryError."""
        known = self.documents(collection)
        path = str(Path(reference).expanduser().absolute())
        exact = [document for document in known if reference == document.id or path == document.path]
        loose = [
            d for d in known if reference == d.name or (len(reference) >= 4 and d.id.startswith(reference))
        ]
        found = exact or loose
        if len(found) == 1:
            return found[0]
        several = f"it could be any of {', '.join(document.path for document in found)}"
        raise LibraryError(
            f"Looking for the document {reference!r}: {several if found else 'there is none'}. "
            "`ragblend docs list` shows the documents with their ids."
        )

    def begin(self, collection: str, path: str) -> str:
        """Write down that work on a document starts; what was known of it stays. Returns its id."""
        key = document_id(collection, path)
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO documents (id, path, collection, state, updated_at) VALUES (?, ?, ?, 'pending', ?) "
                "ON CONFLICT (id) DO UPDATE SET state = 'pending', reason = '', updated_at = excluded.updated_at",
                (key, path, collection, now()),
            )
        return key

    def finish(self, document: str) -> None:
        """All of a document is in place: nothing is stale and nothing is left to do."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM stale WHERE document_id = ?", (document,))
            connection.execute(
                "UPDATE documents SET state = 'done', reason = '', updated_at = ? WHERE id = ?",
                (now(), document),
            )

    def fail(self, document: str, reason: str) -> None:
        """Keep why a document could not be ingested. What an earlier version of it left here stays."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE documents SET state = 'failed', reason = ?, updated_at = ? WHERE id = ?",
                (reason, now(), document),
            )

    def set_facts(self, document: str, facts: FileFacts) -> None:
        """The file was touched but not changed: remember its new time."""
        with self._database.transaction() as connection:
            _update_facts(connection, document, facts)

    def remove(self, document: str) -> None:
        """Delete a document's row, passages and embeddings, and their bytes in the file."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM documents WHERE id = ?", (document,))
        self._database.erase_log()

    # --- collections -----------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """All that hold documents or were made to hold some, by name."""
        query = "SELECT collection AS name FROM documents UNION SELECT name FROM collections ORDER BY name"
        return [row["name"] for row in self._database.rows(query)]

    def keep_collection(self, name: str) -> None:
        """Remember a collection although nothing is in it."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO collections VALUES (?)", (name,))

    def forget_collection(self, name: str) -> None:
        """Not to be remembered when nothing is in it."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM collections WHERE name = ?", (name,))

    # --- passages --------------------------------------------------------------------------------

    def replace_passages(
        self,
        document: str,
        facts: FileFacts,
        recipe: str,
        passages: Sequence[Passage],
        embeddings: Sequence[Embeddings],
    ) -> None:
        """Put these in place of the document's earlier passages, which become stale. embeddings: (W, E) each."""
        assert len(passages) == len(embeddings)
        kept = {passage.node_id for passage in passages}
        earlier = {passage.node_id for passage in self.passages_of(document)}
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM chunks WHERE document_id = ?", (document,))
            connection.executemany(
                "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (p.node_id, document, p.index, p.text, p.location, len(rows), _to_blob(rows))
                    for p, rows in zip(passages, embeddings, strict=True)
                ),
            )
            connection.executemany(
                "INSERT OR IGNORE INTO stale VALUES (?, ?)", ((node, document) for node in earlier - kept)
            )
            connection.executemany("DELETE FROM stale WHERE node_id = ?", ((node,) for node in kept))
            _update_facts(connection, document, facts)
            connection.execute("UPDATE documents SET recipe = ? WHERE id = ?", (recipe, document))

    def passages_of(self, document: str) -> list[Passage]:
        """A document's passages in reading order."""
        rows = self._database.rows(f"{PASSAGES} WHERE document_id = ? ORDER BY position", document)
        return [_passage(row) for row in rows]

    def passages(self, node_ids: Sequence[str]) -> dict[str, Passage]:
        """The passages that are known of these; ids that nobody knows are left out."""
        found: dict[str, Passage] = {}
        for batch in _batches(node_ids):
            marks = ",".join("?" * len(batch))
            rows = self._database.rows(f"{PASSAGES} WHERE node_id IN ({marks})", *batch)
            found |= {row["node_id"]: _passage(row) for row in rows}
        return found

    def stale(self, document: str) -> list[str]:
        """Node ids of earlier versions, whose vectors and KV are still to be removed."""
        return [
            row["node_id"]
            for row in self._database.rows("SELECT node_id FROM stale WHERE document_id = ?", document)
        ]

    def embeddings_of(self, document: str) -> tuple[list[str], list[Embeddings]]:
        """A document's node ids and embeddings, (W, E) each, in reading order."""
        query = "SELECT node_id, windows, embedding FROM chunks WHERE document_id = ? ORDER BY position"
        rows = self._database.rows(query, document)
        return [row["node_id"] for row in rows], [
            _from_blob(row["embedding"], row["windows"]) for row in rows
        ]

    def embeddings(self, collection: str) -> Iterator[tuple[list[str], list[Embeddings]]]:
        """Every node id and embedding of a collection, a document at a time."""
        for document in self.documents(collection):
            if document.passages:
                yield self.embeddings_of(document.id)

    def has_passages(self, collection: str) -> bool:
        """Whether there is anything to search."""
        query = "SELECT 1 FROM chunks JOIN documents ON id = document_id WHERE collection = ? LIMIT 1"
        return bool(self._database.rows(query, collection))

    def count_passages(self, collection: str) -> int:
        query = "SELECT count(*) AS n FROM chunks JOIN documents ON id = document_id WHERE collection = ?"
        return int(self._database.rows(query, collection)[0]["n"])

    def damage(self) -> list[str]:
        """What SQLite's own check finds wrong with the file; empty when it is sound."""
        return [
            text for row in self._database.rows("PRAGMA integrity_check") if (text := str(row[0])) != "ok"
        ]


PASSAGES = "SELECT node_id, document_id, position, text, location FROM chunks"


def _update_facts(connection: sqlite3.Connection, document: str, facts: FileFacts) -> None:
    connection.execute(
        "UPDATE documents SET size = ?, mtime_ns = ?, sha256 = ? WHERE id = ?",
        (facts.size, facts.mtime_ns, facts.sha256, document),
    )


def _document(row: sqlite3.Row) -> Document:
    return Document(
        id=row["id"],
        path=row["path"],
        collection=row["collection"],
        state=State(row["state"]),
        reason=row["reason"],
        facts=FileFacts(row["size"], row["mtime_ns"], row["sha256"]),
        recipe=row["recipe"],
        updated_at=row["updated_at"],
        passages=row["passages"],
    )


def _passage(row: sqlite3.Row) -> Passage:
    return Passage(row["node_id"], row["document_id"], row["position"], row["text"], row["location"])


def _to_blob(embedding: Embeddings) -> bytes:
    return np.ascontiguousarray(embedding, dtype="<f4").tobytes()


def _from_blob(blob: bytes, windows: int) -> Embeddings:
    return np.frombuffer(blob, dtype="<f4").astype(np.float32).reshape(windows, -1)


def _batches(items: Iterable[str]) -> Iterator[list[str]]:
    everything = list(dict.fromkeys(items))
    for start in range(0, len(everything), BATCH_ROWS):
        yield everything[start : start + BATCH_ROWS]
