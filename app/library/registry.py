"""The registry of documents: what was ingested, its text and its embeddings. Never lost, never rebuilt.

Everything else (Chroma's index, all KV) can be made again from this one SQLite file.
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

from ragblend.app.database import WORD, Database, Layout, now, words_of
from ragblend.app.home import absolute
from ragblend.app.library.documents import Document, DocumentPassage, DocumentState, FileFacts, document_id
from ragblend.app.rescue import Gap
from ragblend.kvstore.errors import LibraryError

Embeddings = NDArray[np.float32]
PASSAGE_COUNT = "(SELECT count(*) FROM chunks WHERE document_id = documents.id) AS passages"
COLUMNS = f"documents.*, {PASSAGE_COUNT} FROM documents"
LOST = "Passages of it were lost to damage on the disk. Run `ragblend store repair`, or ingest it again."
log = logging.getLogger("ragblend")
# `stale` lists node ids whose vectors and KV are still to be removed: written in the transaction that replaces
# the chunks, and emptied once Chroma and the KV store have let go, so that a crash in between leaks nothing.
# `unerased`: collections from which something was taken, whose bytes are still to be erased in other files.
# `notes`: what a model wrote of a document on the way to its summary, by what it was written from.
# `words`: those of passages, in FTS5, which keeps no copy of the text and reads it from a view where it must; rows of
# `chunks` have no number that a VACUUM keeps. A passage goes before its document does: the view needs both.
TABLES = (
    "CREATE TABLE documents (id TEXT PRIMARY KEY, path TEXT NOT NULL, collection TEXT NOT NULL, "
    "state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'failed')), reason TEXT NOT NULL DEFAULT '', "
    "size INTEGER NOT NULL DEFAULT -1, mtime_ns INTEGER NOT NULL DEFAULT -1, sha256 TEXT NOT NULL DEFAULT '', "
    "recipe TEXT NOT NULL DEFAULT '', updated_at TEXT NOT NULL DEFAULT '', UNIQUE (collection, path))",
    "CREATE INDEX documents_by_state ON documents (collection, state, path, id)",
    "CREATE TABLE chunks (node_id TEXT PRIMARY KEY, "
    "document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, position INTEGER NOT NULL, "
    "text TEXT NOT NULL, location TEXT NOT NULL, windows INTEGER NOT NULL, embedding BLOB NOT NULL, "
    "UNIQUE (document_id, position))",
    "CREATE TABLE stale (node_id TEXT NOT NULL, "
    "document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, PRIMARY KEY (node_id, document_id))",
    "CREATE TABLE collections (name TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE unerased (collection TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE notes (document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE, origin TEXT NOT NULL, "
    "text TEXT NOT NULL, PRIMARY KEY (document_id, origin))",
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


def _mark_incomplete(sql: sqlite3.Connection, gaps: dict[str, list[Gap]]) -> None:
    """Documents that have lost passages, so that `docs list` shows them, and the next ingest reads them again."""
    queries = [
        "SELECT id FROM documents WHERE state = 'done' AND (updated_at = '' OR id NOT IN "
        "(SELECT document_id FROM chunks))",
        "SELECT document_id FROM chunks GROUP BY document_id HAVING count(*) <= max(position)",
    ]
    for first, last in gaps[
        "chunks"
    ]:  # a document's passages stand together: those beside a gap may have been in it
        queries += [
            f"SELECT document_id FROM chunks WHERE rowid < {first} ORDER BY rowid DESC LIMIT 1",
            f"SELECT document_id FROM chunks WHERE rowid > {last} ORDER BY rowid LIMIT 1",
        ]
    found = [row[0] for query in queries for row in sql.execute(query).fetchall()]
    query = "UPDATE documents SET state = 'failed', reason = ?, recipe = '' WHERE id = ?"
    for document in dict.fromkeys(found):
        log.warning("the document %s: %s", document, LOST)
        sql.execute(query, (LOST, document))


REGISTRY = Layout(
    "registry",
    version=5,
    tables=TABLES,
    copied=("documents", "chunks", "stale", "collections", "unerased", "notes"),
    mended=_mark_incomplete,
    full_text="words",
)
NOTE = ("document_id", "origin", "text")
PASSAGE = ("node_id", "document_id", "position", "text", "location", "windows", "embedding")
INSERT_PASSAGE = f"INSERT INTO chunks ({', '.join(PASSAGE)}) VALUES (?, ?, ?, ?, ?, ?, ?)"
MOST_WORDS = 100  # of a question that are looked for
# A number or code with its parts: INV-2024-0817, 48213, 4711. One that is no more than a year, a round number or a
# number with its unit stands in passages by chance.
CODE = re.compile(r"[^\W_]+(?:[-_./\u2010-\u2015][^\W_]+)*")
COMMON = re.compile(r"\d[\d.]*000|(?:1[5-9]|20)\d\d|\d+[^\W\d_]+|\d\d?[./]\d\d?")


@dataclass(frozen=True)
class DocumentPage:
    """Some documents; total: how many the search found; counts: of the whole collection, by state."""

    documents: tuple[Document, ...]
    total: int
    counts: dict[str, int]


class Library(Database):
    """All reads and writes of the registry; every change is one transaction. Safe to share between threads."""

    layout = REGISTRY

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
        """Some documents whose path has all words of the search, folded; those of one state, or of all."""
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
        if search.strip():  # looked through once, for the rows and for how many there are
            ids = self.column(query, *values)
            shown, total = ids[offset : offset + limit], len(ids)
        else:
            shown = self.column(f"{query} LIMIT ? OFFSET ?", *values, limit, offset)
        found = self.documents_with(shown)  # only what is shown has its row read, and its passages counted
        originals = f"{self.path.parent / 'originals'}/"  # of them the home has the file
        listed = (found[key] for key in shown if key in found)
        documents = (replace(one, uploaded=one.path.startswith(originals)) for one in listed)
        return DocumentPage(tuple(documents), total, counts)

    def documents_with(self, ids: Sequence[str]) -> dict[str, Document]:
        """The documents with these ids; ids that nobody knows are left out."""
        return {row["id"]: _document(row) for row in self.among(f"SELECT {COLUMNS} WHERE id IN", ids)}

    def paths_below(self, collection: str, folder: str) -> list[str]:
        """The paths of all documents in a folder, however deep."""
        query = "SELECT path FROM documents WHERE collection = ? AND path > ? AND path < ? ORDER BY path"
        start = folder.rstrip("/")
        return self.column(query, collection, f"{start}/", f"{start}0")  # "0" follows "/"

    def find(self, collection: str, reference: str, folder: Path | str = "") -> Document:
        """The one document with this id (or its beginning), path or file name. Raises LibraryError.

        folder: where a relative path begins, if not where this process stands.
        """
        known = self.documents(collection)
        path = str(absolute(Path(folder, os.path.expanduser(reference))))
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
        query = (
            "INSERT INTO documents (id, path, collection, state, updated_at) VALUES (?, ?, ?, 'pending', ?) "
            "ON CONFLICT (id) DO UPDATE SET state = 'pending', reason = '', updated_at = excluded.updated_at"
        )
        self.execute(query, key, path, collection, now())
        return key

    def finish(self, document: str) -> None:
        """All of a document is in place: nothing is stale and nothing is left to do."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM stale WHERE document_id = ?", (document,))
            query = "UPDATE documents SET state = 'done', reason = '', updated_at = ? WHERE id = ?"
            connection.execute(query, (now(), document))

    def fail(self, document: str, reason: str) -> None:
        """Keep why a document could not be ingested. What an earlier version of it left here stays."""
        query = "UPDATE documents SET state = 'failed', reason = ?, updated_at = ? WHERE id = ?"
        self.execute(query, reason, now(), document)

    def set_facts(self, document: str, facts: FileFacts) -> None:
        """The file was touched but not changed: remember its new time."""
        with self.transaction() as connection:
            _update_facts(connection, document, facts)

    def remove(self, document: str) -> None:
        """Delete a document's row, passages and embeddings, and their bytes in the file; noted as `unerased`.

        Those of its words that the index has go with the next `erase`.
        """
        with self.transaction() as connection:
            _note_unerased(connection, document)
            connection.execute("DELETE FROM documents WHERE id = ?", (document,))
        self.erase_log()

    # --- collections -----------------------------------------------------------------------------

    def collections(self) -> list[str]:
        """All that hold documents or were made to hold some, by name."""
        query = "SELECT collection AS name FROM documents UNION SELECT name FROM collections ORDER BY name"
        return self.column(query)

    def keep_collection(self, name: str) -> None:
        """Remember a collection although nothing is in it."""
        self.execute("INSERT OR IGNORE INTO collections VALUES (?)", name)

    def forget_collection(self, name: str) -> None:
        """Not to be remembered when nothing is in it."""
        self.execute("DELETE FROM collections WHERE name = ?", name)

    # --- passages --------------------------------------------------------------------------------

    def replace_passages(
        self,
        document: str,
        facts: FileFacts,
        recipe: str,
        passages: Sequence[DocumentPassage],
        embeddings: Sequence[Embeddings],
    ) -> None:
        """Put these in place of the document's earlier passages, which become stale. embeddings: (W, E) each."""
        assert len(passages) == len(embeddings)
        kept = {passage.node_id for passage in passages}
        earlier = set(self.node_ids(document))
        with self.transaction() as connection:
            connection.execute("DELETE FROM chunks WHERE document_id = ?", (document,))
            for p, rows in zip(passages, embeddings, strict=True):
                blob = np.ascontiguousarray(rows, dtype="<f4").tobytes()
                values = (p.node_id, document, p.index, p.text, p.location, len(rows), blob)
                connection.execute(INSERT_PASSAGE, values)
            gone = [(node, document) for node in earlier - kept]
            connection.executemany("INSERT OR IGNORE INTO stale VALUES (?, ?)", gone)
            connection.executemany("DELETE FROM stale WHERE node_id = ?", ((node,) for node in kept))
            if gone:
                connection.execute("DELETE FROM notes WHERE document_id = ?", (document,))
                _note_unerased(connection, document)
            _update_facts(connection, document, facts)
            connection.execute("UPDATE documents SET recipe = ? WHERE id = ?", (recipe, document))

    def passages_of(self, document: str) -> list[DocumentPassage]:
        """A document's passages in reading order."""
        return [_passage(row) for row in self._passage_rows(document)]

    def passages(self, node_ids: Sequence[str]) -> dict[str, DocumentPassage]:
        """The passages that are known of these; ids that nobody knows are left out."""
        rows = self.among("SELECT * FROM chunks WHERE node_id IN", node_ids)
        return {row["node_id"]: _passage(row) for row in rows}

    def scores(self, node_ids: Sequence[str], question: NDArray[np.float32]) -> dict[str, float]:
        """The cosine similarity of these passages to a question (E,): that of the nearest window.

        Those of another embedder, of other sizes, are left out.
        """
        whole = f"length(embedding) = windows * {4 * len(question)} AND windows > 0"
        rows = self.among(
            f"SELECT node_id, windows, embedding FROM chunks WHERE {whole} AND node_id IN", node_ids
        )
        return {row["node_id"]: float((_embedding(row) @ question).max()) for row in rows}

    def by_words(self, collections: Sequence[str], question: str, count: int) -> dict[str, bool]:
        """The node ids of passages of these collections that share words with a question, the best by BM25 first.

        With each whether it holds a code of the question (`codes_of`): these are the first. A word that half of the
        passages have says nothing. How rare a word is in other collections has no part in it: nobody learns what these
        hold. An index that cannot be read is as if empty, and said.
        """
        try:
            scores = self._by_words(collections, question)
            holding = self._holding(collections, question, count)
            best = nlargest(
                count, dict.fromkeys((*scores, *holding)), key=lambda each: (each in holding, scores[each])
            )
            rows = self.among("SELECT id, node_id FROM numbers WHERE id IN", best)
        except LibraryError as error:
            log.warning("searching without words: %s", error)
            return {}
        nodes = {row["id"]: row["node_id"] for row in rows}
        return {nodes[number]: number in holding for number in best if number in nodes}

    def _by_words(self, collections: Sequence[str], question: str) -> Counter[int]:
        scores = Counter[int]()
        asked = sum(map(self.count_passages, collections))
        everywhere = self.column("SELECT count(*) FROM numbers")[0]
        ways = zip(*(words_of(each, question.lower()) for each in collections), strict=True)
        for words in list(dict.fromkeys(ways))[:MOST_WORDS]:  # one word, as it is indexed in each collection
            having = [
                self.column("SELECT count(*) FROM words WHERE words MATCH ?", f'"{w}"')[0] for w in words
            ]
            for word, here in zip(words, having, strict=True):
                if here and 2 * sum(having) < asked:
                    # FTS5 counts how rare it is as if all collections were one.
                    weight = -_rarity(sum(having), asked) / _rarity(here, everywhere)
                    query = "SELECT rowid, bm25(words) FROM words WHERE words MATCH ?"
                    for number, score in self.rows(query, f'"{word}"'):
                        scores[number] += weight * score
        return scores

    def _holding(self, collections: Sequence[str], question: str, count: int) -> set[int]:
        """Passages in which a code of the question stands, its parts in their order; `count` for each at most."""
        query = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
        return {
            number
            for collection in collections
            for code in codes_of(question)[:MOST_WORDS]
            for number in self.column(query, f'"{" ".join(words_of(collection, code))}"', count)
        }

    def known(self, node_ids: Sequence[str]) -> set[str]:
        """Those of these that are passages of some document."""
        return {row[0] for row in self.among("SELECT node_id FROM chunks WHERE node_id IN", node_ids)}

    def node_ids(self, document: str) -> list[str]:
        """Of a document's passages, in reading order."""
        query = "SELECT node_id FROM chunks WHERE document_id = ? ORDER BY position"
        return self.column(query, document)

    def stale(self, document: str) -> list[str]:
        """Node ids of earlier versions, whose vectors and KV are still to be removed."""
        return self.column("SELECT node_id FROM stale WHERE document_id = ?", document)

    def embeddings_of(self, document: str) -> tuple[list[str], list[Embeddings]]:
        """A document's node ids and embeddings, (W, E) each, in reading order."""
        rows = self._passage_rows(document)
        return [row["node_id"] for row in rows], [_embedding(row) for row in rows]

    def embeddings(self, collection: str) -> Iterator[tuple[list[str], list[Embeddings]]]:
        """Every node id and embedding of a collection, a document at a time."""
        for document in self.documents(collection):
            if document.passages:
                yield self.embeddings_of(document.id)

    def nearest(self, collection: str, embedding: Embeddings, count: int) -> dict[str, float]:
        """The nodes nearest to one embedding (E,), each with its cosine similarity, best first; from reading all.

        A node is as near as the nearest of its vectors.
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
        """Every node id of a collection with its document's path, in the order of ingest."""
        query = (
            "SELECT node_id, path FROM documents JOIN chunks ON document_id = id WHERE collection = ? "
            "ORDER BY documents.rowid, position"
        )
        return dict(map(tuple, self.rows(query, collection)))

    def count_passages(self, collection: str) -> int:
        query = "SELECT count(*) FROM chunks JOIN documents ON id = document_id WHERE collection = ?"
        return int(self.column(query, collection)[0])

    # --- notes -----------------------------------------------------------------------------------

    def note(self, document: str, origin: str) -> str | None:
        """What was written of a document from that; None where nothing was."""
        query = "SELECT text FROM notes WHERE document_id = ? AND origin = ?"
        return next(iter(self.column(query, document, origin)), None)

    def keep_note(self, document: Document, origin: str, text: str) -> None:
        """Keep it as long as the document is what it was; of one that is another by now nothing is kept."""
        with self.transaction() as connection:
            connection.execute(
                "DELETE FROM notes WHERE document_id = ? AND origin = ?", (document.id, origin)
            )
            query = f"INSERT INTO notes ({', '.join(NOTE)}) SELECT id, ?, ? FROM documents WHERE id = ? AND sha256 = ?"
            connection.execute(query, (origin, text, document.id, document.facts.sha256))

    # --- damage and erasing ----------------------------------------------------------------------

    def incomplete_documents(self) -> list[Document]:
        """Those of which damage took passages, and that were not ingested again since."""
        rows = self.rows(f"SELECT {COLUMNS} WHERE state = 'failed' AND reason = ? ORDER BY path", LOST)
        return [_document(row) for row in rows]

    def unerased(self) -> list[str]:
        """Collections from which something was taken that may still stand in other files."""
        return self.column("SELECT collection FROM unerased")

    def erased(self, collection: str) -> None:
        """Nothing that was taken from it stands anywhere else."""
        self.execute("DELETE FROM unerased WHERE collection = ?", collection)

    def index_words(self) -> None:
        """Build the index of words again from the passages."""
        for statement in self._full_text("rebuild"):
            self.execute(statement)

    def words_damage(self) -> str:
        """What is wrong with the index of words, or that it does not fit the passages."""
        try:
            self.execute("INSERT INTO words (words, rank) VALUES ('integrity-check', 1)")
        except LibraryError as error:
            return str(error)
        return ""

    def _passage_rows(self, document: str) -> list[sqlite3.Row]:
        return self.rows("SELECT * FROM chunks WHERE document_id = ? ORDER BY position", document)


def codes_of(question: str) -> list[str]:
    """Numbers and codes of a question that name one thing, such as an invoice: four letters or digits at least.

    Three are enough where they are all that is asked, and then it may be a year as well.
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
    """BM25's weight of a word that so many passages have (Robertson and Spärck Jones), as FTS5 counts it."""
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
    )


def _passage(row: sqlite3.Row) -> DocumentPassage:
    return DocumentPassage(row["node_id"], row["document_id"], row["position"], row["text"], row["location"])


def _embedding(row: sqlite3.Row) -> Embeddings:
    return np.frombuffer(row["embedding"], dtype="<f4").astype(np.float32).reshape(row["windows"], -1)
