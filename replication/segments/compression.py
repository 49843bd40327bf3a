"""The compression of segments: gzip, zstd or none."""

from __future__ import annotations

import gzip
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from replication.errors import ConfigError, install_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SUFFIXES: Final[Mapping[str, str]] = {"none": "", "gzip": ".gz", "zstd": ".zst"}
GZIP_LEVEL: Final = 1  # higher levels take much more time and save little
ZSTD_LEVEL: Final = 1  # likewise
FRAME: Final = 2**18  # bytes of lines in a zstd frame; larger frames take more memory and save almost nothing
CHUNK: Final = 2**20  # bytes of lines that are read at once


class ISink(Protocol):
    """A file that is being written."""

    def write(self, data: Any, /) -> object:
        """Append bytes."""
        ...


def check_compression(compression: str) -> None:
    """Raise ConfigError unless this machine can read and write segments with ``compression``."""
    if compression not in SUFFIXES:
        raise ConfigError(f"unknown compression {compression!r:.40}: choose {', '.join(SUFFIXES)}")
    if compression == "zstd":
        _zstandard()


@contextmanager
def compress(sink: BinaryIO, compression: str) -> Iterator[ISink]:
    """Give a file whose content goes to ``sink`` compressed; complete when the block is left.

    Equal content gives equal bytes, in whatever pieces it is written.
    """
    if compression == "none":
        yield sink
    elif compression == "gzip":
        with gzip.GzipFile("", "wb", GZIP_LEVEL, sink, mtime=0) as compressed:
            yield compressed
    else:
        frames = _ZstdFrames(sink)
        yield frames
        frames.close()


def decompress(source: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield the content of a file in pieces of up to CHUNK bytes; errors are those of the three libraries."""
    if compression == "none":
        content: Any = source
    elif compression == "gzip":
        content = gzip.GzipFile(fileobj=source)
    else:
        content = _zstandard().ZstdDecompressor().stream_reader(source, read_across_frames=True, closefd=False)
    while chunk := content.read(CHUNK):
        yield chunk


class _ZstdFrames:
    """Zstandard frames of FRAME bytes each, the last may be shorter; one call per frame saves a sixth of the time."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._compressor = _zstandard().ZstdCompressor(ZSTD_LEVEL)
        self._held = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Write the frames that are full, and hold the rest."""
        room = FRAME - len(self._held)
        if len(data) < room:
            self._held += data
            return
        self._frame(self._held + data[:room])
        full = room + (len(data) - room) // FRAME * FRAME
        for start in range(room, full, FRAME):
            self._frame(data[start : start + FRAME])
        self._held = bytearray(data[full:])

    def close(self) -> None:
        """Write the last frame."""
        self._frame(self._held)

    def _frame(self, data: bytes | bytearray | memoryview) -> None:
        self._sink.write(self._compressor.compress(data))


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise ConfigError(f"compression zstd needs zstandard: {install_command('zstd')}") from error
    return zstandard
