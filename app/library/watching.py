"""Watches folders: new, changed, moved and deleted files become jobs of the ingest queue.

A folder is scanned when watching begins, to find earlier changes. The operating system's events are only hints: a path
that exists is ingested, and one that does not is removed, whatever the event said.
"""

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from ragblend.app.home import absolute
from ragblend.app.library.discovery import is_gone, is_home, is_readable, is_skipped
from ragblend.app.library.documents import as_path, printable
from ragblend.app.library.jobs import JobQueue
from ragblend.kvstore.errors import UsageError

log = logging.getLogger("ragblend")
QUIET_MS = 800  # how long a file must not change before it is ingested
RETRY_S = 10.0


class Watcher:
    """The watched folders of one home; their list is stored with the queue. Thread-safe."""

    def __init__(self, jobs: JobQueue, quiet_ms: int = QUIET_MS) -> None:
        self._jobs, self._quiet_ms = jobs, quiet_ms
        self._lock, self._started = threading.Lock(), False
        rows = jobs.store.rows("SELECT id, path, collection FROM watched ORDER BY id")
        self._folders = {row["id"]: WatchedFolder(*row) for row in rows}

    def add(self, path: Path, collection: str) -> "WatchedFolder":
        """Watch a folder from now on. Raises UsageError if it is not a folder, or is watched already."""
        folder = absolute(path)
        if not os.path.isdir(folder):
            raise UsageError(f"Watching {folder}: there is no such folder. Check the path.")
        self._jobs.workspaces.of(collection)  # raises SettingsError for an invalid name
        with self._lock:
            for other in (each.path for each in self._folders.values() if each.collection == collection):
                if folder.is_relative_to(as_path(other)) or as_path(other).is_relative_to(folder):
                    raise UsageError(f"Watching {folder}: {other} is watched for {collection!r} already.")
            query = "INSERT INTO watched (path, collection) VALUES (?, ?)"
            key = self._jobs.store.execute(query, printable(folder), collection).lastrowid
            assert key is not None
            watched = self._folders[key] = WatchedFolder(key, printable(folder), collection)
            if self._started:
                watched.start(self._jobs, self._quiet_ms)
        return watched

    def remove(self, watched_id: int) -> None:
        """Stop watching that folder; its documents stay."""
        self._jobs.store.execute("DELETE FROM watched WHERE id = ?", watched_id)
        with self._lock:
            folder = self._folders.pop(watched_id, None)
        if folder is not None:
            folder.end()

    def folders(self) -> "list[WatchedFolder]":
        """All watched folders, in the order in which they were added."""
        with self._lock:
            return list(self._folders.values())

    def start(self) -> None:
        """Scan and watch all folders, a thread each."""
        with self._lock:
            self._started = True
            for folder in self._folders.values():
                folder.start(self._jobs, self._quiet_ms)

    def close(self) -> None:
        """Stop watching for good."""
        with self._lock:
            self._started = False
        for folder in self.folders():
            folder.end()


class WatchedFolder:
    """A folder and its collection. While it is missing (an unplugged disk, say) its documents stay.

    reason: why it is not being watched at the moment, or "".
    """

    _jobs: JobQueue
    _quiet_ms: int

    def __init__(self, id: int, path: str, collection: str) -> None:
        self.id, self.path, self.collection = id, path, collection
        self.reason = "watching has not started"
        self._path, self._ending = as_path(path), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragblend-watch", daemon=True)

    def start(self, jobs: JobQueue, quiet_ms: int) -> None:
        """Scan it, and watch it until `end`. quiet_ms: how long a file must not change before it is ingested."""
        self._jobs, self._quiet_ms = jobs, quiet_ms
        self.reason = "it has not been scanned yet"
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

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
            self._apply_changes(_path_of_event(Path(path)) for _, path in changes)

    def _scan(self) -> None:
        """Find earlier changes. An empty folder is more likely an unmounted disk than a wish to delete everything."""
        self._jobs.add([self._path], self.collection)
        missing = self._missing_in(self._path)
        if missing and not any(self._path.iterdir()):
            self.reason = (
                f"{self._path} is empty. In case its disk is not mounted, its {len(missing)} documents stay; delete "
                "them in the list if you do not need them."
            )
            return
        self._jobs.queue_removal(missing, self.collection)
        self.reason = ""

    def _missing_in(self, folder: Path) -> list[Path]:
        known = self._jobs.workspaces.library.paths_below(self.collection, printable(folder))
        return [path for path in map(as_path, known) if is_gone(path)]

    def _apply_changes(self, paths: Iterable[Path]) -> None:
        """Queue the jobs for changed paths; moving a whole folder is one event."""
        skip, home = self._jobs.workspaces.settings.skip, self._jobs.workspaces.home.root
        changed = {path for path in paths if not _is_skipped(path, self._path, skip, home)}
        not_linked = [path for path in changed if not _is_behind_link(path, self._path)]
        existing = [p for p in not_linked if os.path.isdir(p) or (is_readable(p) and not is_gone(p))]
        if existing:
            self._jobs.add(existing, self.collection)
        for path in changed:  # documents below a path are missing also if a file has replaced the folder
            gone = [path] if is_gone(path) else []
            self._jobs.queue_removal([*gone, *self._missing_in(path)], self.collection)


def _path_of_event(path: Path) -> Path:
    """The path of an event; its folder, if the name is not UTF-8, because the event then lacks bytes of it."""
    return path.parent if "\ufffd" in path.name and is_gone(path) else path


def _is_skipped(path: Path, root: Path, skip: str, home: Path) -> bool:
    """Whether `discover` would skip this path: by the setting `skip`, or because it is in a home within the root."""
    inside = path.relative_to(root) if path.is_relative_to(root) else path
    return any(is_skipped(part, skip) for part in inside.parts) or any(
        is_home(root / step, home) for step in (inside, *inside.parents)
    )


def _is_behind_link(path: Path, root: Path) -> bool:
    """Whether a link below the root leads to this path: links in folders are not followed, as in `discover`."""
    steps = (path, *path.parents)
    return any(os.path.islink(step) for step in steps if step != root and step.is_relative_to(root))
