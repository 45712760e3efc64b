"""The registry in SQLite: documents, passages with text and embeddings, the index of words.

Everything else (Chroma's index, all KV) can be rebuilt from this file, and this file only by ingesting again.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragblend.app.database import Database, folded, now
from ragblend.app.home import absolute
from ragblend.app.library.documents import (
    Document,
    DocumentPassage,
    DocumentState,
    FileFacts,
    composed,
    id_of_document,
    on_one_line,
    printable,
)
from ragblend.app.rescue import Gap
from ragblend.kvstore.errors import LibraryError
from ragblend.kvstore.nodes import HIDDEN, IS_HIDDEN

Embeddings = NDArray[np.float32]  # (W, E): a vector for each of a text's W windows, which fit the embedder
PASSAGE_COUNT = "(SELECT count(*) FROM chunks WHERE document_id = documents.id) AS passages"
SELECT_DOCUMENTS = f"SELECT documents.*, {PASSAGE_COUNT} FROM documents"
IN_COLLECTION = (
    "node_id IN (SELECT node_id FROM chunks JOIN documents ON documents.id = document_id "
    "WHERE collection = ?)"
)
SKETCHED = ", sketched"  # ends a document's recipe while only some windows of each passage are embedded
LOST = "Passages of it were lost to damage on the disk. Run `ragblend store repair`, or ingest it again."
log = logging.getLogger("ragblend")
# `stale`: node ids whose vectors and KV are still to be deleted: written in the transaction that replaces the chunks,
# and emptied once Chroma and the KV store have deleted them, so that a crash in between leaks nothing.
# `unerased`: collections with deleted text whose bytes are still to be erased in other files.
# `documents.notes`: what was guessed, replaced or left out of the text, a line each.
# `embedders`: each collection's current and next embedder (`CollectionEmbedder`). `next_embeddings`: vectors by the
# next one, until every passage has some.
# `digest_notes`: a model's notes on a document for its summary, by the prompt that they answer.
# `words`: the full-text index (FTS5) of passages. It has no copy of the text, but reads it from the view `wordings`.
# `numbers`: the passages' row numbers in that index, which survive a VACUUM. A passage is deleted before its document,
# because the view needs both.
TABLES = (
    "CREATE TABLE documents (id TEXT PRIMARY KEY, path TEXT NOT NULL, collection TEXT NOT NULL, "
    "state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'failed')), reason TEXT NOT NULL DEFAULT '', "
    "size INTEGER NOT NULL DEFAULT -1, mtime_ns INTEGER NOT NULL DEFAULT -1, sha256 TEXT NOT NULL DEFAULT '', "
    "recipe TEXT NOT NULL DEFAULT '', notes TEXT NOT NULL DEFAULT '', updated_at TEXT NOT NULL DEFAULT '', "
    "UNIQUE (collection, path))",
    "CREATE INDEX documents_by_state ON documents (collection, state, path, id)",
    "CREATE TABLE chunks (node_id TEXT PRIMARY KEY, "
    "document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, position INTEGER NOT NULL, "
    "text TEXT NOT NULL, location TEXT NOT NULL, windows INTEGER NOT NULL, embedding BLOB NOT NULL, "
    "UNIQUE (document_id, position))",
    "CREATE TABLE stale (node_id TEXT NOT NULL, "
    "document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, PRIMARY KEY (node_id, document_id))",
    "CREATE TABLE collections (name TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE embedders (collection TEXT PRIMARY KEY, name TEXT NOT NULL, next TEXT, old TEXT, "
    "typical REAL, best REAL, measured INTEGER NOT NULL DEFAULT 0, told INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID",
    "CREATE TABLE next_embeddings (node_id TEXT PRIMARY KEY REFERENCES chunks (node_id) ON DELETE CASCADE, "
    "windows INTEGER NOT NULL, embedding BLOB NOT NULL)",
    "CREATE TABLE unerased (collection TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE digest_notes (document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, "
    "origin TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (document_id, origin))",
    "CREATE TABLE numbers (id INTEGER PRIMARY KEY, node_id TEXT NOT NULL UNIQUE)",
    "CREATE VIEW wordings AS SELECT numbers.id, node_id, worded(collection, CAST(text AS BLOB)) AS text FROM numbers "
    "JOIN chunks USING (node_id) JOIN documents ON documents.id = document_id",
    "CREATE VIRTUAL TABLE words USING fts5 (text, content = 'wordings', content_rowid = 'id', "
    "tokenize = \"porter unicode61 remove_diacritics 2 categories 'L* N* Co M*'\")",
    "CREATE TRIGGER chunks_worded AFTER INSERT ON chunks BEGIN INSERT INTO numbers (node_id) VALUES (new.node_id); "
    "INSERT INTO words (rowid, text) SELECT id, text FROM wordings WHERE node_id = new.node_id; END",
    "CREATE TRIGGER chunks_unworded BEFORE DELETE ON chunks BEGIN INSERT INTO words (words, rowid, text) "
    "SELECT 'delete', id, text FROM wordings WHERE node_id = old.node_id; "
    "DELETE FROM numbers WHERE node_id = old.node_id; END",
    "CREATE TRIGGER documents_unworded BEFORE DELETE ON documents BEGIN "
    "DELETE FROM chunks WHERE document_id = old.id; END",
)


@dataclass(frozen=True)
class DocumentListPage:
    """A page of the list of documents; total: how many the search found; counts: of the whole collection, by state."""

    documents: tuple[Document, ...]
    total: int
    counts: dict[str, int]


@dataclass(frozen=True)
class UnrelatedSimilarity:
    """The cosine similarity of a question to passages about other things: to a typical one, and to the most similar."""

    typical: float
    best: float


@dataclass(frozen=True)
class CollectionEmbedder:
    """The embedder of a collection's vectors, named as in the settings. next: the one that is to replace it, if any.

    old: an earlier one, whose index is still to be deleted; typical, best: `UnrelatedSimilarity`, as measured when the
    collection had `measured` passages; told: whether the user was told that it does not know the documents' language.
    """

    name: str
    next: str | None
    old: str | None
    typical: float | None
    best: float | None
    measured: int
    told: bool

    @property
    def unrelated(self) -> UnrelatedSimilarity | None:
        """None if it was not measured."""
        if self.typical is None or self.best is None:
            return None
        return UnrelatedSimilarity(self.typical, self.best)


class Library(Database):
    """All reads and writes of the registry; every change is one transaction. Thread-safe."""

    what, version, tables = "registry", 6, TABLES
    copied = ("documents", "chunks", "stale", "collections", "embedders", "unerased", "digest_notes")
    full_text = "words"

    @staticmethod
    def mark_lost(sql: sqlite3.Connection, gaps: dict[str, list[Gap]]) -> None:
        """Mark documents that have lost passages: `docs list` shows them, and the next ingest reads them again."""
        queries = [
            "SELECT id FROM documents WHERE state = 'done' AND (updated_at = '' OR id NOT IN "
            "(SELECT document_id FROM chunks))",
            "SELECT document_id FROM chunks GROUP BY document_id HAVING count(*) <= max(position)",
        ]
        for first, last in gaps["chunks"]:  # the passages beside a gap: their document may have more in it
            queries += [
                f"SELECT document_id FROM chunks WHERE rowid < {first} ORDER BY rowid DESC LIMIT 1",
                f"SELECT document_id FROM chunks WHERE rowid > {last} ORDER BY rowid LIMIT 1",
            ]
        found = [row[0] for query in queries for row in sql.execute(query).fetchall()]
        query = "UPDATE documents SET state = 'failed', reason = ?, recipe = '' WHERE id = ?"
        for document_id in dict.fromkeys(found):
            log.warning("the document %s: %s", document_id, LOST)
            sql.execute(query, (LOST, document_id))

    # --- documents -------------------------------------------------------------------------------

    def documents(self, collection: str) -> list[Document]:
        rows = self.rows(f"{SELECT_DOCUMENTS} WHERE collection = ? ORDER BY path", collection)
        return [_document(row) for row in rows]

    def document(self, collection: str, path: str) -> Document | None:
        return next(iter(self.documents_with([id_of_document(collection, path)]).values()), None)

    def counts_by_state(self, collection: str) -> dict[str, int]:
        query = "SELECT state, count(*) FROM documents WHERE collection = ? GROUP BY state"
        found = dict(map(tuple, self.rows(query, collection)))
        return {state.value: found.get(state.value, 0) for state in DocumentState}

    def page(
        self,
        collection: str,
        search: str = "",
        state: str | None = None,
        offset: int = 0,
        limit: int = 50,
    ) -> DocumentListPage:
        """One page of the documents whose path has all words of the search, ignoring case; of one state, or of all."""
        where, values = "collection = ?", list[Any]([collection])
        if state is not None:
            where += " AND state = ?"
            values.append(state)
        for word in folded(search).split():
            where += " AND instr(folded(path), ?)"
            values.append(word)
        counts = self.counts_by_state(collection)
        total = sum(counts.values()) if state is None else counts.get(state, 0)
        query = f"SELECT id FROM documents WHERE {where} ORDER BY path"
        if search.strip():  # one scan gives the ids and their number
            ids = self.column(query, *values)
            shown, total = ids[offset : offset + limit], len(ids)
        else:
            shown = self.column(f"{query} LIMIT ? OFFSET ?", *values, limit, offset)
        found = self.documents_with(shown)  # reads rows and counts passages of this page only
        originals = self.path.parent / "originals"
        listed = (found[key] for key in shown if key in found)
        documents = (replace(one, uploaded=one.file.is_relative_to(originals)) for one in listed)
        return DocumentListPage(tuple(documents), total, counts)

    def documents_with(self, ids: Sequence[str]) -> dict[str, Document]:
        """The documents with these ids; unknown ids and hidden documents are left out."""
        rows = self.among(f"{SELECT_DOCUMENTS} WHERE NOT {IS_HIDDEN} AND id IN", ids)
        return {row["id"]: _document(row) for row in rows}

    def paths_below(self, collection: str, folder: str) -> list[str]:
        """The paths of all documents in a folder, however deep."""
        query = "SELECT path FROM documents WHERE collection = ? AND path > ? AND path < ? ORDER BY path"
        start, follower = folder.rstrip(os.sep), chr(ord(os.sep) + 1)
        return self.column(query, collection, f"{start}{os.sep}", f"{start}{follower}")

    def find(self, collection: str, reference: str, folder: Path | str = "") -> Document:
        """The one document with this id (or its beginning), path or file name. Raises LibraryError.

        folder: the base of a relative path; "": the current folder.
        """
        known = self.documents(collection)
        path = printable(absolute(Path(folder, os.path.expanduser(reference))))
        exact = [d for d in known if d.id in (reference, id_of_document(collection, path))]
        name = composed(printable(reference))
        loose = [
            d
            for d in known
            if name in (composed(d.name), on_one_line(d.name), on_one_line(d.path))
            or (len(reference) >= 4 and d.id.startswith(reference))
        ]
        found = exact or loose
        if len(found) == 1:
            return found[0]
        several = f"it could be any of {', '.join(document.path for document in found)}"
        raise LibraryError(
            f"Looking for the document {printable(reference)!r}: {several if found else 'there is none'}. "
            "`ragblend docs list` shows the documents with their ids."
        )

    def begin(self, collection: str, path: str) -> str:
        """Add a document as pending, or mark a known one as pending and keep its passages. Returns its id."""
        key = id_of_document(collection, path)
        query = (
            "INSERT INTO documents (id, path, collection, state, updated_at) VALUES (?, ?, ?, 'pending', ?) "
            "ON CONFLICT (id) DO UPDATE SET path = excluded.path, state = 'pending', reason = '', "
            "updated_at = excluded.updated_at"
        )
        self.execute(query, key, path, collection, now())
        return key

    def set_path(self, document_id: str, path: str) -> None:
        """Store a path whose name is now written in another Unicode form."""
        self.execute("UPDATE documents SET path = ? WHERE id = ?", path, document_id)

    def finish(self, document_id: str) -> None:
        """Mark a document as done, with nothing stale."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM stale WHERE document_id = ?", (document_id,))
            query = "UPDATE documents SET state = 'done', reason = '', updated_at = ? WHERE id = ?"
            connection.execute(query, (now(), document_id))

    def fail(self, document_id: str, reason: str) -> None:
        """Mark a document as failed, with the reason. The passages of an earlier version stay."""
        query = "UPDATE documents SET state = 'failed', reason = ?, updated_at = ? WHERE id = ?"
        self.execute(query, reason, now(), document_id)

    def set_facts(self, document_id: str, facts: FileFacts) -> None:
        """Store a file's facts, where its content has not changed."""
        with self.transaction() as connection:
            _update_facts(connection, document_id, facts)

    def remove(self, document_id: str) -> None:
        """Delete a document's row, passages and embeddings, and their bytes in the file; its collection is `unerased`.

        The bytes of its words in the index are deleted by the next `erase`.
        """
        with self.transaction() as connection:
            _mark_unerased(connection, document_id)
            connection.execute("DELETE FROM documents WHERE id = ?", (document_id,))
        self.erase_log()

    # --- hidden documents: their deletion can be undone --------------------------------------------------

    def set_hidden(self, document_id: str, hidden: bool) -> None:
        """Hide a document as if it were deleted, or show it again; its row, passages and embeddings stay.

        Hidden documents are in a collection that no search and no list names.
        """
        passages = "FROM wordings WHERE node_id IN (SELECT node_id FROM chunks WHERE document_id = ?)"
        name = f"'{HIDDEN}' || collection" if hidden else f"substr(collection, {len(HIDDEN) + 1})"
        with self.transaction() as connection:  # the index of words has the collection's name
            for query in (
                f"INSERT INTO words (words, rowid, text) SELECT 'delete', id, text {passages}",
                f"UPDATE documents SET collection = {name} WHERE id = ?",
                f"INSERT INTO words (rowid, text) SELECT id, text {passages}",
            ):
                connection.execute(query, (document_id,))

    def hidden(self, collection: str | None = None) -> list[Document]:
        """The hidden documents of a collection, or of all, each with its collection's own name."""
        where, values = (IS_HIDDEN, ()) if collection is None else ("collection = ?", (HIDDEN + collection,))
        found = map(_document, self.rows(f"{SELECT_DOCUMENTS} WHERE {where} ORDER BY path", *values))
        return [replace(each, collection=each.collection.removeprefix(HIDDEN)) for each in found]

    def hidden_nodes(self) -> set[str]:
        """The node ids of all hidden documents."""
        query = f"SELECT node_id FROM documents JOIN chunks ON document_id = documents.id WHERE {IS_HIDDEN}"
        return set(self.column(query))

    # --- collections -----------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """All collections by name: those with documents, and empty ones that were created."""
        of_documents = f"SELECT collection AS name FROM documents WHERE NOT {IS_HIDDEN}"
        return self.column(f"{of_documents} UNION SELECT name FROM collections ORDER BY name")

    def add_collection(self, name: str) -> None:
        """Add a collection, which then exists even while it is empty."""
        self.execute("INSERT OR IGNORE INTO collections VALUES (?)", name)

    def forget_collection(self, name: str) -> None:
        """Remove an empty collection and its embedder from the registry."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM collections WHERE name = ?", (name,))
            connection.execute("DELETE FROM embedders WHERE collection = ?", (name,))

    # --- embedders -------------------------------------------------------------------------------

    def embedder(self, collection: str) -> CollectionEmbedder | None:
        """The embedder of a collection's vectors; None before the first one."""
        rows = self.rows("SELECT * FROM embedders WHERE collection = ?", collection)
        return CollectionEmbedder(*rows[0][1:]) if rows else None

    def set_embedder(self, collection: str, name: str) -> None:
        """Set the embedder of a collection: the current one if there are no passages, else the next one.

        Vectors by another next embedder are deleted.
        """
        known = self.embedder(collection)
        is_empty = not self.has_passages(collection) and not self.hidden(collection)
        if known is None or (known.name != name and is_empty):
            self.execute(
                "INSERT OR REPLACE INTO embedders (collection, name) VALUES (?, ?)", collection, name
            )
        elif name != (known.next or known.name):
            wanted = None if name == known.name else name
            with self.transaction() as connection:
                connection.execute(f"DELETE FROM next_embeddings WHERE {IN_COLLECTION}", (collection,))
                query = "UPDATE embedders SET old = coalesce(next, old), next = ? WHERE collection = ?"
                connection.execute(query, (wanted, collection))

    def documents_to_embed(self, collection: str) -> list[Document]:
        """Documents with passages that still need vectors by the next embedder."""
        query = (
            "SELECT DISTINCT document_id FROM chunks JOIN documents ON documents.id = document_id "
            "WHERE collection = ? AND node_id NOT IN (SELECT node_id FROM next_embeddings)"
        )
        found = self.documents_with(self.column(query, collection))
        return sorted(found.values(), key=lambda document: document.path)

    def store_next_embeddings(
        self, embedder: str, node_ids: Sequence[str], embeddings: Sequence[Embeddings]
    ) -> None:
        """Store vectors by the next embedder, (W, E) each; passages that were deleted meanwhile get none."""
        query = (
            "INSERT OR REPLACE INTO next_embeddings SELECT node_id, ?, ? FROM chunks "
            "JOIN documents ON documents.id = document_id JOIN embedders USING (collection) "
            "WHERE node_id = ? AND next = ?"
        )
        with self.transaction() as connection:
            for node, rows in zip(node_ids, embeddings, strict=True):
                connection.execute(query, (len(rows), _blob(rows), node, embedder))

    def next_embeddings(self, node_ids: Sequence[str]) -> tuple[list[str], list[Embeddings]]:
        """(node ids, embeddings) by the next embedder; passages without any are left out."""
        rows = self.among("SELECT * FROM next_embeddings WHERE node_id IN", node_ids)
        return [row["node_id"] for row in rows], [_embedding(row) for row in rows]

    def switch_embedder(self, collection: str, name: str) -> None:
        """Replace all vectors by those of the next embedder, if it still is this one and every passage has some."""
        with self.transaction() as connection:
            known = self.embedder(collection)
            if known is None or known.next != name or self.documents_to_embed(collection):
                return
            for query in (
                "UPDATE chunks SET windows = n.windows, embedding = n.embedding FROM next_embeddings AS n "
                f"WHERE n.node_id = chunks.node_id AND chunks.{IN_COLLECTION}",
                f"DELETE FROM next_embeddings WHERE {IN_COLLECTION}",
                f"UPDATE documents SET recipe = replace(recipe, '{SKETCHED}', '') WHERE collection = ?",
                "UPDATE embedders SET old = name, name = next, next = NULL, typical = NULL, best = NULL, measured = 0, "
                "told = 0 WHERE collection = ?",
            ):
                connection.execute(query, (collection,))

    def forget_old_embedder(self, collection: str) -> None:
        """Record that the old embedder's index is deleted."""
        self.execute("UPDATE embedders SET old = NULL WHERE collection = ?", collection)

    def store_similarity(self, collection: str, unrelated: UnrelatedSimilarity, passages: int) -> None:
        """Store the similarity of unrelated texts, as measured with so many passages."""
        query = "UPDATE embedders SET typical = ?, best = ?, measured = ? WHERE collection = ?"
        self.execute(query, unrelated.typical, unrelated.best, passages, collection)

    def mark_told(self, collection: str) -> bool:
        """Record that the user was told of a language unknown to the embedder. False if that was recorded before."""
        query = "UPDATE embedders SET told = 1 WHERE collection = ? AND told = 0"
        return bool(self.execute(query, collection).rowcount)

    # --- passages --------------------------------------------------------------------------------

    def replace_passages(
        self,
        document_id: str,
        facts: FileFacts,
        recipe: str,
        passages: Sequence[DocumentPassage],
        embeddings: Sequence[Embeddings],
        notes: Sequence[str] = (),
    ) -> None:
        """Replace the document's passages and notes; the earlier ones become stale. embeddings: (W, E) each."""
        assert len(passages) == len(embeddings)
        kept = {passage.node_id for passage in passages}
        earlier = set(self.node_ids(document_id))
        with self.transaction() as connection:
            connection.execute("DELETE FROM chunks WHERE document_id = ?", (document_id,))
            for p, rows in zip(passages, embeddings, strict=True):
                values = (p.node_id, document_id, p.index, p.text, p.location, len(rows), _blob(rows))
                connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            gone = [(node, document_id) for node in earlier - kept]
            connection.executemany("INSERT OR IGNORE INTO stale VALUES (?, ?)", gone)
            connection.executemany("DELETE FROM stale WHERE node_id = ?", ((node,) for node in kept))
            if gone:
                connection.execute("DELETE FROM digest_notes WHERE document_id = ?", (document_id,))
                _mark_unerased(connection, document_id)
            _update_facts(connection, document_id, facts)
            query = "UPDATE documents SET recipe = ?, notes = ? WHERE id = ?"
            connection.execute(query, (recipe, "\n".join(notes), document_id))

    def passages_of(self, document_id: str) -> list[DocumentPassage]:
        """A document's passages in reading order."""
        return [_passage(row) for row in self._passage_rows(document_id)]

    def passages(self, node_ids: Sequence[str]) -> dict[str, DocumentPassage]:
        """The passages with these node ids; unknown ids are left out."""
        rows = self.among("SELECT * FROM chunks WHERE node_id IN", node_ids)
        return {row["node_id"]: _passage(row) for row in rows}

    def scores(self, node_ids: Sequence[str], question: NDArray[np.float32]) -> dict[str, float]:
        """The cosine similarity of these passages to a question (E,): that of their nearest window.

        Embeddings of another size, by another embedder, are left out.
        """
        complete = f"length(embedding) = windows * {4 * len(question)} AND windows > 0"
        rows = self.among(
            f"SELECT node_id, windows, embedding FROM chunks WHERE {complete} AND node_id IN", node_ids
        )
        return {row["node_id"]: float((_embedding(row) @ question).max()) for row in rows}

    def known(self, node_ids: Sequence[str]) -> set[str]:
        """Which of these node ids are in the registry."""
        return {row[0] for row in self.among("SELECT node_id FROM chunks WHERE node_id IN", node_ids)}

    def node_ids(self, document_id: str) -> list[str]:
        """The ids of a document's passages, in reading order."""
        query = "SELECT node_id FROM chunks WHERE document_id = ? ORDER BY position"
        return self.column(query, document_id)

    def stale(self, document_id: str) -> list[str]:
        """Node ids of earlier versions whose vectors and KV are still to be deleted."""
        return self.column("SELECT node_id FROM stale WHERE document_id = ?", document_id)

    def embeddings_of(self, document_id: str) -> tuple[list[str], list[Embeddings]]:
        """A document's node ids and embeddings, (W, E) each, in reading order."""
        rows = self._passage_rows(document_id)
        return [row["node_id"] for row in rows], [_embedding(row) for row in rows]

    def embeddings(self, collection: str) -> Iterator[tuple[list[str], list[Embeddings]]]:
        """All node ids and embeddings of a collection, by document."""
        for document in self.documents(collection):
            if document.passages:
                yield self.embeddings_of(document.id)

    def nearest(self, collection: str, embedding: Embeddings, count: int) -> dict[str, float]:
        """The nodes nearest to an embedding (E,) with their cosine similarity, best first; compares all vectors.

        A node's similarity is that of its nearest vector.
        """
        query = (
            "SELECT node_id, windows, embedding FROM chunks JOIN documents ON id = document_id "
            "WHERE collection = ? AND length(embedding) = windows * ? AND windows > 0"
        )
        rows = self.rows(query, collection, 4 * len(embedding))
        if not rows:
            return {}
        vectors = np.frombuffer(b"".join(row["embedding"] for row in rows), dtype="<f4")
        starts = np.cumsum([0, *(row["windows"] for row in rows[:-1])])
        best = np.maximum.reduceat(vectors.reshape(-1, len(embedding)) @ embedding, starts)
        return {rows[at]["node_id"]: float(best[at]) for at in np.argsort(-best, kind="stable")[:count]}

    def has_passages(self, collection: str) -> bool:
        query = "SELECT 1 FROM chunks JOIN documents ON id = document_id WHERE collection = ? LIMIT 1"
        return bool(self.rows(query, collection))

    def nodes(self, collection: str) -> dict[str, str]:
        """All node ids of a collection with their document's path, in the order of ingest."""
        query = (
            "SELECT node_id, path FROM documents JOIN chunks ON document_id = id WHERE collection = ? "
            "ORDER BY documents.rowid, position"
        )
        return dict(map(tuple, self.rows(query, collection)))

    def count_passages(self, collection: str) -> int:
        query = "SELECT count(*) FROM chunks JOIN documents ON id = document_id WHERE collection = ?"
        return int(self.column(query, collection)[0])

    # --- notes for summaries -----------------------------------------------------------------------------------

    def note(self, document_id: str, origin: str) -> str | None:
        """The stored note on a document for that prompt, or None."""
        query = "SELECT text FROM digest_notes WHERE document_id = ? AND origin = ?"
        return next(iter(self.column(query, document_id, origin)), None)

    def store_note(self, document: Document, origin: str, text: str) -> None:
        """Store a note until the document changes; nothing is stored if it has changed already."""
        with self.transaction() as connection:
            connection.execute(
                "DELETE FROM digest_notes WHERE document_id = ? AND origin = ?", (document.id, origin)
            )
            query = "INSERT INTO digest_notes SELECT id, ?, ? FROM documents WHERE id = ? AND sha256 = ?"
            connection.execute(query, (origin, text, document.id, document.facts.sha256))

    # --- damage and erasing ----------------------------------------------------------------------

    def incomplete_documents(self) -> list[Document]:
        """Documents that lost passages to damage and were not ingested again."""
        where = f"state = 'failed' AND reason = ? AND NOT {IS_HIDDEN}"
        rows = self.rows(f"{SELECT_DOCUMENTS} WHERE {where} ORDER BY path", LOST)
        return [_document(row) for row in rows]

    def unerased(self) -> list[str]:
        """Collections with deleted text that other files may still have."""
        return self.column("SELECT collection FROM unerased")

    def mark_erased(self, collection: str) -> None:
        """Record that no other file has deleted text of this collection any more."""
        self.execute("DELETE FROM unerased WHERE collection = ?", collection)

    def rebuild_words(self) -> None:
        """Rebuild the index of words from the passages."""
        for statement in self._full_text("rebuild"):
            self.execute(statement)

    def words_damage(self) -> str:
        """What is wrong with the index of words, or ""."""
        try:
            self.execute("INSERT INTO words (words, rank) VALUES ('integrity-check', 1)")
        except LibraryError as error:
            return str(error)
        return ""

    def _passage_rows(self, document_id: str) -> list[sqlite3.Row]:
        return self.rows("SELECT * FROM chunks WHERE document_id = ? ORDER BY position", document_id)


