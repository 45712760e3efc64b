"""The registry's tables."""

from ragblend.app.database import Layout

# `stale` lists node ids whose vectors and KV are still to be removed: written in the transaction that replaces
# the chunks, and emptied once Chroma and the KV store have let go, so that a crash in between leaks nothing.
TABLES = """
CREATE TABLE documents (
    id TEXT PRIMARY KEY, path TEXT NOT NULL, collection TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'failed')), reason TEXT NOT NULL DEFAULT '',
    size INTEGER NOT NULL DEFAULT -1, mtime_ns INTEGER NOT NULL DEFAULT -1, sha256 TEXT NOT NULL DEFAULT '',
    recipe TEXT NOT NULL DEFAULT '', updated_at TEXT NOT NULL, UNIQUE (collection, path));
CREATE TABLE chunks (
    node_id TEXT PRIMARY KEY, document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    position INTEGER NOT NULL, text TEXT NOT NULL, location TEXT NOT NULL,
    windows INTEGER NOT NULL, embedding BLOB NOT NULL,
    UNIQUE (document_id, position));
CREATE TABLE stale (
    node_id TEXT NOT NULL, document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    PRIMARY KEY (node_id, document_id));
"""
# What came later; earlier versions do not look at it. Collections that are there although they are empty; and an index
# from which 20,000 documents are counted and searched without their rows being read.
LATER = (
    "CREATE TABLE IF NOT EXISTS collections (name TEXT PRIMARY KEY) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS documents_by_state ON documents (collection, state, path, id)",
)
REGISTRY = Layout("registry", TABLES, later=LATER)
