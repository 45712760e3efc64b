"""Deletions that can be undone for ten minutes: a document is hidden first, and deleted permanently later.

Meanwhile this process holds `undo.lock` in the home. The hidden documents of a process that was killed are deleted when
the page or the server starts, or by the next command that calls `delete_abandoned`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from ragblend.app.library.documents import Document
from ragblend.app.library.ingest import restore_document
from ragblend.app.library.jobs import JobQueue
from ragblend.app.library.removal import delete_abandoned, delete_permanently, hide_document, lock_undo
from ragblend.kvstore.errors import LibraryError, RagBlendError, StoreLockedError
from ragblend.kvstore.files import Closing

UNDO_S = 600.0
RETRY_S = 30.0  # after an error, or while a file is queued again
log = logging.getLogger("ragblend")


class UndoableDeletions(Closing):
    """The deletions that this process can undo; closing it completes them. Thread-safe. clock: monotonic, in seconds.

    Its deadlines are changed only by the thread that holds the writer lock.
    """

    def __init__(self, jobs: JobQueue, clock: Callable[[], float] = time.monotonic) -> None:
        self._jobs, self._workspaces, self._clock = jobs, jobs.workspaces, clock
        self._deadlines = dict[str, float]()  # by document id
        self._lock = threading.Lock()  # guards the following
        self._lock_file: int | None = None
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def start(self) -> None:
        """Delete the documents that a killed process left hidden, in the background."""
        abandoned = {each.id: self._clock() for each in self._workspaces.library.hidden()}
        self._deadlines = abandoned | self._deadlines
        self._set_timer(0)

    def delete(self, document_ids: Sequence[str], collection: str) -> int:
        """Hide documents of a collection, and delete them unless `undo` follows in time. Unknown ids are ignored.

        Returns how many were hidden. Raises LibraryError, StoreLockedError.
        """
        workspace = self._workspaces.of(collection)
        with self._workspaces.writing():
            known = workspace.library.documents_with(document_ids).values()
            found = [document for document in known if document.collection == collection]
            if found:
                self._lock_undo()
            try:
                for document in found:
                    self._deadlines[document.id] = self._clock() + UNDO_S
                    hide_document(workspace, document)
            finally:
                self._set_timer(RETRY_S)
        self._jobs.wake()
        return len(found)

    def _lock_undo(self) -> None:
        """Keep other processes from deleting what this one hides. Raises LibraryError, StoreLockedError."""
        root = self._workspaces.home.root
        with self._lock:
            if self._is_closed:
                raise LibraryError(f"Deleting from {root}: RAGBlend is ending there, so nothing was deleted.")
            if self._lock_file is None:
                self._lock_file = lock_undo(self._workspaces.home)
            if self._lock_file is None:
                raise StoreLockedError(
                    f"Deleting from {root}: another process can still undo deletions there. End it."
                )

    def undo(self, document_id: str) -> None:
        """Restore a deleted document, without reading or embedding it again. Raises LibraryError if it is too late."""
        with self._workspaces.writing():
            document = next((each for each in self.pending() if each.id == document_id), None)
            if document is None:
                raise LibraryError(
                    "Undoing a deletion: the document is back already, or it was deleted for good. If it is not in the "
                    "list, add its file again."
                )
            restore_document(self._workspaces.of(document.collection), document)
        self._jobs.wake()

    def pending(self) -> list[Document]:
        """The documents that `undo` can restore, of all collections, the last one deleted first."""
        deadlines, now = self._deadlines, self._clock()
        hidden = [each for each in self._workspaces.library.hidden() if deadlines.get(each.id, now) > now]
        return sorted(hidden, key=lambda each: -deadlines[each.id])

    def delete_expired(self) -> None:
        """Delete the hidden documents that can no longer be restored. Raises LibraryError."""
        with self._workspaces.writing():
            library, pending = self._workspaces.library, {each.id for each in self.pending()}
            delete_permanently(
                self._workspaces, [each for each in library.hidden() if each.id not in pending]
            )
            now = self._clock()
            self._deadlines = {each.id: self._deadlines.get(each.id, now) for each in library.hidden()}
        self._jobs.wake()  # there may be room for more KV now

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            timer, lock_file, self._lock_file = self._timer, self._lock_file, None
        if timer is not None:
            timer.cancel()
            timer.join()
        if lock_file is not None:
            os.close(lock_file)
            try:
                with self._workspaces.writing():
                    delete_abandoned(self._workspaces)
            except RagBlendError as error:
                log.warning("%s Deleted documents stay hidden until the page starts again.", error)

    def _set_timer(self, at_least_s: float) -> None:
        """Call `_on_timer` at the next deadline, unless that is set already: later deletions have later deadlines."""
        now = self._clock()
        with self._lock:
            if self._is_closed or self._timer not in (None, threading.current_thread()):
                return
            self._timer = None
            if self._deadlines:
                wait_s = max(at_least_s, min(self._deadlines.values()) - now)
                self._timer = threading.Timer(wait_s, self._on_timer)
                self._timer.daemon = True
                self._timer.start()

    def _on_timer(self) -> None:
        try:
            self.delete_expired()
        except Exception as error:  # another process writes, say
            log.warning("%s Deleted documents stay hidden, and this is tried again.", error)
        self._set_timer(RETRY_S)
