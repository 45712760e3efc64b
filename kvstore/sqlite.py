"""SqliteFile: opens all our SQLite files, with transactions, detection of damage and named errors. Imports no torch."""

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from diskcache import Timeout

from ragblend.kvstore.errors import StoreError, StoreFormatError, StoreFullError, StoreLockedError
from ragblend.kvstore.files import Closing, discard_database, identity, is_same_file, make_private_file

log = logging.getLogger(__name__)
BUSY_SECONDS = 30.0
BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
NO_SHARED_MEMORY = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN}
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# UnicodeDecodeError, because SQLite quotes a damaged schema in its message, and Python decodes that strictly.
SQL_ERRORS = (sqlite3.Error, Timeout, UnicodeDecodeError)
_RETRY_SECONDS = 0.005
_temporary_folder_lock = threading.Lock()  # SQLite's setting applies to the whole process


class DamagedFileError(StoreError):
    """A rebuildable file was damaged, and is empty now."""


def connect(path: Path | str) -> sqlite3.Connection:
    """A connection that threads may share and that waits for other processes; transactions are explicit."""
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def connect_to_read(path: Path) -> tuple[sqlite3.Connection, bool]:
    """A connection for reading, and whether it may be used only once.

    A database with a write-ahead log needs a shared memory file, for which a full disk has no room. If the log is
    empty, the database is then opened as immutable, which is correct until another process writes.
    """
    sql = connect(path)
    try:
        sql.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError as error:
        log_file = Path(f"{path}-wal")
        if error_code(error) not in NO_SHARED_MEMORY or (log_file.exists() and log_file.stat().st_size):
            return sql, False
        sql.close()
        uri = f"{path.absolute().as_uri()}?immutable=1"
        return sqlite3.connect(uri, isolation_level=None, check_same_thread=False, uri=True), True
    except sqlite3.DatabaseError:
        pass  # the file is damaged; its first use raises the error
    return sql, False


def enable_write_ahead_log(sql: sqlite3.Connection, synchronous: str = "NORMAL") -> None:
    """Switch to write-ahead logging and secure deletion, waiting for a process that opens the file at that moment.

    SQLite itself does not wait here: it upgrades a read lock, where two processes could deadlock.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            sql.execute("PRAGMA journal_mode = WAL").fetchall()
            break
        except sqlite3.OperationalError as error:
            if error_code(error) not in BUSY or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)
    for pragma in (f"synchronous = {synchronous}", "secure_delete = ON"):
        sql.execute(f"PRAGMA {pragma}").fetchall()


def lenient_text(raw: bytes) -> str:
    """Decode text without raising, because a damaged row must be listed to be removed."""
    return raw.decode("utf-8", "replace")


def integrity(sql: sqlite3.Connection, at_most: int) -> list[str]:
    """SQLite's integrity check of a file; its error message if the file is too damaged to check."""
    try:
        found = [str(line) for (line,) in sql.execute(f"PRAGMA integrity_check({at_most})")]
    except UnicodeDecodeError as error:
        return [f"its schema is not text: {error}"]
    except sqlite3.DatabaseError as error:
        if error_code(error) not in DAMAGED:
            raise
        return [str(error)]
    return [] if found == ["ok"] else found


