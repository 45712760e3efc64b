"""The worker: the one thread that works a home's queue off, file by file, until it is empty or it is disturbed.

It leaves a file within two seconds when it is cancelled, paused or when somebody else wants to write; what is done of
the file stays.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ragblend.app.home_writer import HomeWriter
from ragblend.app.ingest import ingest_file
from ragblend.app.job_store import FileJob, JobStore, State
from ragblend.app.pace import Pace
from ragblend.app.watch import Phase, Watch
from ragblend.app.workspaces import Workspaces
from ragblend.kvstore.errors import Cancelled, DocumentError, RagBlendError

log = logging.getLogger("ragblend")
RETRY_S = 2.0


class JobWorker:
    """The one thread that ingests. `current` is the file in its hands, as far as it is.

    gone(job): takes out a document whose file went, and says what became of it.
    """

    def __init__(
        self,
        workspaces: Workspaces,
        store: JobStore,
        writer: HomeWriter,
        gone: Callable[[FileJob], State],
    ) -> None:
        self._workspaces, self._store, self._writer, self._gone = workspaces, store, writer, gone
        self._wakened, self._ending = threading.Event(), threading.Event()
        self._left: int | None = None  # the job that was cancelled under our hands
        self._thread: threading.Thread | None = None
        self.pace = Pace()
        self.paused = store.fact("paused") == "yes"
        self.waiting: str | None = None
        self.current: FileJob | None = None

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        if not self.is_alive:
            from ragblend.engine.scheduler import end_at_exit

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

    def wake(self) -> None:
        """There is something to do."""
        self._wakened.set()

    def leave(self, job_ids: Sequence[int] | None) -> None:
        """If it works on one of these (None: on any), it is to leave it."""
        current = self.current
        if current is not None and (job_ids is None or current.id in job_ids):
            self._left = current.id

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wakened.clear()
            if not self.paused and self._store.next() is not None:
                try:
                    self._turn()
                    self.waiting = None
                    continue
                except (
                    RagBlendError
                ) as error:  # another process writes, the disk is full, the model is missing
                    self.waiting = str(error)
                except Exception as error:
                    log.exception("the ingest queue stumbled, and tries again")
                    self.waiting = f"{type(error).__name__}: {error}"
                self._ending.wait(RETRY_S)
                continue
            self._wakened.wait()

    def _turn(self) -> None:
        """Work until the queue is empty or somebody else wants to write."""
        with self._writer.turn():
            self.waiting = None
            self._store.requeue_running()  # what a full disk kept us from putting back
            while not self._disturbed and (job := self._store.next()) is not None:
                begun = time.monotonic()
                if self._one(job):
                    self.pace.add(time.monotonic() - begun)

    @property
    def _disturbed(self) -> bool:
        return self.paused or self._ending.is_set() or self._writer.wanted

    def _one(self, job: FileJob) -> bool:
        """Whether it came to an end, good or bad."""
        self._left, self.current = None, job
        try:
            state, reason = self._done(job)
            self._store.finish(job.id, state, reason)
            return True
        except Cancelled:
            self._store.put_back(job.id)
            return False
        except BaseException:
            self._store.put_back(job.id)
            raise
        finally:
            self.current = None

    def _done(self, job: FileJob) -> tuple[State, str]:
        if job.kind == "remove":
            return self._gone(job), ""

        def phase(name: Phase, done: int, total: int) -> None:
            current = self.current
            assert current is not None
            if current.state != name and not self._store.start(job.id, name):
                self._left = job.id
            self.current = replace(current, state=name, done=done, total=total)

        def interrupted() -> bool:
            return self._disturbed or self._left == job.id

        try:
            report = ingest_file(
                self._workspaces.of(job.collection), Path(job.path), Watch(phase, interrupted)
            )
        except DocumentError as error:
            return "failed", str(error)
        except (RagBlendError, OSError, MemoryError):
            raise
        except Exception as error:  # a bug of ours or a parser's must not stop the other files
            log.exception("ingesting %s failed", job.path)
            return "failed", f"Reading {job.path}: {type(error).__name__}: {error}. Please report this."
        return ("unchanged" if report.unchanged else "done"), report.notice or ""
