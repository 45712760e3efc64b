"""PassageFile: the SQLite file behind a registry; rebuildable, so a damaged one is removed and made anew."""

import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ragblend.kvstore.errors import StoreError, StoreFormatError
from ragblend.kvstore.files import make_private_file, make_private_folder
from ragblend.kvstore.sqlite import DAMAGED, SQL_ERRORS, connect_rebuildable, error_code, index_failed

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class PassageFile:
    """One connection for the threads of this process, which take turns; opened when it is first needed.

    schema: statements that may be run again; version: of the schema and of what stands in it; on_close is called when
    what was read from the file before, if anything, no longer counts.
    """

    def __init__(self, path: Path, schema: str, version: int, on_close: Callable[[], None]) -> None:
        self.path, self._schema, self._version, self._on_close = path, schema, version, on_close
        self._lock = threading.RLock()
        self._inode = 0
        self.sql: sqlite3.Connection | None = None

    def run(self, work: Work[T]) -> T:
        """Do `work` with the connection; once more, with a new file, if that one turns out to be damaged.

        Raises StoreError and its kinds.
        """
        with self._lock:
            try:
                try:
                    return work(self._connected())
                except SQL_ERRORS as error:
                    if not _is_damage(error):
                        raise
                    self.make_anew()
                    return work(self._connected())
            except SQL_ERRORS as error:
                raise index_failed(error, self.path) from error
            except OSError as error:
                raise StoreError(
                    f"using the passage registry {self.path} failed: {error}. Check who owns it."
                ) from error

    def close(self) -> None:
        """Close the file, for everybody who has this object; who uses it again opens it again."""
        with self._lock:
            if self.sql is not None:
                self.sql.close()
            self.sql = None
            self._on_close()

    def make_anew(self) -> None:
        """Remove the file, unless another process has put a new one in its place."""
        self.close()
        if _inode(self.path) != self._inode:
            return
        log.warning(
            "the passage registry %s is damaged; it is made anew and fills as passages come", self.path
        )
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def truncate_log(self, sql: sqlite3.Connection) -> None:
        """Take what was deleted out of the write-ahead log as well."""
        if sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            log.warning("%s-wal keeps deleted hashes until its other readers are done", self.path)

    def _connected(self) -> sqlite3.Connection:
        if self.sql is not None and _inode(self.path) == self._inode:
            return self.sql
        self.close()  # or another process has put a new file in the place of a damaged one
        if not self.path.parent.exists():
            make_private_folder(self.path.parent)
        make_private_file(self.path)
        self._inode = _inode(self.path)
        self.sql = connect_rebuildable(self.path, self._schema, self._version, self._refused)
        return self.sql

    def _refused(self, found: int) -> StoreFormatError:
        return StoreFormatError(
            f"opening the passage registry {self.path}: expected format {self._version}, found {found}. Remove "
            "that file: it fills again as passages are registered."
        )


def _is_damage(error: Exception) -> bool:
    """SQLite quotes the damaged text of a schema in its message, which Python then cannot decode."""
    return isinstance(error, UnicodeDecodeError) or error_code(error) in DAMAGED


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
