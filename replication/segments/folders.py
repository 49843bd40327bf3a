"""Segments folders: a local path, or a URL that pyarrow can write to (docs/spark.md).

A file is complete when its name appears, also if the writing process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import uuid
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias, cast

from replication.errors import ConfigError, StoreError, install_command
from replication.urls import Url

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

SCHEMES: Final = ("s3", "s3a", "gs", "abfs", "hdfs")
_CURE: Final = "put the secret into the environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
MAX_INDEX: Final = 64 * 2**20  # bytes of a manifest, of histories or of a receipt: they are read as a whole
REMOVALS: Final = 100  # attempts to remove a subfolder in which another process writes
_RACED: Final = (errno.ENOTEMPTY, errno.ENOENT, errno.EISDIR)  # why such an attempt fails
TEMPORARY: Final = ".tmp"  # the suffix of a file that is being written


def open_folder(url: str | Url) -> Folder:
    """Return the folder at a path or URL; ConfigError if this machine cannot reach it."""
    shown, url = Url(url), Url(url).reveal()
    scheme, found, rest = url.partition("://")
    if not found or scheme == "file":
        return LocalFolder(Path(rest or url))
    if scheme not in SCHEMES:
        raise ConfigError(f"{shown!r} is not a folder: give a path, or {', '.join(f'{each}://' for each in SCHEMES)}…")
    user, _, host = rest.partition("/")[0].rpartition("@")
    port = host.partition(":")[2]
    if ":" in user or (port and not port.isdecimal()):  # a secret may have a slash: s3://KEY:A/B@bucket
        raise ConfigError(f"{shown}: a URL is logged: {_CURE}")
    return RemoteFolder(url)


@contextmanager
def _store_errors(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; OSError for a pipe or a device, which could be waited for without an end."""
    opened = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # for a directory, the caller has a better error
        return opened
    os.close(opened)
    raise OSError(errno.EINVAL, "it is no file")


def _stamp_of(found: os.stat_result) -> object:
    return found.st_ino, found.st_mtime_ns, found.st_size