def _mark_unerased(connection: sqlite3.Connection, document_id: str) -> None:
    query = f"INSERT OR IGNORE INTO unerased SELECT replace(collection, '{HIDDEN}', '') FROM documents WHERE id = ?"
    connection.execute(query, (document_id,))


def _update_facts(connection: sqlite3.Connection, document_id: str, facts: FileFacts) -> None:
    connection.execute(
        "UPDATE documents SET size = ?, mtime_ns = ?, sha256 = ? WHERE id = ?",
        (facts.size, facts.mtime_ns, facts.sha256, document_id),
    )


def _document(row: sqlite3.Row) -> Document:
    return Document(
        id=row["id"],
        path=row["path"],
        collection=row["collection"],
        state=DocumentState(row["state"]),
        reason=row["reason"],
        facts=FileFacts(row["size"], row["mtime_ns"], row["sha256"]),
        recipe=row["recipe"],
        updated_at=row["updated_at"],
        passages=row["passages"],
        notes=tuple(row["notes"].split("\n")) if row["notes"] else (),
    )


def _passage(row: sqlite3.Row) -> DocumentPassage:
    return DocumentPassage(row["node_id"], row["document_id"], row["position"], row["text"], row["location"])


def _blob(rows: Embeddings) -> bytes:
    return np.ascontiguousarray(rows, dtype="<f4").tobytes()


def _embedding(row: sqlite3.Row) -> Embeddings:
    return np.frombuffer(row["embedding"], dtype="<f4").astype(np.float32).reshape(row["windows"], -1)
