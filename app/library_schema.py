"""The registry's tables, and opening the file that holds them."""

import os
import sqlite3
from pathlib import Path

from ragblend.app.home import FILE_MODE
from ragblend.kvstore.errors import LibraryError

VERSION = 1
BUSY_SECONDS = 30.0

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


def connect(path: Path) -> sqlite3.Connection:
    """Open or make the registry. Raises LibraryError for damage, another version, or a full disk."""
    try:
        _create_private(path)
        connection = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as error:
        raise LibraryError(
            f"Opening the registry {path}: {error}. Check the folder's rights and space."
        ) from error
    try:
        _prepare(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise LibraryError(
            f"Opening the registry {path}: {error}. Nothing was changed; restore the file from a backup, or move "
            "it away and ingest the documents again."
        ) from error
    except LibraryError:
        connection.close()
        raise
    return connection


def _create_private(path: Path) -> None:
    # SQLite gives its journal files the mode of the database, so the mode is right from the first byte.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.row_factory = sqlite3.Row
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, VERSION):  # before anything is written to it
        raise LibraryError(
            f"Opening the registry {path}: it has format {found}, this version of RAGBlend reads {VERSION}. "
            "Use the version that made it, or another --home."
        )
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}")
    if found == 0:
        _create_tables(connection)
    connection.create_function("folded", 1, lambda text: str(text).casefold(), deterministic=True)
    for statement in LATER:
        connection.execute(statement)


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:  # not made by another process meanwhile
        for statement in TABLES.strip().split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={VERSION}")
    connection.execute("COMMIT")