class LocalFolder:
    """A local folder, or one that every machine of a cluster mounts under the same path.

    Its files have names, which are relative paths with ``/``.  StoreError if an operation fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.url = self.address = str(self.path)
        self._lock: int | None = None

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Write a file, which gets its name when the block is left without an exception.

        Its content is durable then, its name only after ``flush``.
        """
        target = self.path / name
        with _store_errors(target):
            self._check_lock()
            target.parent.mkdir(parents=True, exist_ok=True)
            written = target.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
            try:
                with written.open("wb") as sink:
                    yield sink
                    sink.flush()
                    os.fsync(sink.fileno())
                written.replace(target)
            except BaseException:
                written.unlink(missing_ok=True)
                raise

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading; FileNotFoundError if there is none."""
        return open(self.path / name, "rb", opener=_open_at_once)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if there is none."""
        found = self._stat(name)
        return None if found is None else found.st_size

    def stamp(self, name: str) -> object:
        """Return a value that changes when the file is replaced, None if there is no file."""
        found = self._stat(name)
        return None if found is None else _stamp_of(found)

    def stamp_of(self, source: BinaryIO, _: str) -> object:
        """Return the stamp of an open file, also if another one has its name now."""
        return _stamp_of(os.fstat(source.fileno()))

    def _stat(self, name: str) -> os.stat_result | None:
        with _store_errors(self.path / name):
            try:
                return (self.path / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, below: str = "") -> list[str]:
        """Return the names of all files below a subfolder, sorted; an empty list if there is no such subfolder."""
        return sorted(str(each.relative_to(self.path)) for each in (self.path / below).rglob("*") if each.is_file())

    def move(self, name: str, to: str) -> None:
        """Rename a file; a file of the new name is replaced."""
        target = self.path / to
        with _store_errors(target):
            self._check_lock()
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).replace(target)

    def remove(self, name: str) -> None:
        """Remove a file, or a subfolder with its content, if there is one.

        A Spark task of a killed run may still write there, so the removal is repeated up to REMOVALS times.
        """
        target = self.path / name
        with _store_errors(target):
            for left in reversed(range(REMOVALS)):
                try:
                    if target.is_dir():
                        shutil.rmtree(target)
                    target.unlink(missing_ok=True)
                except OSError as error:
                    if not left or error.errno not in _RACED:
                        raise
                else:
                    return

    def flush(self, names: Iterable[str]) -> None:
        """Make the names of files durable: call fsync on their folders, and on the folders above them."""
        folders = {each for name in names for each in (self.path / name).parents if each.is_relative_to(self.path)}
        for folder in sorted(folders):
            with _store_errors(folder):
                opened = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(opened)
                finally:
                    os.close(opened)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for writing; StoreError if another run has the lock.

        The folder itself is locked: the lock ends with the process, and there is no file to remove.
        """
        with _store_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
            try:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StoreError(f"{self.path}: another run writes here: wait for it, or stop it") from None
                self._lock = lock
                yield
            finally:
                self._lock = None
                os.close(lock)

    def _check_lock(self) -> None:
        """Raise StoreError if another folder has taken the place of the one that is locked."""
        if self._lock is not None and not os.path.samestat(os.fstat(self._lock), self.path.stat()):
            raise StoreError(
                f"{self.path}: another folder has taken its place since the run began; nothing was added: run the "
                "same command again"
            )


class RemoteFolder:
    """A folder behind ``s3://``, ``s3a://``, ``gs://``, ``abfs://`` or, where Hadoop is installed, ``hdfs://``.

    It has the methods of LocalFolder.  Object stores show a file once it is complete.  They have no lock.
    """

    def __init__(self, url: str, system: Any = None) -> None:
        """Open ``url`` with ``system``, a ``pyarrow.fs.FileSystem``; by default with the one that pyarrow finds."""
        self.address = url.rstrip("/")
        place, options, _ = self.address.partition("?")
        scheme, _, path = place.partition("://")
        host, slash, path = path.partition("/")
        # For messages: an option may be a token, and so may a user; a path may have a colon and an @.
        self.url = f"{Url(f'{scheme}://{host}')}{slash}{path}{'?…' if options else ''}"
        self._root = self.address.partition("://")[2]
        self._system = system
        if system is None:
            try:
                from pyarrow.fs import FileSystem  # noqa: PLC0415 (an extra)

                self._system, self._root = FileSystem.from_uri(self.address.replace("s3a://", "s3://", 1))
            except ImportError as error:
                raise ConfigError(f"{self.url} needs pyarrow: {install_command('segments')}") from error
            except (OSError, ValueError, NotImplementedError) as error:
                why = str(error).partition("\n")[0]
                why = Url(url).hide_in(why)
                raise ConfigError(f"{self.url}: {why}; or give a folder that all machines mount") from error

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Write under a temporary name, then rename."""
        target = self._path(name)
        folder, _, _ = target.rpartition("/")
        written = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
        with _store_errors(f"{self.url}/{name}"):
            self._system.create_dir(folder, recursive=True)
            try:
                with self._system.open_output_stream(written) as sink:
                    yield cast("BinaryIO", sink)
                self._system.move(written, target)
            except BaseException:
                with suppress(OSError):  # the next run removes what stays
                    self._system.delete_file(written)
                raise

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        return cast("BinaryIO", self._system.open_input_file(self._path(name)))

    def size(self, name: str) -> int | None:
        """Return the size in bytes."""
        size: int | None = self._info(name).size
        return size

    def stamp(self, name: str) -> object:
        """Return modification time and size."""
        found = self._info(name)
        return None if found.size is None else (found.mtime_ns, found.size)

    def stamp_of(self, _: BinaryIO, name: str) -> object:
        """Return the stamp of the file that has this name: a store may read on from a file that replaces it."""
        return self.stamp(name)

    def names(self, below: str = "") -> list[str]:
        """List all files."""
        from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415 (an extra)

        with _store_errors(f"{self.url}/{below}"):
            selector = FileSelector(self._path(below), allow_not_found=True, recursive=True)
            found = self._system.get_file_info(selector)
        start = len(self._root) + 1
        return sorted(each.path[start:] for each in found if each.type is FileType.File)

    def move(self, name: str, to: str) -> None:
        """Rename; an object store copies, then deletes."""
        with _store_errors(f"{self.url}/{to}"):
            self._system.create_dir(self._path(to).rpartition("/")[0], recursive=True)
            self._system.move(self._path(name), self._path(to))

    def remove(self, name: str) -> None:
        """Remove a file or subfolder."""
        from pyarrow.fs import FileType  # noqa: PLC0415 (an extra)

        found = self._info(name)
        with _store_errors(f"{self.url}/{name}"):
            if found.type is FileType.Directory:
                self._system.delete_dir(found.path)
            elif found.type is FileType.File:
                self._system.delete_file(found.path)

    def flush(self, names: Iterable[str]) -> None:
        """Do nothing: what an object store has acknowledged is durable."""

    def locked(self) -> AbstractContextManager[None]:
        """Lock nothing: let one run at a time write there."""
        return nullcontext()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _info(self, name: str) -> Any:
        with _store_errors(f"{self.url}/{name}"):
            return self._system.get_file_info(self._path(name))


Folder: TypeAlias = LocalFolder | RemoteFolder


def read_index(folder: Folder, name: str) -> bytes:
    """Return the content of a manifest or the like; OSError if it cannot be read, or has more than MAX_INDEX bytes."""
    with folder.open(name) as source:
        content = source.read(MAX_INDEX + 1)
    if len(content) > MAX_INDEX:
        raise OSError(errno.EFBIG, f"it has more than {MAX_INDEX} bytes")
    return content


def write_index(folder: Folder, name: str, content: bytes) -> None:
    """Replace a manifest or the like in one step; StoreError if the folder fails, or would not be read again."""
    if len(content) > MAX_INDEX:
        cure = "begin a new folder, with more rows in each segment"
        raise StoreError(f"{folder.url}/{name} would have more than {MAX_INDEX} bytes: {cure}")
    with folder.create(name) as sink:
        sink.write(content)
    folder.flush([name])
