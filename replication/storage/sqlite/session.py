"""One connection to an SQLite file, blocking.

Every error of the driver is raised as StoreError here, and nowhere else.  Its message names the file and, where one is
known, the cure.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from replication.errors import StoreError, ValueRefusedError
from replication.storage.contract import TooLargeError

if TYPE_CHECKING:
    from collections.abc import Sequence

MEMORY: Final = ":memory:"

# The driver raises some of these for a value that it cannot store.
_ERRORS: Final = (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeEncodeError)

# With such an error no later attempt can work, whatever ID or key it uses.
_OF_VALUES: Final = ("SQLITE_CONSTRAINT_CHECK", "SQLITE_CONSTRAINT_NOTNULL", "SQLITE_MISMATCH")

# A later attempt may work: other processes, the disk.
_TEMPORARY: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR")

CURES: Final = {
    "SQLITE_BUSY": "another process holds its lock: stop that, or wait for it",
    "SQLITE_CANTOPEN": "does the file, or its folder, exist, and may this process read and write there?",
    "SQLITE_CORRUPT": "restore it from a backup",
    "SQLITE_FULL": "make room on the disk",
    "SQLITE_IOERR": "the disk fails, see the system's log; or a limit of files is reached (ulimit -f, LimitFSIZE)",
    "SQLITE_NOTADB": "give the path of another file, or move this one away",
    "SQLITE_READONLY": "make the file and its folder writable for this process",
}


class UndecodedError(StoreError):
    """A statement reads a text that is not UTF-8; ``SqliteSession.find_undecoded`` returns it."""


class SqliteSession:
    """A connection to the file ``path``, or to a database of its own in memory; ``connect`` comes first.

    ``busy_timeout`` is how long a statement waits, in seconds, for a lock of another process.

    ``changes_before`` is the number of changed rows when the transaction began.  ``application_wrote``: the application
    has changed rows in the transaction that is committed.
    """

    dialect = "sqlite"
    changes_before = 0
    application_wrote = False

    def __init__(self, path: str, *, read_only: bool = False, busy_timeout: float = 5.0) -> None:
        self.name = path
        self._read_only = read_only
        self._busy_timeout = busy_timeout
        self._begun = False
        self._synchronous: bool | None = None  # whether commits wait for the disk; None: not set yet
        self._database: sqlite3.Connection | None = None

    def connect(self) -> None:
        """Open the file; a folder is refused here: SQLite opens one to read, and then reports that the disk fails."""
        if self._read_only and Path(self.name).is_dir():
            raise StoreError(f"database {self.name!r}: it is a folder; give the path of a file")
        target = f"{Path(self.name).absolute().as_uri()}?mode=ro" if self._read_only else self.name
        try:
            self._database = sqlite3.connect(
                target,
                uri=self._read_only,
                timeout=self._busy_timeout,
                isolation_level=None,  # BEGIN and COMMIT are ours
                check_same_thread=False,
                cached_statements=512,  # a few for each stream
            )
        except _ERRORS as error:
            raise self.refusal(error) from error

    def close(self) -> None:
        """Close the file; do nothing if it is closed."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @property
    def database(self) -> sqlite3.Connection:
        """The driver's connection; StoreError if it is not open."""
        if self._database is None:
            raise StoreError(f"database {self.name!r} is not open")
        return self._database

    # ---- statements

    def run(self, sql: str, parameters: Any = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:  # noqa: ARG002
        """Run one statement and return all its rows."""
        try:
            return (self._database or self.database).execute(sql, parameters).fetchall()
        except _ERRORS as error:
            raise self.refusal(error, sql) from error

    ask = run
    add = run
    execute = run

    def change(self, sql: str, parameters: Any) -> int:
        """Run one statement that changes rows, and return how many it has changed."""
        try:
            return (self._database or self.database).execute(sql, parameters).rowcount
        except _ERRORS as error:
            raise self.refusal(error, sql) from error

    def find_undecoded(self, sql: str, parameters: Any = ()) -> tuple[Any, int, bytes] | None:
        """Return the first text in the result that is not UTF-8: the first value of its row, its column, its bytes."""
        self.database.text_factory = bytes
        try:
            for row in self.run(sql, parameters):
                for column, value in enumerate(row):
                    if isinstance(value, bytes) and not _is_utf8(value):
                        return row[0], column, value
        finally:
            self.database.text_factory = str
        return None

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        try:
            (self._database or self.database).executemany(sql, parameters)
        except _ERRORS as error:
            raise self.refusal(error) from error

    # ---- transactions

    @property
    def begun(self) -> bool:
        """Whether a transaction was begun and not ended; StoreError if SQLite has undone it meanwhile."""
        if self._begun and not self.database.in_transaction:
            raise StoreError(f"database {self.name!r} has undone this transaction after an error: begin another one")
        return self._begun

    def begin(self, how: str = "IMMEDIATE", *, synchronous: bool = True) -> None:
        """Begin a transaction, with the write lock; ``how`` DEFERRED takes none before the first write.

        If it is ``synchronous`` and writes anything, its commit waits until all commits are on the disk.
        """
        if not self._begun:
            self.rollback()  # of an earlier transaction, if that has failed
        if synchronous is not self._synchronous and not self._read_only:
            self.run(f"PRAGMA synchronous = {'FULL' if synchronous else 'NORMAL'}")
            self._synchronous = synchronous
        self.run(f"BEGIN {how}")
        self._begun = True
        self.changes_before = self.database.total_changes

    def commit(self) -> None:
        """End the transaction, and keep what it did."""
        self.run("COMMIT")
        self._begun = False

    def rollback(self) -> None:
        """Undo the transaction; do nothing if there is none."""
        self._begun = False
        if self.database.in_transaction:
            self.run("ROLLBACK")

    def refusal(self, error: Exception, sql: str = "") -> StoreError:
        """Return the StoreError for an error of the driver; it names ``sql`` if a text is not UTF-8."""
        name = getattr(error, "sqlite_errorname", "")
        cure = next((f"; {cure}" for start, cure in CURES.items() if name.startswith(start)), "")
        of_values = isinstance(error, (OverflowError, UnicodeEncodeError)) or name in _OF_VALUES
        undecoded = str(error).startswith("Could not decode")
        if str(error).startswith("no such table: stream_"):
            cure = "; is this the right file? If it is, restore it from a backup"
        if undecoded:
            cure = f"; replace the text that is not UTF-8; this statement reads it: {sql[:500]}"
        kind = ValueRefusedError if of_values else UndecodedError if undecoded else StoreError
        if name == "SQLITE_TOOBIG":
            kind = TooLargeError
        return kind(f"database {self.name!r}: {error}{cure}", temporary=name.startswith(_TEMPORARY))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
