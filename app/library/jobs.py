"""The ingest queue: files and folders in, progress, pause, cancel, retry; it outlives the process.   <- START HERE

`JobQueue.add` -> `JobStore`; one thread works it off, file by file (`ingest.ingest_file`). When no file waits it embeds
in full what was sketched (`ingest.embed_in_full`), and encodes KV (`encoding.encode_missing`). It leaves a file within
two seconds when it is cancelled, paused or when somebody else wants to write; what is done of the file stays. It leaves
a passage between two layers when it is paused or a file has come; a question it lets pass.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ragblend.app.library.discovery import discover, is_gone, shown
from ragblend.app.library.encoding import KvProgress, encode_missing
from ragblend.app.library.file_checks import check_file
from ragblend.app.library.ingest import embed_in_full, ingest_file
from ragblend.app.library.job_store import OPEN, RUNNING, FileJob, JobState, JobStore
from ragblend.app.library.removal import RemovedDocument, erase_removed, remove_document
from ragblend.app.library.uploads import drop_upload, drop_uploads, keep_upload
from ragblend.app.progress import Pace, Stage
from ragblend.app.workspace import Workspaces
from ragblend.engine.scheduling.queue import end_at_exit
from ragblend.kvstore.errors import Cancelled, DocumentError, RagBlendError

log = logging.getLogger("ragblend")
STATES_OF: dict[Stage, JobState] = {"parse": "parsing", "recognise": "parsing", "embed": "embedding"}
REMOVED_A_TURN = 200
RETRY_S = 2.0
LOOK_AGAIN_S = 30.0  # whether another process still encodes


@dataclass(frozen=True)
class QueuedFiles:
    """What came of adding: files queued, files of no known kind, and (path, reason) of what cannot be read."""

    files: int
    skipped: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class QueueOverview:
    """How far the queue is. waiting: why the worker cannot work just now; current: the file that it works on;

    changes: another number whenever anything was written to the queue, also if all counts are what they were; kv: how
    far the KV of what can be asked already is, None when nothing is encoded; kv_message: why some is left without;
    is_idle: all files are read, and all KV is there.
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
    """Files on their way into one home. Safe for threads; one per process does the work, once it is started."""

    def __init__(self, workspaces: Workspaces) -> None:
        self.workspaces, self.store = workspaces, JobStore(workspaces.home.jobs)
        self._wakened, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._uploading = threading.Lock()  # from a copy in the home to its place in the queue
        self._left: int | None = None  # the job that was cancelled under our hands
        self._pace, self._paused = Pace(), self.store.fact("paused") == "yes"
        self._waiting: str | None = None  # why it cannot work just now
        self._current: FileJob | None = None  # the file in hand, as far as it is
        self._kv: KvProgress | None = None
        self._kv_message, self._is_idle = "", False

    def start(self) -> None:
        """Begin to work, in a thread; what an earlier process left is gone on with. Only for who holds the home's page
        lock: of another process that works, what it is working on would be taken for left.
        """
        if not self._is_alive:
            self.store.requeue_running()  # what a killed process was working on
            self._ending.clear()
            self._thread = threading.Thread(target=self._run, name="ragblend-ingest", daemon=True)
            self._thread.start()
            end_at_exit(self)

    def end(self) -> None:
        """Leave the file that is worked on, and wait until nothing is written any more."""
        self._ending.set()
        self._wakened.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.end()
        self.store.close()

    # --- what goes in and out

    def add(self, paths: Sequence[Path], collection: str) -> QueuedFiles:
        """Queue files and folders. Raises SettingsError for what cannot be a collection."""
        self.workspaces.of(collection)
        found = discover(list(paths))
        failed = tuple((shown(path), str(error)) for path, error in found.failed)
        # A folder may have the home in it.
        files = [(str(path), _size(path)) for path in found.files if not self._is_ours(path)]
        count = self.store.add("ingest", collection, files)
        self.wake()
        return QueuedFiles(count, tuple(map(shown, found.skipped)), failed)

    def upload(self, paths: Sequence[Path], collection: str) -> QueuedFiles:
        """Copy files into the home and queue the copies. Raises StoreFullError; what was copied before is queued."""
        self.workspaces.of(collection)
        found = discover(list(paths))
        copies, failed = [], [(path.name, str(error)) for path, error in found.failed]
        with self._uploading:
            try:
                for path in found.files:
                    try:
                        check_file(path)
                        copies.append(keep_upload(self.workspaces.home, collection, path))
                    except DocumentError as error:
                        failed.append((path.name, str(error)))
            finally:
                added = self.add(copies, collection)
        return replace(
            added, skipped=tuple(path.name for path in found.skipped), failed=(*failed, *added.failed)
        )

    def gone(self, paths: Sequence[Path], collection: str) -> int:
        """Queue the removal of documents whose files went. Returns how many were known."""
        library = self.workspaces.library
        known = [str(path) for path in paths if library.document(collection, str(path))]
        if known:
            self.store.add("remove", collection, [(path, 0) for path in known])
            self.wake()
        return len(known)

    def remove(self, document_ids: Sequence[str], collection: str) -> list[RemovedDocument]:
        """Take documents out now, before the queue goes on; ids that nobody knows are left out. Raises LibraryError."""
        workspace, removed = self.workspaces.of(collection), list[RemovedDocument]()
        for start in range(0, len(document_ids), REMOVED_A_TURN):
            with self.workspaces.writing():
                known = workspace.library.documents_with(document_ids[start : start + REMOVED_A_TURN])
                mine = [document for document in known.values() if document.collection == collection]
                removed += [remove_document(workspace, document) for document in mine]
        self.wake()  # there may be room for other KV now
        return removed

    def remove_collection(self, collection: str) -> tuple[list[RemovedDocument], int]:
        """Take a collection out: its documents, what came from prompts, and itself. Raises LibraryError.

        Returns what went of its documents, and the bytes freed in all.
        """
        self.store.forget_collection(collection)
        documents = self.workspaces.library.documents(collection)
        removed = self.remove([document.id for document in documents], collection)
        with self.workspaces.writing():  # what no document owns
            freed = self.workspaces.of(collection).engine.forget_all()
            with self._uploading:
                freed += drop_uploads(self.workspaces.home, collection)
        self.workspaces.forget(collection)
        return removed, freed + sum(one.bytes_freed for one in removed)

    # --- how far it is

    def overview(self) -> QueueOverview:
        counts = self.store.counts()
        left, total = sum(counts[state] for state in OPEN), sum(counts.values())
        waiting = self._waiting if left or self._kv else None
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
        """As `JobStore.page`, and how far the file in hand is."""
        (jobs, total), current = self.store.page(state, search, offset, limit, collection), self._current
        if current is not None:
            jobs = [current if j.id == current.id and j.state in RUNNING else j for j in jobs]
        return jobs, total

    # --- what people do to it

    def pause(self) -> None:
        """Leave the file that is worked on and begin no other, also after a restart."""
        self.store.set_fact("paused", "yes")
        self._paused = True

    def resume(self) -> None:
        self.store.set_fact("paused", "")
        self._paused = False
        self.wake()

    def cancel(self, job_ids: Sequence[int] | None = None) -> int:
        """Cancel these, or all that are not over; the file that is worked on is left. Returns how many."""
        count, current = self.store.cancel(job_ids), self._current
        if current is not None and (job_ids is None or current.id in job_ids):
            self._left = current.id
        return count

    def retry(self, job_ids: Sequence[int] | None = None) -> int:
        """Queue these, or all, of the failed and cancelled ones again. Returns how many."""
        count = self.store.retry(job_ids)
        self.wake()
        return count

    def clear_finished(self) -> int:
        """As `JobStore.clear_finished`; the copies of uploads that were cancelled go, too. Raises LibraryError."""
        if self._cancelled_copies():
            with self.workspaces.writing(), self._uploading:  # no file is in hand, and none on its way
                for path in self._cancelled_copies():
                    drop_upload(self.workspaces.home, path)
        return self.store.clear_finished()

    def _cancelled_copies(self) -> list[Path]:
        """Those of this queue's own files that are no documents."""
        originals, library = self.workspaces.home.originals, self.workspaces.library
        jobs, _ = self.store.page("cancelled", "", 0, -1)
        copies = [job for job in jobs if Path(job.path).parent == originals / job.collection]
        return [Path(job.path) for job in copies if library.document(job.collection, job.path) is None]

    def wake(self) -> None:
        """Look again for what there is to do: a file, or what lacks KV."""
        self._is_idle = False
        self._wakened.set()

    # --- the thread

    @property
    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wakened.clear()
            if self._paused and not self._ending.is_set():  # who ends has wakened it before
                self._wakened.wait()
                continue
            try:
                if self.store.next() is not None:
                    self._turn()
                    self._waiting = None
                else:
                    self._encode()
                continue
            except RagBlendError as error:  # another process writes, the disk is full, the model is missing
                self._waiting = str(error)
            except Exception as error:
                log.exception("the ingest queue stumbled, and tries again")
                self._waiting = f"{type(error).__name__}: {error}"
            self._ending.wait(RETRY_S)

    def _encode(self) -> None:
        """Embed and encode what is left, in all collections, until a file comes; then wait for what comes next."""
        settings = self.workspaces.settings

        def leave() -> bool:
            called = self._paused or self._ending.is_set() or self._wakened.is_set()
            return called or self.workspaces.settings is not settings

        def show(progress: KvProgress) -> None:
            self._kv, self._waiting = progress, None

        def show_embedding(stage: Stage, done: int, total: int, name: str = "") -> None:
            show(KvProgress("embedding", collection, done, total, document=name))

        reports = []
        for collection in self.workspaces.names():
            if leave():
                return
            workspace = self.workspaces.of(collection)
            if not embed_in_full(workspace, show_embedding, leave):
                return
            reports.append(encode_missing(workspace, show, leave))
        self._kv, self._waiting = None, None
        if leave():
            return
        self._kv_message = " ".join(dict.fromkeys(each.message for each in reports if each.message))
        self._is_idle = True
        elsewhere = any(each.stopped == "elsewhere" for each in reports)
        while not self._wakened.wait(LOOK_AGAIN_S):
            if elsewhere or self.workspaces.settings is not settings:  # another budget, say
                break
        self._is_idle = False

    def _turn(self) -> None:
        """Work until the queue is empty or somebody else wants to write: one file at least before who is patient."""
        with self.workspaces.writing():
            self._waiting, lets_pass = None, False
            self.store.requeue_running()  # what a full disk kept us from putting back
            while not (self._disturbed or lets_pass) and (job := self.store.next()) is not None:
                begun = time.monotonic()
                if self._one(job):
                    self._pace.add(time.monotonic() - begun)
                lets_pass = self.workspaces.is_wanted

    @property
    def _disturbed(self) -> bool:
        return self._paused or self._ending.is_set() or self.workspaces.is_hurried

    def _one(self, job: FileJob) -> bool:
        """Whether it came to an end, good or bad."""
        self._left, self._current = None, job
        try:
            state, reason = self._done(job)
            self.store.finish(job.id, state, reason)
            return True
        except Cancelled:
            self.store.put_back(job.id)
            return False
        except BaseException:
            self.store.put_back(job.id)
            raise
        finally:
            self._current = None

    def _done(self, job: FileJob) -> tuple[JobState, str]:
        if job.kind == "remove":
            return self._gone(job), ""

        def show(stage: Stage, done: int, total: int, name: str = "") -> None:
            assert self._current is not None
            state = STATES_OF[stage]
            if self._current.state != state and not self.store.start(job.id, state):
                self._left = job.id
            self._current = replace(self._current, state=state, done=done, total=total)

        def leave() -> bool:
            return self._disturbed or self._left == job.id

        try:
            behind = self.store.counts()["queued"] - 1  # itself has not begun
            report = ingest_file(self.workspaces.of(job.collection), Path(job.path), show, leave, behind)
        except DocumentError as error:
            return "failed", str(error)
        except (RagBlendError, OSError, MemoryError):
            raise
        except Exception as error:  # a bug of ours or a parser's must not stop the other files
            log.exception("ingesting %s failed", job.path)
            return "failed", f"Reading {job.path}: {type(error).__name__}: {error}. Please report this."
        return ("unchanged" if report.unchanged else "done"), report.notice or ""

    def _gone(self, job: FileJob) -> JobState:
        """The file of a document went. One that came back meanwhile stays."""
        document = self.workspaces.library.document(job.collection, job.path)
        if document is None or not is_gone(Path(job.path)):
            return "unchanged"
        workspace = self.workspaces.of(document.collection)
        remove_document(workspace, document)
        if not self.store.has_other(job):  # the worker may go on for hours
            erase_removed(self.workspaces)
        return "done"

    def _is_ours(self, path: Path) -> bool:
        """Whether it is a file of the home itself, whatever link it is named through; the copies of uploads are not."""
        home, real = self.workspaces.home, Path(os.path.realpath(path))
        return real.is_relative_to(home.root.resolve()) and not real.is_relative_to(home.originals.resolve())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
