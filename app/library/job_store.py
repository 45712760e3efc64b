"""The ingest queue in SQLite: one row per file, with its state and result; watched folders; facts such as "paused".

SQLite does not wait for the disk (`synchronous`): after a power cut some files are checked again, which costs a `stat`
each.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ragblend.app.database import Database, folded, now

JobState = Literal["queued", "parsing", "embedding", "done", "unchanged", "failed", "cancelled"]
Kind = Literal["ingest", "remove"]
STATES: tuple[JobState, ...] = get_args(JobState)
RUNNING: tuple[JobState, ...] = ("parsing", "embedding")
OPEN: tuple[JobState, ...] = ("queued", *RUNNING)
# `turn` is the position in the queue; `again`: the file was added again while it was being ingested.
TABLES = (
    "CREATE TABLE jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, collection TEXT NOT NULL, "
    "path TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', size INTEGER NOT NULL DEFAULT 0, "
    "turn INTEGER NOT NULL, again INTEGER NOT NULL DEFAULT 0, added_at TEXT NOT NULL, finished_at TEXT, "
    "UNIQUE (collection, path))",
    "CREATE INDEX jobs_by_state ON jobs (state, turn)",
    "CREATE TABLE watched (id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, collection TEXT NOT NULL, "
    "UNIQUE (path, collection))",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
COLUMNS = ("id", "kind", "collection", "path", "state", "reason", "size", "added_at", "finished_at")
ADD = """
INSERT INTO jobs (kind, collection, path, state, size, turn, added_at) VALUES (?, ?, ?, 'queued', ?, ?, ?)
ON CONFLICT (collection, path) DO UPDATE SET
    kind = excluded.kind, size = excluded.size, added_at = excluded.added_at,
    again = state IN ('parsing', 'embedding'),
    turn = CASE WHEN state IN ('queued', 'parsing', 'embedding') THEN turn ELSE excluded.turn END,
    state = CASE WHEN state IN ('parsing', 'embedding') THEN state ELSE 'queued' END,
    reason = '', finished_at = NULL
