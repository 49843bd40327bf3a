"""Where segments lie: a folder of this machine, or one behind a URL that pyarrow can write to.

A file appears whole under its name or not at all, whoever is killed meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, cast

from replication.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

SCHEMES: Final = ("s3", "s3a", "gs", "abfs", "hdfs")
_KEYS: Final = " into the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or where the store's tools look"
TEMPORARY: Final = ".tmp"  # the end of a file's name while it is being written


class IFolder(Protocol):
    """Files by their names, which are relative and have ``/`` in them; StoreError if the folder refuses."""

    url: str

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file, which is there under its name once the block is left without an exception.

        Its content is durable then, its name only after ``flush``.
        """
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file that is there; FileNotFoundError if it is not."""
        ...

    def size(self, name: str) -> int | None:
        """Return how many bytes a file has, None if it is not there."""
        ...

    def stamp(self, name: str) -> object:
        """Return what is another value once the file has been replaced, None if it is not there."""
        ...

    def names(self, below: str = "") -> list[str]:
        """Return the names of all files below a folder of it, in order; none if there is no such folder."""
        ...

    def move(self, name: str, to: str) -> None:
        """Give a file another name, over what has that name."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; harmless if there is none."""
        ...

    def flush(self, names: Iterable[str]) -> None:
        """Make the names of files durable."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Keep others from writing here; StoreError if somebody does."""
        ...


def open_folder(url: str) -> IFolder:
    """Return the folder at a path or a URL; ConfigError if nothing here can reach it."""
    scheme, found, rest = url.partition("://")
    if not found or scheme == "file":
        return LocalFolder(Path(rest or url))
    if scheme not in SCHEMES:
        raise ConfigError(f"{url!r} is no folder: write a path, or {', '.join(f'{each}://' for each in SCHEMES)}…")
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            f"{scheme}://…@{rest.rpartition('@')[2]}: a URL is logged, so put the secret elsewhere:{_KEYS}"
        )
    return RemoteFolder(url)


class LocalFolder:
    """A folder of this machine, or one that is mounted on all that take part."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.url = str(self.path)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Write beside the final name, then rename."""
        target = self.path / name
        with self._refusals(name):
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
        """Open a file for reading."""
        return (self.path / name).open("rb")

    def size(self, name: str) -> int | None:
        """Return its size."""
        found = self._stat(name)
        return None if found is None else found.st_size

    def stamp(self, name: str) -> object:
        """Return which file it is, and when it was written."""
        found = self._stat(name)
        return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)

    def _stat(self, name: str) -> os.stat_result | None:
        with self._refusals(name):
            try:
                return (self.path / name).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, below: str = "") -> list[str]:
        """Return all files."""
        return sorted(str(each.relative_to(self.path)) for each in (self.path / below).rglob("*") if each.is_file())

    def move(self, name: str, to: str) -> None:
        """Rename."""
        target = self.path / to
        with self._refusals(to):
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).replace(target)

    def remove(self, name: str) -> None:
        """Remove it."""
        target = self.path / name
        with self._refusals(name):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def flush(self, names: Iterable[str]) -> None:
        """Write the folders that have the names, and those above them, to the disk."""
        folders = {each for name in names for each in (self.path / name).parents if each.is_relative_to(self.path)}
        for folder in sorted(folders):
            with self._refusals(str(folder)):
                opened = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(opened)
                finally:
                    os.close(opened)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder itself, so that nothing is left of it when we are killed."""
        with self._refusals(""):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
            try:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StoreError(f"{self.path}: another run writes here: wait for it, or stop it") from None
                yield
            finally:
                os.close(lock)

    @contextmanager
    def _refusals(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.path / name}: {error.strerror or error}") from error


class RemoteFolder:
    """A folder behind a URL: ``s3://``, ``s3a://``, ``gs://``, ``abfs://`` or, where Hadoop is installed, ``hdfs://``.

    Object stores show a file once it has been written to its end; there is nothing to lock.
    """

    def __init__(self, url: str, system: Any = None) -> None:
        """Reach ``url`` through ``system``, a ``pyarrow.fs.FileSystem``, by default what pyarrow finds for it."""
        self.url = url.rstrip("/")
        self._root = self.url.partition("://")[2]
        self._system = system
        if system is None:
            try:
                from pyarrow.fs import FileSystem  # noqa: PLC0415 (only who needs it must have it)

                self._system, self._root = FileSystem.from_uri(self.url.replace("s3a://", "s3://", 1))
            except ImportError as error:
                raise ConfigError(f"{url}: that needs pyarrow: pip install '.[spark]' in the checkout") from error
            except (OSError, ValueError, NotImplementedError) as error:
                why = str(error).partition("\n")[0]
                raise ConfigError(f"{url}: {why}; a folder that all machines share would do, too") from error

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Write under a temporary name, then move."""
        target = self._path(name)
        folder, _, _ = target.rpartition("/")
        written = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
        with self._refusals(name):
            self._system.create_dir(folder, recursive=True)
            try:
                with self._system.open_output_stream(written) as sink:
                    yield cast("BinaryIO", sink)
                self._system.move(written, target)
            except BaseException:
                self._delete(written)
                raise

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        return cast("BinaryIO", self._system.open_input_file(self._path(name)))

    def size(self, name: str) -> int | None:
        """Return its size."""
        size: int | None = self._info(name).size
        return size

    def stamp(self, name: str) -> object:
        """Return when it was written, and its size."""
        found = self._info(name)
        return None if found.size is None else (found.mtime_ns, found.size)

    def names(self, below: str = "") -> list[str]:
        """Return all files."""
        from pyarrow.fs import FileSelector, FileType  # noqa: PLC0415 (see above)

        with self._refusals(below):
            selector = FileSelector(self._path(below), allow_not_found=True, recursive=True)
            found = self._system.get_file_info(selector)
        start = len(self._root) + 1
        return sorted(each.path[start:] for each in found if each.type is FileType.File)

    def move(self, name: str, to: str) -> None:
        """Move; an object store copies, and deletes."""
        with self._refusals(to):
            self._system.create_dir(self._path(to).rpartition("/")[0], recursive=True)
            self._system.move(self._path(name), self._path(to))

    def remove(self, name: str) -> None:
        """Remove it."""
        from pyarrow.fs import FileType  # noqa: PLC0415 (see above)

        found = self._info(name)
        with self._refusals(name):
            if found.type is FileType.Directory:
                self._system.delete_dir(found.path)
            elif found.type is FileType.File:
                self._system.delete_file(found.path)

    def flush(self, names: Iterable[str]) -> None:
        """Trust the object store: what it has acknowledged is durable."""

    def alone(self) -> AbstractContextManager[None]:
        """Trust that nobody else writes here."""
        return nullcontext()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _info(self, name: str) -> Any:
        with self._refusals(name):
            return self._system.get_file_info(self._path(name))

    def _delete(self, path: str) -> None:
        """Remove what was written in part, if that can be done: the next run sweeps what stays."""
        try:
            self._system.delete_file(path)
        except OSError:
            return

    @contextmanager
    def _refusals(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.url}/{name}: {error}") from error
