"""The registry of documents in SQLite: documents, passages with text and embeddings, the index of words. Never lost.

Everything else (Chroma's index, all KV) can be rebuilt from this file.
"""

import logging
import math
import os
import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragblend.app.database import WORD, Database, now, words_of
from ragblend.app.home import absolute
from ragblend.app.library.documents import (
    Document,
    DocumentPassage,
    DocumentState,
    FileFacts,
    composed,
    document_id,
    on_one_line,
    printable,
)
from ragblend.app.rescue import Gap
from ragblend.kvstore.errors import LibraryError

Embeddings = NDArray[np.float32]
PASSAGE_COUNT = "(SELECT count(*) FROM chunks WHERE document_id = documents.id) AS passages"
COLUMNS = f"documents.*, {PASSAGE_COUNT} FROM documents"
LOST = "Passages of it were lost to damage on the disk. Run `ragblend store repair`, or ingest it again."
log = logging.getLogger("ragblend")
# `stale`: node ids whose vectors and KV are still to be deleted: written in the transaction that replaces the chunks,
# and emptied once Chroma and the KV store have deleted them, so that a crash in between leaks nothing.
# `unerased`: collections with deleted text whose bytes are still to be erased in other files.
# `documents.notes`: what was guessed, replaced or left out of the text, a line each.
# `digest_notes`: a model's notes on a document for its summary, by the prompt that they answer.
# `words`: the full-text index (FTS5) of passages, without a copy of the text, which it reads from a view; `numbers` has
# row numbers that survive a VACUUM. A passage is deleted before its document, because the view needs both.
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
    "CREATE TABLE unerased (collection TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE digest_notes (document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, "
    "origin TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (document_id, origin))",
    "CREATE TABLE numbers (id INTEGER PRIMARY KEY, node_id TEXT NOT NULL UNIQUE)",
    "CREATE VIEW wordings AS SELECT numbers.id, node_id, worded(collection, CAST(text AS BLOB)) AS text FROM numbers "
    "JOIN chunks USING (node_id) JOIN documents ON documents.id = document_id",
    "CREATE VIRTUAL TABLE words USING fts5 (text, content = 'wordings', content_rowid = 'id', "
    "tokenize = 'porter unicode61 remove_diacritics 2')",
    "CREATE TRIGGER chunks_worded AFTER INSERT ON chunks BEGIN INSERT INTO numbers (node_id) VALUES (new.node_id); "
    "INSERT INTO words (rowid, text) SELECT id, text FROM wordings WHERE node_id = new.node_id; END",
    "CREATE TRIGGER chunks_unworded BEFORE DELETE ON chunks BEGIN INSERT INTO words (words, rowid, text) "
    "SELECT 'delete', id, text FROM wordings WHERE node_id = old.node_id; "
    "DELETE FROM numbers WHERE node_id = old.node_id; END",
    "CREATE TRIGGER documents_unworded BEFORE DELETE ON documents BEGIN "
    "DELETE FROM chunks WHERE document_id = old.id; END",
)
MOST_WORDS = 100  # of a question that are searched
# A number or code with its parts: INV-2024-0817, 48213, 4711. A year, a round number, or a number with its unit is not
# one: passages contain them by chance.
CODE = re.compile(r"[^\W_]+(?:[-_./\u2010-\u2015][^\W_]+)*")
COMMON = re.compile(r"\d[\d.]*000|(?:1[5-9]|20)\d\d|\d+[^\W\d_]+|\d\d?[./]\d\d?")


@dataclass(frozen=True)
class DocumentPage:
    """One page of documents; total: how many the search found; counts: of the whole collection, by state."""

    documents: tuple[Document, ...]
    total: int
    counts: dict[str, int]