"""


@dataclass(frozen=True)
class FileJob:
    """One file to ingest, or (kind `remove`) whose document is to be removed.

    done, total: the progress in the current phase, 0 and 0 if unknown; reason: why it failed; size: in bytes.
    """

    id: int
    kind: Kind
    collection: str
    path: str
    state: JobState
    reason: str
    size: int
    added_at: str
    finished_at: str | None
    done: int = 0
    total: int = 0

    @property
    def name(self) -> str:
        return Path(self.path).name


class JobStore(Database):
    """All reads and writes of the queue; every change is one transaction. Thread-safe."""

    what, version, tables = "job queue", 2, TABLES
    copied = ("jobs", "watched", "facts")
    synchronous = "NORMAL"

    def requeue_running(self) -> None:
        """Queue again the jobs that an ended process left running, at their old positions."""
        self.execute(f"UPDATE jobs SET state = 'queued', again = 0 WHERE state IN {_sql_list(RUNNING)}")

    def add(self, kind: Kind, collection: str, files: Iterable[tuple[str, int]]) -> int:
        """Queue files, (path, size) each; a file that is queued already keeps its position. Returns how many files."""
        moment, count = now(), 0
        with self.transaction() as sql:
            (turn,) = sql.execute("SELECT coalesce(max(turn), 0) FROM jobs").fetchone()
            for count, (path, size) in enumerate(files, start=1):
                sql.execute(ADD, (kind, collection, path, size, turn + count, moment))
        return count

    def next(self) -> FileJob | None:
        rows = self.rows("SELECT * FROM jobs WHERE state = 'queued' ORDER BY turn LIMIT 1")
        return _job(rows[0]) if rows else None

    def has_other_queued(self, job: FileJob) -> bool:
        """Whether another job of the same kind is queued."""
        query = "SELECT 1 FROM jobs WHERE state = 'queued' AND kind = ? AND id != ? LIMIT 1"
        return bool(self.rows(query, job.kind, job.id))

    def start(self, job_id: int, state: JobState) -> bool:
        """Set the phase of a job. False if it was cancelled or removed meanwhile."""
        query = f"UPDATE jobs SET state = ? WHERE id = ? AND state IN {_sql_list(OPEN)}"
        return bool(self.execute(query, state, job_id).rowcount)

    def finish(self, job_id: int, state: JobState, reason: str = "") -> None:
        """Store the result of a job, unless it was cancelled meanwhile. If it was added again meanwhile, queue it."""
        query = (
            "UPDATE jobs SET state = CASE WHEN again THEN 'queued' ELSE ? END, reason = ?, finished_at = ?, "
            f"again = 0 WHERE id = ? AND state IN {_sql_list(OPEN)}"
        )
        self.execute(query, state, reason, now(), job_id)

    def put_back(self, job_id: int) -> None:
        """Queue an interrupted job again, unless it was cancelled."""
        query = f"UPDATE jobs SET state = 'queued', again = 0 WHERE id = ? AND state IN {_sql_list(RUNNING)}"
        self.execute(query, job_id)

    def cancel(self, job_ids: Sequence[int] | None) -> int:
        """Cancel these jobs, or all that are not finished. Returns how many."""
        where, values = _id_condition(job_ids)
        query = (
            f"UPDATE jobs SET state = 'cancelled', finished_at = ? WHERE state IN {_sql_list(OPEN)}{where}"
        )
        return self.execute(query, now(), *values).rowcount

    def retry(self, job_ids: Sequence[int] | None) -> int:
        """Queue these, or all, failed and cancelled jobs again. Returns how many."""
        where, values = _id_condition(job_ids)
        query = (
            "UPDATE jobs SET state = 'queued', reason = '', finished_at = NULL, "
            f"turn = turn + (SELECT max(turn) FROM jobs) WHERE state IN ('failed', 'cancelled'){where}"
        )
        return self.execute(query, *values).rowcount

    def clear_finished(self) -> int:
        """Delete the jobs that are done or cancelled; failed ones stay. Returns how many."""
        query = "DELETE FROM jobs WHERE state IN ('done', 'unchanged', 'cancelled')"
        count = self.execute(query).rowcount
        self.erase_log()
        return count

    def forget(self, collection: str, paths: Iterable[str]) -> None:
        """Delete the jobs of these files, whatever their state, except jobs of kind `remove`."""
        with self.transaction() as sql:
            values = ((collection, path) for path in paths)
            query = "DELETE FROM jobs WHERE collection = ? AND path = ? AND kind != 'remove'"
            sql.executemany(query, values)
        self.erase_log()

    def forget_collection(self, collection: str) -> None:
        self.execute("DELETE FROM jobs WHERE collection = ?", collection)
        self.erase_log()

    def open_among(self, collection: str, paths: Sequence[str]) -> set[str]:
        """Which of these files are queued or being ingested."""
        query = f"SELECT path FROM jobs WHERE state IN {_sql_list(OPEN)} AND collection = ? AND path IN"
        return {row["path"] for row in self.among(query, paths, collection)}

    def counts(self) -> dict[JobState, int]:
        found = dict(map(tuple, self.rows("SELECT state, count(*) FROM jobs GROUP BY state")))
        return {state: found.get(state, 0) for state in STATES}

    def page(
        self, state: str | None, search: str, offset: int, limit: int, collection: str | None = None
    ) -> tuple[list[FileJob], int]:
        """One page of jobs and the number of all matches; None: of any state, of all collections.

        Running ones first, then queued ones, then finished ones with the latest first.
        """
        where = "WHERE state = coalesce(?, state) AND collection = coalesce(?, collection)"
        values = list[Any]([state, collection])
        for word in folded(search).split():
            where += " AND instr(folded(path), ?)"
            values.append(word)
        order = (
            f"CASE WHEN state IN {_sql_list(RUNNING)} THEN 0 WHEN state = 'queued' THEN 1 ELSE 2 END, "
            "CASE WHEN state = 'queued' THEN turn ELSE 0 END, finished_at DESC, id DESC"
        )
        (total,) = self.column(f"SELECT count(*) FROM jobs {where}", *values)
        query = f"SELECT * FROM jobs {where} ORDER BY {order} LIMIT ? OFFSET ?"
        rows = self.rows(query, *values, limit, offset)
        return [_job(row) for row in rows], total

    # --- facts that survive a restart

    def fact(self, name: str) -> str | None:
        return next(iter(self.column("SELECT value FROM facts WHERE name = ?", name)), None)

    def set_fact(self, name: str, value: str) -> None:
        self.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", name, value)


def _job(row: sqlite3.Row) -> FileJob:
    return FileJob(**{name: row[name] for name in COLUMNS})


def _sql_list(states: Sequence[str]) -> str:
    return "(" + ", ".join(f"'{state}'" for state in states) + ")"


def _id_condition(job_ids: Sequence[int] | None) -> tuple[str, tuple[int, ...]]:
    """SQL that limits a query to these jobs, and its values; None: no limit."""
    if job_ids is None:
        return "", ()
    return f" AND id IN ({', '.join('?' * len(job_ids))})", tuple(job_ids)
