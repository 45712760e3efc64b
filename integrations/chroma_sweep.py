"""Erases leftovers of vectors that Chroma has deleted: `python chroma_sweep.py FOLDER COLLECTION_ID`.

Chroma 1.5 keeps the vectors of a deleted collection in an orphaned folder, and in free pages of its SQLite file; and it
deletes in the background after the call has returned. The files of a new graph have room for a hundred vectors, filled
with the earlier content of the process's memory, such as ids and texts. This runs in its own process: Chroma brings a
second SQLite, and two of them on one file in one process break each other's locks. The caller holds the writer lock,
and no collection in the folder is being written.
"""

import re
import shutil
import sqlite3
import struct
import sys
import time
from contextlib import closing
from pathlib import Path

SEGMENT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
HEADER = struct.Struct("<i4Q")  # of a graph: version, 0, capacity, count, bytes of each vector
HEADER_VERSION = 1
BUSY_SECONDS = 60.0
# Log entries of deleted vectors, except the dummy ones that `erase` adds.
PENDING = """SELECT count(*) FROM embeddings_queue WHERE substr(topic, -36) = ? AND id NOT LIKE 'nobody#%'
    AND id NOT IN (SELECT embedding_id FROM embeddings)"""
ORPHANS = (
    "DELETE FROM embeddings WHERE segment_id NOT IN (SELECT id FROM segments)",
    "DELETE FROM embedding_metadata WHERE id NOT IN (SELECT id FROM embeddings)",
    "DELETE FROM embeddings_queue WHERE substr(topic, -36) NOT IN (SELECT id FROM collections) "
    "AND seq_id < (SELECT max(seq_id) FROM embeddings_queue)",  # new entries are numbered after the last one
)


def sweep(folder: Path, collection: str) -> None:
    """Remove log entries and rows without a collection, free pages, and folders without a segment."""
    path, deadline = folder / "chroma.sqlite3", time.monotonic() + BUSY_SECONDS
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as sql:
        sql.execute("PRAGMA temp_store = MEMORY")  # no temporary files outside the home
        while sql.execute(PENDING, (collection,)).fetchone()[0]:
            if time.monotonic() > deadline:
                raise OSError("Chroma does not empty its log of what was deleted")
            time.sleep(0.05)
        for statement in ORPHANS:
            sql.execute(statement)
        sql.execute("VACUUM")
        known_segments = {segment for (segment,) in sql.execute("SELECT id FROM segments")}
    for entry in folder.iterdir():
        if SEGMENT.fullmatch(entry.name):
            if entry.name in known_segments:
                blank_unused(entry)
            else:
                shutil.rmtree(entry)


def blank_unused(segment: Path) -> None:
    """Overwrite the unused part of a graph's file."""
    header, vectors = segment / "header.bin", segment / "data_level0.bin"
    if not vectors.exists():
        return
    before = header.read_bytes()
    version, _, _, count, nbytes = HEADER.unpack_from(before)
    if version != HEADER_VERSION:
        raise OSError(f"{header} has version {version}, and only {HEADER_VERSION} is known")
    with vectors.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(count * nbytes)
        file.write(bytes(max(0, size - count * nbytes)))
    if header.read_bytes() != before:
        raise OSError(f"{vectors} was written to in the meantime")


if __name__ == "__main__":
    try:
        sweep(Path(sys.argv[1]), sys.argv[2])
    except (OSError, sqlite3.Error) as error:
        sys.exit(f"{type(error).__name__}: {error}")
