"""The ingest queue: add files and folders, progress, pause, cancel, retry; it survives restarts.

Main path: `JobQueue.add` -> `JobStore`; one thread, the worker, ingests file by file (`ingest.ingest_file`). When the
queue is empty, it completes embeddings that were sketched while many files waited (`ingest.embed_in_full`), and encodes
KV (`encoding.encode_missing`). It interrupts a file within two seconds when the file is cancelled, the queue is paused,
or another thread wants to write; the passages that are done are kept. It interrupts encoding between two layers when
the queue is paused or a file arrives, and lets questions go first.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragblend.app.library.discovery import discover, is_gone
from ragblend.app.library.documents import as_path, printable
from ragblend.app.library.encoding import KvProgress, KvReport, encode_missing
from ragblend.app.library.file_checks import check_file
from ragblend.app.library.ingest import embed_in_full, ingest_file
from ragblend.app.library.job_store import OPEN, RUNNING, FileJob, JobState
from ragblend.app.library.language import language_notice
from ragblend.app.library.removal import RemovedDocument, remove_document
from ragblend.app.library.switching import switch_to_next_embedder
from ragblend.app.library.uploads import delete_upload, delete_uploads, store_upload
from ragblend.app.progress import Pace, Stage
from ragblend.app.workspace import Workspaces
from ragblend.engine.scheduling.background import end_at_exit
from ragblend.kvstore.errors import Cancelled, DocumentError, ModelError, RagBlendError

log = logging.getLogger("ragblend")
STATE_OF: dict[Stage, JobState] = {"parse": "parsing", "recognise": "parsing", "embed": "embedding"}
REMOVED_PER_LOCK = 200  # documents that are removed before other writers get the lock
RETRY_S = 2.0  # after an error that stopped the worker
RECHECK_S = 30.0  # between checks whether another process still encodes


@dataclass(frozen=True)
class QueuedFiles:
    """The result of adding. files: how many are queued; skipped, failed: (path, reason) of the files that are not."""

    files: int
    skipped: tuple[tuple[str, str], ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class QueueOverview:
    """The state of the queue.

    counts: jobs by state; total: all jobs; finished: jobs that need no more work. waiting: why the worker cannot work
    at the moment, or None; current: the job that it works on, with its progress. changes: a number that changes
    whenever the queue is written to, even if all counts stay the same. kv: the progress of embedding and encoding after
    all files are ingested, else None; kv_message: why some passages have no KV, and notices about the embedder.
    is_idle: nothing is left to do.
    """

    counts: dict[JobState, int]
    total: int
    finished: int
    files_per_minute: float | None
    seconds_left: float | None
    paused: bool
    waiting: str | None
    current: FileJob | None
    changes: int
    kv: KvProgress | None = None
    kv_message: str = ""
    is_idle: bool = False


class JobQueue:
    """The files to be ingested into one home, and the worker that ingests them once `start` is called. Thread-safe."""

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces, self.store = workspaces, workspaces.jobs
        self._woken, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._upload_lock = threading.Lock()  # held from copying an upload until it is queued
        self._cancelled_id: int | None = None  # the current job, if it was cancelled
        self._pace, self._paused = Pace(), self.store.fact("paused") == "yes"
        # As in `QueueOverview`.
        self._blocked_by: str | None = None  # its `waiting`
        self._current: FileJob | None = None
        self._kv: KvProgress | None = None
        self._kv_message, self._is_idle = "", False

    def start(self) -> None:
        """Start the worker, which also continues the jobs of a killed process.

        Call it only while this process owns the home (`listening.owning`), else it would start another process's
        running jobs again.
        """
        if self._thread is None or not self._thread.is_alive():
            self.store.requeue_running()
            self._ending.clear()
            self._thread = threading.Thread(target=self._run, name="ragblend-ingest", daemon=True)
            self._thread.start()
            end_at_exit(self, ends_first=True)

    def end(self) -> None:
        """Stop the worker: interrupt the current file, and wait until the thread has ended. `start` starts it again."""
        self._ending.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    # --- adding and removing

    def add(self, paths: Sequence[Path], collection: str) -> QueuedFiles:
        """Queue files and folders. Raises SettingsError for an invalid collection name."""
        self.workspaces.of(collection)  # checks the name
        found = discover(list(paths), self.workspaces.settings.skip, self.workspaces.home.root)
        failed = tuple((printable(path), printable(str(error))) for path, error in found.failed)
        files = [(printable(path), _file_size(path)) for path in found.files]
        count = self.store.add("ingest", collection, files)
        self.wake()
        skipped = tuple((printable(path), why) for path, why in found.skipped.items())
        return QueuedFiles(count, skipped, failed)

    def upload(self, paths: Sequence[Path], collection: str) -> QueuedFiles:
        """Copy files into the home and queue the copies. Raises StoreFullError after queueing what was copied."""
        self.workspaces.of(collection)  # checks the name
        found = discover(list(paths))
        copies, failed = [], [(path.name, str(error)) for path, error in found.failed]
        with self._upload_lock:
            try:
                for path in found.files:
                    try:
                        check_file(path)
                        copies.append(store_upload(self.workspaces.home, collection, path))
                    except DocumentError as error:
                        failed.append((path.name, str(error)))
            finally:
                added = self.add(copies, collection)
        skipped = tuple((path.name, why) for path, why in found.skipped.items())
        return replace(added, skipped=skipped, failed=(*failed, *added.failed))

    def queue_removal(self, paths: Sequence[Path], collection: str) -> int:
        """Queue the removal of these files' documents; a file that exists again by then keeps its document.

        Returns how many of the files have documents.
        """
        library = self.workspaces.library
        known = [name for name in map(printable, paths) if library.document(collection, name)]
        if known:
            self.store.add("remove", collection, [(path, 0) for path in known])
            self.wake()
        return len(known)

    def remove(self, document_ids: Sequence[str], collection: str) -> list[RemovedDocument]:
        """Remove documents now, before the queue continues; unknown ids are ignored. Raises LibraryError."""
        workspace, removed = self.workspaces.of(collection), list[RemovedDocument]()
        for start in range(0, len(document_ids), REMOVED_PER_LOCK):
            with self.workspaces.writing():
                known = workspace.library.documents_with(document_ids[start : start + REMOVED_PER_LOCK])
                mine = [document for document in known.values() if document.collection == collection]
                removed += [remove_document(workspace, document) for document in mine]
        self.wake()  # there may be room for more KV now
        return removed

    def remove_collection(self, collection: str) -> tuple[list[RemovedDocument], int]:
        """Remove a collection with its documents and the KV of prompts in it. Raises LibraryError.

        Returns the removed documents, and the bytes freed in all.
        """
        self.store.forget_collection(collection)
        library, workspace = self.workspaces.library, self.workspaces.of(collection)
        removed = self.remove([document.id for document in library.documents(collection)], collection)
        with self.workspaces.writing():  # also KV and uploads that belong to no document or to a hidden one
            for document in library.hidden(collection):
                remove_document(workspace, document)
            # Documents of files that were being ingested when the documents were listed.
            removed += [remove_document(workspace, document) for document in library.documents(collection)]
            freed = workspace.engine.forget_all()
            with self._upload_lock:
                freed += delete_uploads(self.workspaces.home, collection)
        self.workspaces.forget(collection)
        return removed, freed + sum(one.bytes_freed for one in removed)

    # --- progress

    def overview(self) -> QueueOverview:
        counts = self.store.counts()
        left, total = sum(counts[state] for state in OPEN), sum(counts.values())
        waiting = self._blocked_by if left or self._kv else None
        pace, changes = self._pace, self.store.changes
        return QueueOverview(
            counts, total, total - left, pace.files_per_minute, pace.seconds_left(left), self._paused, waiting,
            self._current, changes, self._kv, self._kv_message, left == 0 and self._is_idle,
        )  # fmt: skip

    def page(
        self,
        state: str | None = None,
        search: str = "",
        offset: int = 0,
        limit: int = 50,
        collection: str | None = None,
    ) -> tuple[list[FileJob], int]:
        """As `JobStore.page`; the current job has its progress."""
        (jobs, total), current = self.store.page(state, search, offset, limit, collection), self._current
        if current is not None:
            jobs = [current if j.id == current.id and j.state in RUNNING else j for j in jobs]
        return jobs, total

    # --- control

    def pause(self) -> None:
        """Interrupt the current file, and start no other one until `resume`, also after a restart."""
        self.store.set_fact("paused", "yes")
        self._paused = True

    def resume(self) -> None:
        self.store.set_fact("paused", "")
        self._paused = False
        self.wake()

    def cancel(self, job_ids: Sequence[int] | None = None) -> int:
        """Cancel these jobs, or all that are not finished, the current one included. Returns how many."""
        count, current = self.store.cancel(job_ids), self._current
        if current is not None and (job_ids is None or current.id in job_ids):
            self._cancelled_id = current.id
        return count

    def retry(self, job_ids: Sequence[int] | None = None) -> int:
        """Queue these, or all, failed and cancelled jobs again. Returns how many."""
        count = self.store.retry(job_ids)
        self.wake()
        return count

    def clear_finished(self) -> int:
        """As `JobStore.clear_finished`; also deletes the copies of cancelled uploads. Raises LibraryError."""
        if self._cancelled_copies():
            with self.workspaces.writing(), self._upload_lock:  # no file is being ingested or uploaded
                for path in self._cancelled_copies():
                    delete_upload(self.workspaces.home, path)
        return self.store.clear_finished()

    def _cancelled_copies(self) -> list[Path]:
        """Copies of cancelled uploads that are not documents."""
        originals, library = self.workspaces.home.originals, self.workspaces.library
        jobs, _ = self.store.page("cancelled", "", 0, -1)
        copies = [job for job in jobs if as_path(job.path).parent == originals / job.collection]
        return [as_path(job.path) for job in copies if library.document(job.collection, job.path) is None]

    def wake(self) -> None:
        """Make the worker look for work: a file, or passages to embed or encode."""
        self._is_idle = False
        self._woken.set()

    # --- the worker

    def _run(self) -> None:
        """The thread's loop."""
        while not self._ending.is_set():
            self._woken.clear()
            if self._paused and not self._ending.is_set():  # `end` sets it before it wakes this thread
                self._woken.wait()
                continue
            try:
                if self.store.next() is not None:
                    self._work_off_queue()
                    self._blocked_by = None
                else:
                    self._embed_and_encode()
                continue
            except RagBlendError as error:  # another process writes, the disk is full, the model is missing
                self._blocked_by = str(error)
            except Exception as error:
                log.exception("the ingest queue failed, and tries again")
                self._blocked_by = f"{type(error).__name__}: {error}"
            self._ending.wait(RETRY_S)

    def _embed_and_encode(self) -> None:
        """Embed and encode what is missing in all collections, until done or a file arrives; then wait for new work."""
        settings = self.workspaces.settings

        def is_cancelled() -> bool:
            is_woken = self._paused or self._ending.is_set() or self._woken.is_set()
            return is_woken or self.workspaces.settings is not settings

        def show(progress: KvProgress) -> None:
            self._kv, self._blocked_by = progress, None

        def show_embedding(stage: Stage, done: int, total: int, name: str = "") -> None:
            show(KvProgress("embedding", collection, done, total, document=name))

        reports, messages = list[KvReport](), list[str]()
        for collection in self.workspaces.names():
            if is_cancelled():
                return
            workspace = self.workspaces.of(collection)
            if not embed_in_full(workspace, show_embedding, is_cancelled):
                return
            try:
                if not switch_to_next_embedder(workspace, show_embedding, is_cancelled):
                    return
                messages.append(language_notice(workspace))
            except ModelError as error:  # the next embedder fails; searches use the old one
                messages.append(str(error))
            reports.append(encode_missing(workspace, show, is_cancelled))
        self._kv, self._blocked_by = None, None
        if is_cancelled():
            return
        messages += [each.message for each in reports]
        self._kv_message = " ".join(filter(None, dict.fromkeys(messages)))
        self._is_idle = True
        another_encodes = any(each.stopped == "elsewhere" for each in reports)
        while not self._woken.wait(RECHECK_S):
            if another_encodes or self.workspaces.settings is not settings:  # such as another budget
                break
        self._is_idle = False

    def _work_off_queue(self) -> None:
        """Ingest until the queue is empty or another thread wants to write.

        An urgent writer interrupts the current file, a patient one gets the lock after it.
        """
        with self.workspaces.writing():
            self._blocked_by, is_lock_wanted = None, False
            self.store.requeue_running()  # jobs that could not be put back, because the disk was full
            while not (self._must_stop or is_lock_wanted) and (job := self.store.next()) is not None:
                started = time.monotonic()
                if self._process(job):
                    self._pace.add(time.monotonic() - started)
                is_lock_wanted = self.workspaces.has_waiting_writer

    @property
    def _must_stop(self) -> bool:
        """Whether the current file must be interrupted."""
        return self._paused or self._ending.is_set() or self.workspaces.has_urgent_writer

    def _process(self, job: FileJob) -> bool:
        """Do a job and store its result, or queue it again if it was interrupted. Returns whether it ended."""
        self._cancelled_id, self._current = None, job
        try:
            self.store.finish(job.id, *self._ingest_or_remove(job))
            return True
        except BaseException as error:
            self.store.put_back(job.id)
            if isinstance(error, Cancelled):
                return False
            raise
        finally:
            self._current = None

    def _ingest_or_remove(self, job: FileJob) -> tuple[JobState, str]:
        """Do a job. Returns its final state, and the reason if it failed."""
        if job.kind == "remove":
            return self._remove_if_missing(job), ""

        def show(stage: Stage, done: int, total: int, name: str = "") -> None:
            assert self._current is not None
            state = STATE_OF[stage]
            if self._current.state != state and not self.store.start(job.id, state):  # it was cancelled
                self._cancelled_id = job.id
            self._current = replace(self._current, state=state, done=done, total=total)

        def is_cancelled() -> bool:
            return self._must_stop or self._cancelled_id == job.id

        try:
            others_queued = self.store.counts()["queued"] - 1  # the job itself is still counted as queued
            report = ingest_file(
                self.workspaces.of(job.collection), as_path(job.path), show, is_cancelled, others_queued
            )
        except DocumentError as error:
            return "failed", printable(str(error))
        except (RagBlendError, OSError, MemoryError):
            raise
        except Exception as error:  # a bug in our code or in a parser must not stop the other files
            log.exception("ingesting %s failed", job.path)
            return "failed", printable(
                f"Reading {job.path}: {type(error).__name__}: {error}. Please report this."
            )
        return ("unchanged" if report.unchanged or report.skipped else "done"), ""

    def _remove_if_missing(self, job: FileJob) -> JobState:
        """Remove the document, unless its file exists again."""
        # Mark the job as running, so that a file which is added at that path meanwhile is queued again.
        is_cancelled = not self.store.start(job.id, "parsing")
        document = self.workspaces.library.document(job.collection, job.path)
        if is_cancelled or document is None or not is_gone(document.file):
            return "unchanged"
        remove_document(self.workspaces.of(job.collection), document)
        # Erase after the last removal: releasing the writer lock erases too, but that may be hours away.
        if not self.store.has_other_queued(job):
            self.workspaces.erase_removed()
        return "done"


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