def schema_of(sql: sqlite3.Connection) -> dict[str, str]:
    """The SQL of all tables, indexes and triggers by name. SQLite does not detect a flipped bit in them."""
    return dict(sql.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


@contextmanager
def transaction(sql: sqlite3.Connection) -> Iterator[None]:
    """A transaction. On a full disk SQLite itself rolls back; a second rollback would raise and hide the cause."""
    sql.execute("BEGIN IMMEDIATE")
    try:
        yield
        sql.execute("COMMIT")
    except BaseException:
        if sql.in_transaction:
            sql.execute("ROLLBACK")
        raise


def error_code(error: Exception) -> int:
    """SQLite's primary error code; 0 for errors of Python's module (text that is not UTF-8, say)."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def is_damage(error: Exception) -> bool:
    """Whether an exception from SQLite means that the file is damaged.

    Python's module reports text that is not UTF-8 without an error code.
    """
    is_no_text = isinstance(error, UnicodeDecodeError | sqlite3.OperationalError) and "decode" in str(error)
    return is_no_text or error_code(error) in DAMAGED


class SqliteFile(Closing):
    """One SQLite file, created or opened: one connection, shared by the threads of this process.

    The file is checked when it is opened. A damaged one is deleted and created again, not set aside, because it holds
    text that users may have deleted. If another process has replaced the file, the new one is used. Raises StoreError,
    StoreFormatError for another version.

    A subclass sets what: the file's name in messages; version: of the tables and their content; tables: the statements
    that create them; remedy: how a rebuilt file is refilled; synchronous: FULL if a commit must survive a power cut,
    NORMAL if only a kill, which costs no fsync; full_text: the table of the word index (FTS5), which can be rebuilt
    from the other tables.
    """

    what: ClassVar[str]
    version: ClassVar[int]
    tables: ClassVar[tuple[str, ...]]
    remedy: ClassVar[str] = ""
    synchronous: ClassVar[str] = "NORMAL"
    full_text: ClassVar[str] = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._sql: sqlite3.Connection | None = None
        self._identity = 0, 0
        self._closed = self._is_single_use = False
        self.generation = 0  # increases when the file is replaced
        with self.connection():
            pass

    # --- using

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection, one thread at a time; DamagedFileError if the file had to be rebuilt."""
        with self._lock:
            try:
                yield self._connected()
            except (OSError, *SQL_ERRORS) as error:
                raise self._named_error(error) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection in one transaction, rolled back after an exception."""
        with self.connection() as sql, transaction(sql):
            yield sql

    def rows(self, query: str, *values: object) -> list[Any]:
        """All rows of a query."""
        with self.connection() as sql:
            return sql.execute(query, values).fetchall()

    def column(self, query: str, *values: object) -> list[Any]:
        """The first value of each row."""
        return [row[0] for row in self.rows(query, *values)]

    def execute(self, query: str, *values: object) -> sqlite3.Cursor:
        """Run one statement in a transaction."""
        with self.transaction() as sql:
            return sql.execute(query, values)

    def erase_log(self) -> bool:
        """Empty the write-ahead log, which still holds deleted rows; False if other processes keep reading it."""
        with self.connection() as sql:
            is_empty = not sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if not is_empty:
            log.warning("%s-wal still holds deleted rows, until other processes stop reading it", self.path)
        return is_empty

    def erase(self) -> bool:
        """Rewrite the file without deleted rows; False if other processes keep using it, or a copy has no room.

        SQLite overwrites a deleted row (`secure_delete`), but not copies in pages where it once moved rows. FTS5 only
        marks deleted rows until the parts of its index are merged.
        """
        folder = str(self.path.parent).replace("'", "''")
        with _temporary_folder_lock, self.connection() as sql:
            sql.execute(f"PRAGMA temp_store_directory = '{folder}'")  # for the temporary copy of the file
            try:
                for statement in (*self._full_text("optimize"), "VACUUM"):
                    sql.execute(statement)
                done = True
            except sqlite3.OperationalError as error:
                if error_code(error) not in {*BUSY, sqlite3.SQLITE_FULL}:
                    raise
                done = False
            finally:
                sql.execute("PRAGMA temp_store_directory = ''")
        return self.erase_log() and done

    def _full_text(self, command: str) -> list[str]:
        """The statement of an FTS5 command, if there is a full-text table."""
        name = self.full_text
        return [f"INSERT INTO {name} ({name}) VALUES ('{command}')"] if name else []

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._disconnect()

    # --- opening

    def _connected(self) -> sqlite3.Connection:
        if self._closed:
            raise sqlite3.ProgrammingError(f"the {self.what} has been closed; open it again")
        if self._sql is not None and (self._sql.in_transaction or not self._must_reopen()):
            return self._sql
        try:
            return self._open()
        except SQL_ERRORS as error:
            if not is_damage(error):
                raise
            self._handle_damage(str(error))
            return self._open()

    def _must_reopen(self) -> bool:
        """Whether the open connection cannot be used again."""
        return self._is_single_use or not is_same_file(self.path, self._identity)

    def _open(self) -> sqlite3.Connection:
        self._disconnect()
        make_private_file(self.path)  # SQLite gives its logs the mode of the file
        self._identity = identity(self.path.stat())
        sql, self._is_single_use = connect_to_read(self.path)
        try:
            self._configure(sql)
            self._prepare(sql)
        except BaseException:
            sql.close()
            raise
        self._sql, self.generation = sql, self.generation + 1
        return sql

    def _configure(self, sql: sqlite3.Connection) -> None:
        """Settings of every new connection."""

    def _prepare(self, sql: sqlite3.Connection) -> None:
        """Check an existing file, and create the tables of a new one."""
        found = sql.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, self.version):
            raise self._other_version_error(found)
        if problems := integrity(sql, 1):
            raise damage_error(problems[0])
        if not self._is_single_use:
            enable_write_ahead_log(sql, self.synchronous)
        if not found:  # an existing file is only read, because the disk may be full
            with transaction(sql):
                if not sql.execute("SELECT 1 FROM sqlite_master").fetchone():
                    self._make_tables(sql)
        if self._schema(sql) != self._expected_schema():
            raise damage_error("its tables are not those that this version creates")

    def _make_tables(self, sql: sqlite3.Connection) -> None:
        for statement in self.tables:
            sql.execute(statement)
        sql.execute(f"PRAGMA user_version = {self.version}")

    def _schema(self, sql: sqlite3.Connection) -> dict[str, str]:
        """The schema of our own tables; FTS5's internal ones differ between versions."""
        internal_prefix = f"{self.full_text}_"
        return {
            name: statement
            for name, statement in schema_of(sql).items()
            if not (self.full_text and name.startswith(internal_prefix))
        }

    def _expected_schema(self) -> dict[str, str]:
        with closing(connect(":memory:")) as sql:
            self._configure(sql)
            self._make_tables(sql)
            return self._schema(sql)

    def _disconnect(self) -> None:
        if self._sql is not None:
            self._sql.close()
        self._sql = None

    # --- damage and errors

    def _other_version_error(self, found: int) -> Exception:
        return StoreFormatError(
            f"opening the {self.what} {self.path}: expected format {self.version}, found {found}. Remove that file: "
            f"{self.remedy}."
        )

    def _handle_damage(self, why: str) -> None:
        """Delete the damaged file, unless another process has already replaced it."""
        self._disconnect()
        if is_same_file(self.path, self._identity):
            log.warning("the %s %s is damaged and is rebuilt: %s", self.what, self.path, self.remedy)
            discard_database(self.path)

    def _named_error(self, error: Exception) -> Exception:
        """The named error for an error of SQLite or the file system."""
        if isinstance(error, OSError):
            return StoreError(
                f"opening the {self.what} {self.path} failed: {error}. Check its owner and permissions."
            )
        if is_damage(error):
            self._handle_damage(str(error))
            return DamagedFileError(f"using {self.path}: it was damaged and is rebuilt.")
        if isinstance(error, Timeout) and isinstance(error.__context__, sqlite3.Error):
            error = error.__context__  # diskcache calls every failed BEGIN a timeout, a full disk too
        code = error_code(error)
        if code in BUSY or isinstance(error, Timeout):
            return StoreLockedError(
                f"using {self.path}: another program kept it locked. Close it, or try again."
            )
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"writing to {self.path}: the disk is full. Free some space; nothing stored is lost."
            )
        return StoreError(
            f"using {self.path} failed: {error}. If it persists, close every program that uses this home and run "
            "`ragblend store repair`; KV can be rebuilt, and no document is in there."
        )


def damage_error(why: str) -> sqlite3.DatabaseError:
    """An error like SQLite's for a damaged file, for damage that it does not detect."""
    error = sqlite3.DatabaseError(why)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