class Library(Database):
    """All reads and writes of the registry; every change is one transaction. Thread-safe."""

    what, version, tables = "registry", 6, TABLES
    copied = ("documents", "chunks", "stale", "collections", "unerased", "digest_notes")
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
        for document in dict.fromkeys(found):
            log.warning("the document %s: %s", document, LOST)
            sql.execute(query, (LOST, document))

    # --- documents -------------------------------------------------------------------------------

    def documents(self, collection: str) -> list[Document]:
        rows = self.rows(f"SELECT {COLUMNS} WHERE collection = ? ORDER BY path", collection)
        return [_document(row) for row in rows]

    def document(self, collection: str, path: str) -> Document | None:
        return next(iter(self.documents_with([document_id(collection, path)]).values()), None)

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
    ) -> DocumentPage:
        """One page of the documents whose path has all words of the search, ignoring case; of one state, or of all."""
        where, values = "collection = ?", list[Any]([collection])
        if state is not None:
            where += " AND state = ?"
            values.append(state)
        for word in search.casefold().split():
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
        originals = f"{self.path.parent / 'originals'}/"
        listed = (found[key] for key in shown if key in found)
        documents = (replace(one, uploaded=one.path.startswith(originals)) for one in listed)
        return DocumentPage(tuple(documents), total, counts)

    def documents_with(self, ids: Sequence[str]) -> dict[str, Document]:
        """The documents with these ids; unknown ids are left out."""
        return {row["id"]: _document(row) for row in self.among(f"SELECT {COLUMNS} WHERE id IN", ids)}

    def paths_below(self, collection: str, folder: str) -> list[str]:
        """The paths of all documents in a folder, however deep."""
        query = "SELECT path FROM documents WHERE collection = ? AND path > ? AND path < ? ORDER BY path"
        start = folder.rstrip("/")
        return self.column(query, collection, f"{start}/", f"{start}0")  # "0" follows "/"

    def find(self, collection: str, reference: str, folder: Path | str = "") -> Document:
        """The one document with this id (or its beginning), path or file name. Raises LibraryError.

        folder: the base of a relative path; "": the current folder.
        """
        known = self.documents(collection)
        path = printable(absolute(Path(folder, os.path.expanduser(reference))))
        exact = [d for d in known if d.id in (reference, document_id(collection, path))]
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
        """Mark a document as pending, and keep what is known of it. Returns its id."""
        key = document_id(collection, path)
        query = (
            "INSERT INTO documents (id, path, collection, state, updated_at) VALUES (?, ?, ?, 'pending', ?) "
            "ON CONFLICT (id) DO UPDATE SET path = excluded.path, state = 'pending', reason = '', "
            "updated_at = excluded.updated_at"
        )
        self.execute(query, key, path, collection, now())
        return key

    def set_path(self, document: str, path: str) -> None:
        """Store a path whose name is now written in another Unicode form."""
        self.execute("UPDATE documents SET path = ? WHERE id = ?", path, document)

    def finish(self, document: str) -> None:
        """Mark a document as done, with nothing stale."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM stale WHERE document_id = ?", (document,))
            query = "UPDATE documents SET state = 'done', reason = '', updated_at = ? WHERE id = ?"
            connection.execute(query, (now(), document))

    def fail(self, document: str, reason: str) -> None:
        """Mark a document as failed, with the reason. The passages of an earlier version stay."""
        query = "UPDATE documents SET state = 'failed', reason = ?, updated_at = ? WHERE id = ?"
        self.execute(query, reason, now(), document)

    def set_facts(self, document: str, facts: FileFacts) -> None:
        """Store a file's new time, when only that has changed."""
        with self.transaction() as connection:
            _update_facts(connection, document, facts)

    def remove(self, document: str) -> None:
        """Delete a document's row, passages and embeddings, and their bytes in the file; its collection is `unerased`.

        The bytes of its words in the index are deleted by the next `erase`.
        """
        with self.transaction() as connection:
            _note_unerased(connection, document)
            connection.execute("DELETE FROM documents WHERE id = ?", (document,))
        self.erase_log()

    # --- collections -----------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """All collections by name: those with documents, and empty ones that were created."""
        query = "SELECT collection AS name FROM documents UNION SELECT name FROM collections ORDER BY name"
        return self.column(query)

    def keep_collection(self, name: str) -> None:
        """Keep a collection even while it is empty."""
        self.execute("INSERT OR IGNORE INTO collections VALUES (?)", name)

    def forget_collection(self, name: str) -> None:
        """Stop keeping a collection while it is empty."""
        self.execute("DELETE FROM collections WHERE name = ?", name)

    # --- passages --------------------------------------------------------------------------------

    def replace_passages(
        self,
        document: str,
        facts: FileFacts,
        recipe: str,
        passages: Sequence[DocumentPassage],
        embeddings: Sequence[Embeddings],
        notes: Sequence[str] = (),
    ) -> None:
        """Replace the document's passages and notes; the earlier ones become stale. embeddings: (W, E) each."""
        assert len(passages) == len(embeddings)
        kept = {passage.node_id for passage in passages}
        earlier = set(self.node_ids(document))
        with self.transaction() as connection:
            connection.execute("DELETE FROM chunks WHERE document_id = ?", (document,))
            for p, rows in zip(passages, embeddings, strict=True):
                blob = np.ascontiguousarray(rows, dtype="<f4").tobytes()
                values = (p.node_id, document, p.index, p.text, p.location, len(rows), blob)
                connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            gone = [(node, document) for node in earlier - kept]
            connection.executemany("INSERT OR IGNORE INTO stale VALUES (?, ?)", gone)
            connection.executemany("DELETE FROM stale WHERE node_id = ?", ((node,) for node in kept))
            if gone:
                connection.execute("DELETE FROM digest_notes WHERE document_id = ?", (document,))
                _note_unerased(connection, document)
            _update_facts(connection, document, facts)
            query = "UPDATE documents SET recipe = ?, notes = ? WHERE id = ?"
            connection.execute(query, (recipe, "\n".join(notes), document))

    def passages_of(self, document: str) -> list[DocumentPassage]:
        """A document's passages in reading order."""
        return [_passage(row) for row in self._passage_rows(document)]

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

    def by_words(self, collections: Sequence[str], question: str, count: int) -> dict[str, bool]:
        """Passages of these collections that share words with a question: node id -> whether it has one of the codes.

        Those with a code (`codes_of`) come first, then the best by BM25. Words that half of the passages have are
        ignored. Other collections do not influence the score, so that it reveals nothing about them. An index that
        cannot be read is treated as empty, with a warning.
        """
        try:
            scores = self._by_words(collections, question)
            with_code = self._with_code(collections, question, count)
            best = nlargest(
                count,
                dict.fromkeys((*scores, *with_code)),
                key=lambda each: (each in with_code, scores[each]),
            )
            rows = self.among("SELECT id, node_id FROM numbers WHERE id IN", best)
        except LibraryError as error:
            log.warning("searching without words: %s", error)
            return {}
        nodes = {row["id"]: row["node_id"] for row in rows}
        return {nodes[number]: number in with_code for number in best if number in nodes}

    def _by_words(self, collections: Sequence[str], question: str) -> Counter[int]:
        scores = Counter[int]()
        asked = sum(map(self.count_passages, collections))
        everywhere = self.column("SELECT count(*) FROM numbers")[0]
        ways = zip(*(words_of(each, question.lower()) for each in collections), strict=True)
        for words in list(dict.fromkeys(ways))[:MOST_WORDS]:  # a word, as it is indexed in each collection
            having = [
                self.column("SELECT count(*) FROM words WHERE words MATCH ?", f'"{w}"')[0] for w in words
            ]
            for word, here in zip(words, having, strict=True):
                if here and 2 * sum(having) < asked:
                    # FTS5 computes the rarity over all collections.
                    weight = -_rarity(sum(having), asked) / _rarity(here, everywhere)
                    query = "SELECT rowid, bm25(words) FROM words WHERE words MATCH ?"
                    for number, score in self.rows(query, f'"{word}"'):
                        scores[number] += weight * score
        return scores

    def _with_code(self, collections: Sequence[str], question: str, count: int) -> set[int]:
        """Passages with a code of the question, its parts in order; at most `count` for each code."""
        query = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
        return {
            number
            for collection in collections
            for code in codes_of(question)[:MOST_WORDS]
            for number in self.column(query, f'"{" ".join(words_of(collection, code))}"', count)
        }

    def known(self, node_ids: Sequence[str]) -> set[str]:
        """Which of these node ids are in the registry."""
        return {row[0] for row in self.among("SELECT node_id FROM chunks WHERE node_id IN", node_ids)}

    def node_ids(self, document: str) -> list[str]:
        """The ids of a document's passages, in reading order."""
        query = "SELECT node_id FROM chunks WHERE document_id = ? ORDER BY position"
        return self.column(query, document)

    def stale(self, document: str) -> list[str]:
        """Node ids of earlier versions whose vectors and KV are still to be deleted."""
        return self.column("SELECT node_id FROM stale WHERE document_id = ?", document)

    def embeddings_of(self, document: str) -> tuple[list[str], list[Embeddings]]:
        """A document's node ids and embeddings, (W, E) each, in reading order."""
        rows = self._passage_rows(document)
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

    def note(self, document: str, origin: str) -> str | None:
        """The stored note on a document for that prompt, or None."""
        query = "SELECT text FROM digest_notes WHERE document_id = ? AND origin = ?"
        return next(iter(self.column(query, document, origin)), None)

    def keep_note(self, document: Document, origin: str, text: str) -> None:
        """Store a note until the document changes; nothing is stored if it has changed already."""
        with self.transaction() as connection:
            connection.execute(
                "DELETE FROM digest_notes WHERE document_id = ? AND origin = ?", (document.id, origin)
            )
            query = "INSERT INTO digest_notes SELECT id, ?, ? FROM documents WHERE id = ? AND sha256 = ?"
            connection.execute(query, (origin, text, document.id, document.facts.sha256))

    # --- damage and erasing ----------------------------------------------------------------------

    def incomplete_documents(self) -> list[Document]:
        """Documents that lost passages to damage, and were not ingested again since."""
        rows = self.rows(f"SELECT {COLUMNS} WHERE state = 'failed' AND reason = ? ORDER BY path", LOST)
        return [_document(row) for row in rows]

    def unerased(self) -> list[str]:
        """Collections with deleted text that other files may still have."""
        return self.column("SELECT collection FROM unerased")

    def erased(self, collection: str) -> None:
        """Note that no other file has deleted text of this collection."""
        self.execute("DELETE FROM unerased WHERE collection = ?", collection)

    def index_words(self) -> None:
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

    def _passage_rows(self, document: str) -> list[sqlite3.Row]:
        return self.rows("SELECT * FROM chunks WHERE document_id = ? ORDER BY position", document)


def codes_of(question: str) -> list[str]:
    """Numbers and codes in a question that identify something, such as an invoice: at least four letters or digits.

    If the question is only the code, three are enough, and a year counts too.
    """
    found = [text for text in CODE.findall(unicodedata.normalize("NFKC", question)) if re.search(r"\d", text)]
    if found and len(WORD.findall(question)) == len(WORD.findall(found[0])):
        return [text for text in found if len(text) >= 3]
    return list(
        dict.fromkeys(
            text for text in found if len("".join(WORD.findall(text))) >= 4 and not COMMON.fullmatch(text)
        )
    )


def _rarity(having: int, passages: int) -> float:
    """BM25's weight of a word (Robertson and Spärck Jones), as FTS5 computes it. having: passages with the word."""
    return math.log((passages - having + 0.5) / (having + 0.5))


def _note_unerased(connection: sqlite3.Connection, document: str) -> None:
    query = "INSERT OR IGNORE INTO unerased SELECT collection FROM documents WHERE id = ?"
    connection.execute(query, (document,))


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


def _embedding(row: sqlite3.Row) -> Embeddings:
    return np.frombuffer(row["embedding"], dtype="<f4").astype(np.float32).reshape(row["windows"], -1)
