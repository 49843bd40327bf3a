"""Whether the files of a database are those that SQLite has open, and whole: else a commit is lost with the process.

SQLite notices neither that a file was exchanged or unlinked, nor that one was truncated and then extended again.
The index of the WAL, ``FILE-shm``, has the locks of all processes.  Two programs with different index files do not see
each other's locks, and write the same part of the WAL.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replication.errors import StoreError
from replication.storage.sqlite.claim import hold_open

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC: Final = b"\x37\x7f\x06"  # the beginning of a WAL
HEADER: Final = 32  # bytes of a WAL before its first page
CHANGES: Final = 24  # where a database has the number of changes of its first page, in 4 bytes
MOVED: Final = "was moved or deleted: restart with the file in its place"
_WAL_MOVED: Final = "was moved or deleted: stop this process with SIGTERM, which stores what it holds, and restart"
_TRUNCATED: Final = "was truncated: stop this process, delete FILE-wal and FILE-shm, and put a backup in place"
_OVERWRITTEN: Final = "was overwritten: stop this process, delete FILE-wal and FILE-shm, and put a backup in place"


class DatabaseFiles:
    """The files of the open database ``path``: itself, its WAL and the index of that.

    ``database`` and ``wal`` are descriptors of them, which stay the caller's.  The index has none here: to close one
    would release SQLite's locks.  With each commit come ``check_sizes`` and ``check_commit``: they take about 20
    microseconds.
    """

    def __init__(self, path: str, database: int, wal: int) -> None:
        self._paths = path, _beside(path, "-wal"), _beside(path, "-shm")
        self._database, self._wal = database, wal
        self._opened = os.fstat(database), os.fstat(wal), os.stat(self._paths[2])  # noqa: PTH116
        self._size = self._wal_size = 0
        self._changes: int | None = None
        self._wal_header = b""
        self._emptied = False  # the WAL was: by a checkpoint of another process, or by mistake
        self._lost: StoreError | None = None

    def check_sizes(self) -> None:
        """Raise StoreError if a file has lost pages since the last check, or if a commit was lost before.

        It has also lost some if an earlier content was copied into it, with another number of pages or other tables.
        Call it after BEGIN, while no other process writes.  A large transaction of another process restarts the WAL
        with a new header, and its COMMIT truncates the file: a check between the two would make that a loss.
        """
        if self._lost is not None:
            raise self._lost
        if not self._has_index():  # else the commit would overwrite those of a program with another index
            try:
                self._in_place()
            except StoreError as error:
                self._lost = error
                raise
        try:
            self._compare_sizes()
        except OSError as error:
            raise self._unreadable(error) from error

    def _compare_sizes(self) -> None:
        size, wal_size = os.fstat(self._database).st_size, os.fstat(self._wal).st_size
        if size < self._size and not self._is_whole(size):
            raise self._damaged(0, _TRUNCATED)
        changes = int.from_bytes(os.pread(self._database, 4, CHANGES), "big")
        if self._changes is not None and (changes - self._changes) % 2**32 >= 2**31:  # the number may begin again at 0
            raise self._damaged(0, _OVERWRITTEN)
        header = os.pread(self._wal, HEADER, 0)
        if wal_size < self._wal_size:
            if header and header == self._wal_header:  # a WAL that begins again has another one
                raise self._damaged(1, _TRUNCATED)
            self._emptied = True
        self._size, self._changes, self._wal_size, self._wal_header = size, changes, wal_size, header

    def check_commit(self) -> None:
        """Raise StoreError unless the files have their names, and the WAL its header: after a commit.

        It comes before the commit is acknowledged.  After an error every later check fails.  Otherwise this process
        would go on beyond a commit whose outcome is unknown.
        """
        try:
            self._size, self._wal_size, _ = [found.st_size for found in self._in_place()]
            if self._emptied or not self._wal_size:
                header = os.pread(self._wal, HEADER, 0)
                if header and not header.startswith(MAGIC):
                    raise self._damaged(1, _TRUNCATED)
                self._emptied = not header  # by a checkpoint, or by mistake: the next check decides
        except StoreError as error:
            self._lost = error
            raise
        except OSError as error:
            self._lost = self._unreadable(error, ": restart this process")
            raise self._lost from error

    def check_places(self) -> None:
        """Raise StoreError unless the files have their names, or if a commit was lost before; any thread may call it.

        A connection that reads a lost file finds what was committed there.
        """
        if self._lost is not None:
            raise self._lost
        self._in_place()

    def sync(self) -> None:
        """Return once the WAL is on the disk, with every commit; a checkpoint syncs what it moves to the database.

        After an error, each later call and each later commit fails.  Linux reports an error to each descriptor once,
        and does not write these pages again.  So a later fsync would succeed, and after a power loss SQLite would read
        the WAL only up to the missing pages.
        """
        if self._lost is not None:
            raise self._lost
        try:
            os.fsync(self._wal)
        except OSError as error:
            why = (
                f"cannot be written to the disk: {error.strerror}; "
                "stop this process with SIGTERM, which stores what it holds, and restart"
            )
            self._lost = self._error(1, why)
            raise self._lost from error

    def _has_index(self) -> bool:
        try:
            found = os.stat(self._paths[2])  # noqa: PTH116 (a Path takes twice the time)
        except OSError:
            return False
        return os.path.samestat(found, self._opened[2])

    def _in_place(self) -> list[os.stat_result]:
        """Return the status of the files; StoreError if one is not in its place."""
        status = []
        for path, opened, missing in zip(self._paths, self._opened, (MOVED, _WAL_MOVED, _WAL_MOVED), strict=True):
            try:
                found = os.stat(path)  # noqa: PTH116 (a Path takes twice the time)
            except FileNotFoundError as error:
                raise StoreError(f"database {path!r} {missing}") from error
            except OSError as error:  # the permissions of its folder were removed
                why = f"cannot be reached: {error.strerror}: correct that, and restart this process"
                raise StoreError(f"database {path!r} {why}") from error
            if found.st_ino != opened.st_ino or found.st_dev != opened.st_dev:
                raise StoreError(f"database {path!r} {missing}")
            status.append(found)
        return status

    def _is_whole(self, size: int) -> bool:
        """Whether a file that has become smaller has all its pages, as after a VACUUM of another process."""
        header = os.pread(self._database, 100, 0)
        page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
        return 0 < (2**16 if page == 1 else page) * pages <= size

    def _damaged(self, which: int, what: str) -> StoreError:
        """Return the error of a file that was damaged, after which nothing may move from the WAL to the database.

        The last connection does that when it is closed, and a WAL with a hole would replace pages with zeros.
        """
        self._lost = self._error(which, what)
        with suppress(OSError):
            hold_open(self._database)
        return self._lost

    def _unreadable(self, error: OSError, cure: str = "") -> StoreError:
        return self._error(1, f"cannot be read: {error.strerror}{cure}")

    def _error(self, which: int, what: str) -> StoreError:
        return StoreError(f"database {self._paths[which]!r} {what}")


@contextmanager
def watched(path: str, database: int) -> Iterator[DatabaseFiles]:
    """Give the files of a database that SQLite has open, with a WAL; StoreError if one is not in its place."""
    try:
        wal = os.open(_beside(path, "-wal"), os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"database {path!r} {MOVED}") from error
    try:
        try:
            files = DatabaseFiles(path, database, wal)
        except FileNotFoundError as error:
            raise StoreError(f"database {error.filename!r} {_WAL_MOVED}") from error
        files.check_sizes()
        files.check_commit()
        yield files
    finally:
        os.close(wal)  # SQLite has no lock on it


def _beside(path: str, suffix: str) -> str:
    return f"{Path(path).resolve()}{suffix}"
