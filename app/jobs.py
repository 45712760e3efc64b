"""The ingest queue, as people use it: files and folders in, progress, pause, cancel, retry; it outlives the process.

`JobQueue.add` -> `JobStore` -> `JobWorker` -> `ingest.ingest_file`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ragblend.app.discovery import discover
from ragblend.app.documents import Document
from ragblend.app.guards import check_size
from ragblend.app.home_writer import HomeWriter
from ragblend.app.job_store import OPEN, RUNNING, FileJob, JobPage, JobStore, State
from ragblend.app.job_worker import JobWorker
from ragblend.app.removal import Removed, remove_document
from ragblend.app.uploads import keep_upload
from ragblend.app.workspaces import Workspaces
from ragblend.kvstore.errors import DocumentError, LibraryError

REMOVED_A_TURN = 200
Forgotten = Callable[[Document], None]  # told of each document that went


@dataclass(frozen=True)
class Added:
    """What came of adding: files queued, files of no known kind, and (path, reason) of what cannot be read."""

    batch: int
    files: int
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Overview:
    """How far the queue is. waiting: why the worker cannot work just now; current: the file that it works on;

    changes: another number whenever anything was written to the queue, also if all counts are what they were.
    """

    counts: dict[State, int]
    total: int
    finished: int
    files_per_minute: float | None
    seconds_left: float | None
    paused: bool
    waiting: str | None
    current: FileJob | None
    running: bool
    changes: int


class JobQueue:
    """Files on their way into one home. Safe for threads; one per process does the work."""

    def __init__(self, workspaces: Workspaces, store: JobStore, forgotten: Forgotten | None = None) -> None:
        self._workspaces, self._store, self._forgotten = workspaces, store, forgotten
        self._writer = HomeWriter(workspaces)
        self._worker = JobWorker(workspaces, store, self._writer, self._gone)

    @classmethod
    def open(cls, workspaces: Workspaces, forgotten: Forgotten | None = None) -> "JobQueue":
        """The home's queue. forgotten(document) is called for each document that is removed. Raises LibraryError."""
        return cls(workspaces, JobStore.open(workspaces.home.jobs), forgotten)

    @property
    def store(self) -> JobStore:
        return self._store

    def start(self) -> None:
        """Begin to work, in a thread; what an earlier process left is gone on with."""
        self._worker.start()

    def close(self) -> None:
        """Leave the file that is worked on, end the thread, keep the queue."""
        self._worker.end()
        self._store.close()

    # --- what goes in and out

    def add(self, paths: Sequence[Path], collection: str) -> Added:
        """Queue files and folders. Raises SettingsError for what cannot be a collection."""
        self._workspaces.of(collection)
        found = discover(list(paths))
        failed = [(_shown(path), str(error)) for path, error in found.failed]
        files: list[tuple[str, int]] = []
        for path in found.files:
            if path.is_relative_to(self._workspaces.home.root) and not self._is_original(path):
                continue  # a folder that has the home in it
            try:
                files.append((str(path).encode("utf-8").decode("utf-8"), _size(path)))
            except UnicodeEncodeError:
                failed.append(
                    (_shown(path), f"Reading {_shown(path)}: its name is not UTF-8. Rename the file.")
                )
        batch, count = self._store.add("ingest", collection, files)
        self._worker.wake()
        return Added(batch, count, tuple(_shown(path) for path in found.skipped), tuple(failed))

    def upload(self, paths: Sequence[Path], collection: str) -> Added:
        """Copy files into the home and queue the copies. Raises StoreFullError."""
        self._workspaces.of(collection)
        found = discover(list(paths))
        copies, failed = [], [(path.name, str(error)) for path, error in found.failed]
        for path in found.files:
            try:
                check_size(path)
                copies.append(keep_upload(self._workspaces.home, collection, path))
            except DocumentError as error:
                failed.append((path.name, str(error)))
        added = self.add(copies, collection)
        return replace(
            added, skipped=tuple(path.name for path in found.skipped), failed=(*failed, *added.failed)
        )

    def gone(self, paths: Sequence[Path], collection: str) -> int:
        """Queue the removal of documents whose files went. Returns how many were known."""
        library = self._workspaces.library
        known = [str(path) for path in paths if library.document(collection, str(path))]
        if known:
            self._store.add("remove", collection, [(path, 0) for path in known])
            self._worker.wake()
        return len(known)

    def missing_in(self, folder: Path, collection: str) -> list[Path]:
        """Documents of a folder whose files are not there."""
        known = self._workspaces.library.paths_below(collection, str(folder))
        return [path for path in map(Path, known) if not path.exists()]

    def check_collection(self, name: str) -> None:
        """Raises SettingsError for what cannot be a collection."""
        self._workspaces.of(name)

    def remove(self, document_ids: Sequence[str], collection: str) -> list[Removed]:
        """Take documents out now, before the queue goes on; ids that nobody knows are left out. Raises LibraryError."""
        workspace, removed = self._workspaces.of(collection), list[Removed]()
        for start in range(0, len(document_ids), REMOVED_A_TURN):
            with self.writing():
                known = workspace.library.documents_with(document_ids[start : start + REMOVED_A_TURN])
                mine = [document for document in known.values() if document.collection == collection]
                self._store.forget(collection, [document.path for document in mine])
                removed += [self._removed(document) for document in mine]
        return removed

    def remove_collection(self, collection: str) -> list[Removed]:
        """Take all documents of a collection out, and the collection itself. Raises LibraryError."""
        self._store.forget_collection(collection)
        documents = self._workspaces.library.documents(collection)
        removed = self.remove([document.id for document in documents], collection)
        self._workspaces.forget(collection)
        return removed

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer of the home; the worker leaves its file and waits. Raises StoreLockedError."""
        with self._writer.turn():
            yield

    # --- how far it is

    def overview(self) -> Overview:
        counts = self._store.counts()
        left = sum(counts[state] for state in OPEN)
        total = sum(counts.values())
        worker = self._worker
        return Overview(
            counts,
            total,
            total - left,
            worker.pace.files_per_minute,
            worker.pace.seconds_left(left),
            worker.paused,
            worker.waiting if left else None,
            worker.current,
            worker.is_alive and left > 0 and not worker.paused,
            self._store.database.changes,
        )

    def page(self, state: str | None = None, search: str = "", offset: int = 0, limit: int = 50) -> JobPage:
        """Running ones first, then the queue, then what is over with the latest first."""
        page, current = self._store.page(state, search, offset, limit), self._worker.current
        if current is None:
            return page
        jobs = (current if j.id == current.id and j.state in RUNNING else j for j in page.jobs)
        return replace(page, jobs=tuple(jobs))

    def open_among(self, collection: str, paths: Sequence[str]) -> set[str]:
        """Those of these files that are worked on or wait for their turn."""
        return self._store.open_among(collection, paths)

    def job(self, job_id: int) -> FileJob:
        """Raises LibraryError if it is gone."""
        current, job = self._worker.current, self._store.get(job_id)
        if job is None:
            raise LibraryError(f"Looking for the job {job_id}: it is not in the queue any more.")
        return current if current and current.id == job_id and job.state in RUNNING else job

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; False if that took too long."""
        until = time.monotonic() + timeout_s
        while any(self._store.counts()[state] for state in OPEN):
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True

    # --- what people do to it

    def pause(self) -> None:
        """Leave the file that is worked on and begin no other, also after a restart."""
        self._store.set_fact("paused", "yes")
        self._worker.paused = True

    def resume(self) -> None:
        """Go on."""
        self._store.set_fact("paused", "")
        self._worker.paused = False
        self._worker.wake()

    def cancel(self, job_ids: Sequence[int] | None = None) -> int:
        """Cancel these, or all that are not over; the file that is worked on is left. Returns how many."""
        count = self._store.cancel(job_ids)
        self._worker.leave(job_ids)
        return count

    def retry(self, job_ids: Sequence[int] | None = None) -> int:
        """Queue these, or all, of the failed and cancelled ones again. Returns how many."""
        count = self._store.retry(job_ids)
        self._worker.wake()
        return count

    def clear_finished(self) -> int:
        """Forget what went well or was cancelled. Returns how many."""
        return self._store.clear_finished()

    # --- inside

    def _removed(self, document: Document) -> Removed:
        removed = remove_document(self._workspaces.of(document.collection), document)
        if self._forgotten is not None:
            self._forgotten(document)
        return removed

    def _gone(self, job: FileJob) -> State:
        """In the worker: the file of a document went. One that came back meanwhile stays."""
        document = self._workspaces.library.document(job.collection, job.path)
        if document is None or Path(job.path).exists():
            return "unchanged"
        self._removed(document)
        return "done"

    def _is_original(self, path: Path) -> bool:
        return path.is_relative_to(self._workspaces.home.originals)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _shown(path: Path) -> str:
    return str(path).encode("utf-8", "replace").decode("utf-8")
