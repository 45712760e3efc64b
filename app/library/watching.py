"""Watches folders: new, changed, moved and deleted files become jobs of the ingest queue.

A folder is scanned when watching begins, which finds what changed before. Events of the operating system are hints
only: a path that exists is ingested, one that does not is removed, whatever the event said.
"""

import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ragblend.app.extras import check_installed
from ragblend.app.home import absolute
from ragblend.app.library.discovery import is_gone, is_known
from ragblend.app.library.jobs import JobQueue
from ragblend.kvstore.errors import UsageError

log = logging.getLogger("ragblend")
QUIET_MS = 800  # a file is ingested once it has not been written to for so long
RETRY_S = 10.0


@dataclass(frozen=True)
class WatchedFolder:
    """A folder and its collection. reason: why it is not being watched at the moment, or ""."""

    id: int
    path: str
    collection: str
    reason: str


class Watcher:
    """The watched folders of one home; their list is stored with the queue. Thread-safe."""

    def __init__(self, jobs: JobQueue, quiet_ms: int = QUIET_MS) -> None:
        self._jobs, self._store, self._quiet_ms = jobs, jobs.store, quiet_ms
        self._lock = threading.Lock()
        self._running: dict[int, _Folder] = {}
        self._started = False

    def add(self, path: Path, collection: str) -> WatchedFolder:
        """Watch a folder from now on. Raises UsageError if it is not a folder, or is watched already."""
        folder = absolute(path)
        if not os.path.isdir(folder):
            raise UsageError(f"Watching {folder}: there is no such folder. Check the path.")
        self._jobs.workspaces.of(collection)  # raises SettingsError for an invalid name
        for other in (each.path for each in self.folders() if each.collection == collection):
            if folder.is_relative_to(other) or Path(other).is_relative_to(folder):
                raise UsageError(f"Watching {folder}: {other} is watched for {collection!r} already.")
        self._store.execute("INSERT INTO watched (path, collection) VALUES (?, ?)", str(folder), collection)
        if self._started:
            self._begin()
        return next(w for w in self.folders() if w.path == str(folder) and w.collection == collection)

    def remove(self, watched_id: int) -> None:
        """Stop watching that folder; its documents stay."""
        self._store.execute("DELETE FROM watched WHERE id = ?", watched_id)
        with self._lock:
            folder = self._running.pop(watched_id, None)
        if folder is not None:
            folder.end()

    def folders(self) -> list[WatchedFolder]:
        """All watched folders, in the order in which they were added."""
        rows = self._store.rows("SELECT id, path, collection FROM watched ORDER BY id")
        found = []
        for row in rows:
            folder = self._running.get(row["id"])
            reason = folder.reason if folder else "watching has not started"
            found.append(WatchedFolder(row["id"], row["path"], row["collection"], reason))
        return found

    def start(self) -> None:
        """Scan and watch all folders, a thread each. Raises UsageError without the extra `ui`."""
        check_installed("Watched folders", ("watchfiles",), "ui")
        self._started = True
        self._begin()

    def close(self) -> None:
        self._started = False
        with self._lock:
            folders, self._running = list(self._running.values()), {}
        for folder in folders:
            folder.end()

    def _begin(self) -> None:
        with self._lock:
            for row in self._store.rows("SELECT id, path, collection FROM watched"):
                if row["id"] not in self._running:
                    folder = _Folder(self._jobs, Path(row["path"]), row["collection"], self._quiet_ms)
                    self._running[row["id"]] = folder
                    folder.thread.start()


class _Folder:
    """One watched folder. While it is missing (an unplugged disk, say) its documents stay."""

    def __init__(self, jobs: JobQueue, path: Path, collection: str, quiet_ms: int) -> None:
        self.reason = "it has not been scanned yet"
        self._jobs, self._path, self._collection, self._quiet_ms = jobs, path, collection, quiet_ms
        self._ending = threading.Event()
        self.thread = threading.Thread(target=self._run, name="ragblend-watch", daemon=True)

    def end(self) -> None:
        self._ending.set()
        self.thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._watch()
            except Exception as error:  # such as too many watches, or a folder that vanished
                self.reason = f"Watching {self._path}: {error or type(error).__name__}. Trying again."
                log.warning("%s", self.reason)
            self._ending.wait(RETRY_S)

    def _watch(self) -> None:
        from watchfiles import watch

        if not self._path.is_dir():
            self.reason = (
                f"{self._path} does not exist at the moment. Its documents stay, and it is checked again."
            )
            return
        events = watch(
            self._path,
            watch_filter=None,
            debounce=self._quiet_ms * 4,
            step=self._quiet_ms,
            rust_timeout=1000,
            yield_on_timeout=True,
            stop_event=self._ending,
            raise_interrupt=False,
            ignore_permission_denied=True,
        )
        first = True
        for changes in events:
            if first:  # events arrive from now on: scan for earlier changes
                self._scan()
                first = False
            if not self._path.is_dir():
                self.reason = f"{self._path} no longer exists. Its documents stay, and it is checked again."
                return
            self._apply_changes(Path(path) for _, path in changes)

    def _scan(self) -> None:
        """Find earlier changes. An empty folder is more likely an unmounted disk than a wish to delete everything."""
        self._jobs.add([self._path], self._collection)
        missing = self._missing_in(self._path)
        if missing and not any(self._path.iterdir()):
            self.reason = (
                f"{self._path} is empty. In case its disk is not mounted, its {len(missing)} documents stay; delete "
                "them in the list if you do not need them."
            )
            return
        self._jobs.remove_missing(missing, self._collection)
        self.reason = ""

    def _missing_in(self, folder: Path) -> list[Path]:
        known = self._jobs.workspaces.library.paths_below(self._collection, str(folder))
        return [path for path in map(Path, known) if is_gone(path)]

    def _apply_changes(self, paths: Iterable[Path]) -> None:
        """Queue the jobs for changed paths; moving a whole folder is one event."""
        changed = {path for path in paths if not _is_hidden(path, self._path)}
        mine = [path for path in changed if not _is_behind_link(path, self._path)]
        there = [path for path in mine if os.path.isdir(path) or (is_known(path) and not is_gone(path))]
        gone = [path for path in changed if is_gone(path)]
        if there:
            self._jobs.add(there, self._collection)
        for path in gone:
            self._jobs.remove_missing([path, *self._missing_in(path)], self._collection)


def _is_hidden(path: Path, root: Path) -> bool:
    inside = path.relative_to(root).parts if path.is_relative_to(root) else path.parts
    return any(part.startswith(".") for part in inside)


def _is_behind_link(path: Path, root: Path) -> bool:
    """Links in a folder are not followed, as in `discover`."""
    steps = (path, *path.parents)
    return any(os.path.islink(step) for step in steps if step != root and step.is_relative_to(root))
