"""The claim of an SQLite file: a lock on the file itself, which the system releases when the process ends.

It is an open-file-description lock, on bytes that no database reaches.  ``flock`` would lock the whole file: on macOS,
the BSDs and NFS it conflicts with SQLite's own locks.  A classic ``fcntl`` lock refuses no second store of the process,
and SQLite drops it when it closes a connection to the file.  A system without such locks, as a BSD, is refused.

To close a descriptor of a file drops the locks of SQLite that this process has on it.  Another process may then delete
a WAL that is in use.  So a descriptor is closed once no connection has a lock on the file.  A lock that another thread
takes at that very moment is not noticed.

A child of ``fork`` has the same lock: it would keep the claim of a parent that was killed, or end that of one that
runs.  So it detaches its descriptors at once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from replication.errors import StoreError
from replication.storage.contract import ClaimedError
from replication.storage.forks import detach

if TYPE_CHECKING:
    from collections.abc import Iterator

# macOS has these numbers; its Python may have no names for them.
SET_LOCK: Final[int] = getattr(fcntl, "F_OFD_SETLK", 90)
GET_LOCK: Final[int] = getattr(fcntl, "F_OFD_GETLK", 92)

MOUNTS: Final = Path("/proc/self/mountinfo")  # Linux

FIRST: Final = 1 << 62  # SQLite locks bytes after 2**30, and its largest database has 2**48 bytes

SHARED: Final = 2**30 + 2, 510  # the first byte that a connection of SQLite locks, and how many

_SHORTS: Final = [("kind", ctypes.c_short), ("whence", ctypes.c_short)]
_LONGS: Final = [("start", ctypes.c_int64), ("length", ctypes.c_int64), ("process", ctypes.c_int)]

_claims: Final[set[int]] = set()  # descriptors of files that are claimed
_unclosed: Final[list[int]] = []
_unclosed_lock: Final = Lock()


class _Range(ctypes.Structure):
    """C's ``struct flock``."""

    kind: int
    length: int
    _fields_ = [*_LONGS, *_SHORTS] if sys.platform == "darwin" else [*_SHORTS, *_LONGS]


@contextmanager
def claimed(path: str) -> Iterator[int]:
    """Claim the file ``path`` for the block, and return a descriptor of it; a file that is missing is made.

    StoreError names the process that writes the file, the number of its hard links, or that it is a mount.  Open the
    file with SQLite inside the block, and close it there.
    """
    with ExitStack() as held:
        try:
            descriptor = _open(path)
            held.callback(_close, descriptor)
            _claims.add(descriptor)
            # The length is the process's ID, for the process that is refused.
            _control(descriptor, SET_LOCK, fcntl.F_WRLCK, FIRST, os.getpid())
            for name in {path, str(Path(path).resolve())}:
                _remove_former(name, held)
            names = os.fstat(descriptor).st_nlink
        except BlockingIOError as error:
            lock = _control(descriptor, GET_LOCK, fcntl.F_WRLCK, FIRST, 0)  # without a lock by now, the length stays 0
            raise _refusal(path, lock.length) from error
        except OSError as error:
            cure = "does its folder exist on a local disk, and may this process write there?"
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                cure = "raise the limit of open files (ulimit -n, LimitNOFILE)"
            full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            if full:
                cure = "make room on the disk, or free inodes (df -i)"
            raise StoreError(f"database {path!r} cannot be claimed: {error}; {cure}", temporary=full) from error
        if names > 1:  # SQLite would not read what was committed into the WAL beside another name
            raise StoreError(
                f"database {path!r} has {names} names (hard links), and SQLite keeps a WAL for each: "
                "remove all but the one under which it was written last (find -samefile lists them)"
            )
        if _is_mounted(path):
            raise StoreError(
                f"database {path!r} is mounted as a single file, and its WAL would not be beside the file that is "
                "mounted: mount its folder"
            )
        yield descriptor


def hold_open(descriptor: int) -> None:
    """Lock a claimed file as one more connection of SQLite, until the claim ends.

    So no connection is the last one that is closed: that one would move the WAL into the file.
    """
    _control(descriptor, SET_LOCK, fcntl.F_RDLCK, *SHARED)


def _is_mounted(path: str) -> bool:
    """Return whether the file is a mount of its own, as a volume of a container may be."""
    try:
        mounts = MOUNTS.read_bytes().splitlines()
    except OSError:
        return False
    name = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], os.fsencode(Path(path).resolve()))
    return any(each.split()[4] == name for each in mounts)


def _remove_former(path: str, held: ExitStack) -> None:
    """Remove the file that version 0.1 locked.  It stays locked: such a process may have opened it before."""
    claim = Path(f"{path}-claim")
    while True:
        try:
            file = held.enter_context(claim.open("r+", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), claim.stat()):
                claim.unlink()
        except FileNotFoundError:
            return
        except BlockingIOError as error:
            raise _refusal(path, file.read().strip()) from error


def _refusal(path: str, process: int | str) -> ClaimedError:
    return ClaimedError(
        f"database {path!r} is written by process {process or 'unknown'} already: stop that, or name another database"
    )


def _control(descriptor: int, command: int, kind: int, start: int, length: int) -> _Range:
    asked = _Range(kind=kind, start=start, length=length)
    return _Range.from_buffer_copy(fcntl.fcntl(descriptor, command, bytes(asked)))


def _open(path: str) -> int:
    """Open the file, or take a descriptor of it that could not be closed."""
    with _unclosed_lock:
        for each in _unclosed:
            if Path(path).exists() and os.path.samestat(os.fstat(each), Path(path).stat()):
                _unclosed.remove(each)
                return each
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # the mode that SQLite gives a file


def _close(descriptor: int) -> None:
    """Unlock the file, and close each descriptor whose file has no lock of SQLite."""
    _claims.discard(descriptor)
    with _unclosed_lock, suppress(OSError):  # such locks are unknown to this system or this disk
        _unclosed.append(descriptor)
        _control(descriptor, SET_LOCK, fcntl.F_UNLCK, 0, 0)
        for each in _unclosed.copy():
            if _control(each, GET_LOCK, fcntl.F_WRLCK, 0, FIRST).kind == fcntl.F_UNLCK:
                _unclosed.remove(each)
                os.close(each)


os.register_at_fork(after_in_child=lambda: detach({*_claims, *_unclosed}))
