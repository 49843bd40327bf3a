"""Segments: history as RDATA lines in files, and the manifest that says which files count.

::

    DIR/manifest.json
    DIR/STREAM/INSTANCE/FROM-UPTO.rdata[.gz|.zst]     FROM excludes, UPTO includes, twenty digits each
    DIR/.replay/                                      what a run has not finished

The segments of a stream and instance are a chain: one ends where the next begins.  A line is byte for byte what the
live master sends for the same fact; a fact with a row that no line can hold is ``POSITION stream instance T T`` here as
there, and has to be fetched elsewhere.  What is not in the manifest does not count.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from contextlib import contextmanager
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, cast
from urllib.parse import quote

import attrs
import msgspec

from replication.errors import CatchUpError, ConfigError, RemoteProtocolError, StoreError
from replication.replay.folders import TEMPORARY
from replication.streams.facts import Fact, facts_of_rows, is_ascending, texts_of, tokens_of
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from replication.replay.folders import IFolder

MANIFEST: Final = "manifest.json"
WORK: Final = ".replay"
VERSION: Final = 1  # of the manifest's form
SUFFIXES: Final[Mapping[str, str]] = {"none": "", "gzip": ".gz", "zstd": ".zst"}
GZIP_LEVEL: Final = 1  # 6 takes twice the time for 6 % less
ZSTD_LEVEL: Final = 1  # 3 takes 2.5 times the time for 11 % less
FRAME: Final = 2**18  # bytes of lines that are compressed together: 2**20 takes a tenth more time for 0.4 % less
CHUNK: Final = 2**20  # bytes of lines that are read at once


@attrs.frozen
class Segment:
    """One file: the facts of a writer with ``after < token <= upto``.

    ``rows`` are its RDATA lines, ``first`` and ``last`` the tokens of its first and last fact, ``size`` and ``sha256``
    are of the lines, ``stored_size`` is the file's.  One that is ``compacted`` lacks facts that a later one replaces.
    """

    stream: StreamName
    instance: InstanceName
    after: Token
    upto: Token
    rows: int
    first: Token | None
    last: Token | None
    size: int
    sha256: str
    stored_size: int
    compression: str
    compacted: bool = False

    @property
    def name(self) -> str:
        """Where it lies in the folder."""
        suffix = SUFFIXES[self.compression]
        return f"{self.stream}/{folder_of(self.instance)}/{self.after:020}-{self.upto:020}.rdata{suffix}"

    def describe(self) -> dict[str, object]:
        """Return what the manifest says of it."""
        said: dict[str, object] = {
            "stream": self.stream,
            "instance": self.instance,
            "from": self.after,
            "upto": self.upto,
            "rows": self.rows,
            "first_token": self.first,
            "last_token": self.last,
            "bytes": self.size,
            "sha256": self.sha256,
            "file": self.name,
            "file_bytes": self.stored_size,
            "compression": self.compression,
        }
        return {**said, "compacted": True} if self.compacted else said

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Segment:
        """Read what :meth:`describe` says; whatever Python raises if it is something else."""
        segment = cls(
            grammar.stream_name(said["stream"]),
            grammar.instance_name(said["instance"]),
            Token(said["from"]),
            Token(said["upto"]),
            said["rows"],
            said["first_token"],
            said["last_token"],
            said["bytes"],
            said["sha256"],
            said["file_bytes"],
            said["compression"],
            said.get("compacted", False),
        )
        if said["file"] != segment.name:
            raise ValueError(f"{said['file']} should be {segment.name}")
        return segment


def folder_of(instance: InstanceName) -> str:
    """Return the name of a folder for an instance, whatever characters its name has."""
    name = quote(instance, safe="")
    return name.replace(".", "%2E", 1) if name.startswith(".") else name


_chain_of = attrgetter("stream", "instance")
_place_of = attrgetter("stream", "instance", "after")


def _in_order(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=_place_of))


@attrs.frozen
class Manifest:
    """The segments that count, by stream, instance and place."""

    segments: Sequence[Segment] = attrs.field(default=(), converter=_in_order)

    def chains(self) -> dict[tuple[StreamName, InstanceName], list[Segment]]:
        """Return the segments of each stream and instance."""
        return {key: list(chain) for key, chain in groupby(self.segments, _chain_of)}

    def faults(self) -> list[str]:
        """Return where chains have gaps, overlap, or begin after they end."""
        found = []
        for chain in self.chains().values():
            found += [f"{each.name}: ends before it begins" for each in chain if each.upto <= each.after]
            for before, each in pairwise(chain):
                if before.upto != each.after:
                    what = "leaves a gap after" if each.after > before.upto else "overlaps"
                    found.append(f"{each.name}: {what} {before.name}")
        return found

    def spell(self) -> bytes:
        """Return it as JSON, a segment a line."""
        lines = ",\n".join([grammar.spell_row(each.describe()) for each in self.segments])
        return f'{{"version":{VERSION},"segments":[\n{lines}\n]}}\n'.encode()


def read_manifest(folder: IFolder) -> Manifest | None:
    """Return the manifest of a folder, None if it has none; CatchUpError if it is damaged."""
    try:
        with folder.open(MANIFEST) as source:
            text = source.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CatchUpError(f"{folder.url}/{MANIFEST}: {error}") from error
    try:
        said = msgspec.json.decode(text)
        if said["version"] != VERSION:
            raise CatchUpError(f"{folder.url}/{MANIFEST}: it has version {said['version']}, not {VERSION}")
        return Manifest([Segment.read(each) for each in said["segments"]])
    except (msgspec.MsgspecError, RemoteProtocolError, ValueError, TypeError, KeyError) as error:
        raise CatchUpError(f"{folder.url}/{MANIFEST}: not a manifest of segments: {error}") from error


def write_manifest(folder: IFolder, manifest: Manifest) -> None:
    """Replace the manifest, at once; StoreError if the folder refuses."""
    with folder.create(MANIFEST) as sink:
        sink.write(manifest.spell())
    folder.flush([MANIFEST])


# ---- writing


class ISink(Protocol):
    """What takes lines."""

    def write(self, data: Any, /) -> object:
        """Take the next lines."""
        ...


class SegmentWriter:
    """The lines of one segment as they come; :meth:`finish` says what they were."""

    def __init__(
        self,
        sink: ISink,
        stream: StreamName,
        instance: InstanceName,
        after: Token,
        compression: str,
        *,
        compacted: bool,
    ) -> None:
        self.rows = 0
        self.last: Token | None = None
        self._first: Token | None = None
        self._sink = sink
        self._sum = hashlib.sha256()
        self._size = 0
        self._of = stream, instance, after
        self._compression = compression
        self._compacted = compacted

    def write(self, lines: bytes | memoryview, rows: int, first: Token, last: Token) -> None:
        """Take the lines of whole facts, ``first`` to ``last``, each after a line feed; ``rows`` of them are RDATA."""
        self._add(lines if self._size else lines[1:])
        self.rows += rows
        self.last = last
        if self._first is None:
            self._first = first

    def end(self) -> None:
        """Write the last line feed."""
        if self._size:
            self._add(b"\n")

    def _add(self, data: bytes | memoryview) -> None:
        self._sum.update(data)
        self._sink.write(data)
        self._size += len(data)

    def finish(self, upto: Token, stored_size: int) -> Segment:
        """Return the segment, which reaches to ``upto``."""
        stream, instance, after = self._of
        return Segment(
            stream,
            instance,
            after,
            upto,
            self.rows,
            self._first,
            self.last,
            self._size,
            self._sum.hexdigest(),
            stored_size,
            self._compression,
            self._compacted,
        )


@contextmanager
def compressed(sink: BinaryIO, compression: str) -> Iterator[ISink]:
    """Compress what is written into ``sink``: the same bytes for the same lines, complete once the block is left."""
    if compression == "none":
        yield sink
    elif compression == "gzip":
        with gzip.GzipFile("", "wb", GZIP_LEVEL, sink, mtime=0) as squeezed:
            yield squeezed
    else:
        frames = _Frames(sink)
        yield frames
        frames.close()


class _Frames:
    """Zstandard frames of FRAME bytes each, the last of less: compressed at once each takes a sixth less time."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._compressor = _zstandard().ZstdCompressor(ZSTD_LEVEL)
        self._held = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Write the frames that are full."""
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
        """Write the last one."""
        self._frame(self._held)

    def _frame(self, data: bytes | bytearray | memoryview) -> None:
        self._sink.write(self._compressor.compress(data))


def check_compression(compression: str) -> None:
    """Return if segments can be written so on this machine; else ConfigError."""
    if compression not in SUFFIXES:
        raise ConfigError(f"no compression is called {compression!r:.40}: say one of {', '.join(SUFFIXES)}")
    if compression == "zstd":
        _zstandard()


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415 (only who needs it must have it)
    except ImportError as error:
        raise ConfigError("zstd needs a module: pip install '.[zstd]' in the checkout") from error
    return zstandard


# ---- reading


def _chunks(source: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield the lines of an open file, in pieces that end anywhere; CatchUpError if they cannot be had."""
    if compression == "none":
        lines: Any = source
    elif compression == "gzip":
        lines = gzip.GzipFile(fileobj=source)
    else:
        lines = _zstandard().ZstdDecompressor().stream_reader(source, read_across_frames=True, closefd=False)
    while chunk := lines.read(CHUNK):
        yield chunk


class OpenSegment:
    """A segment whose sum has been checked, and the facts in it from the beginning on."""

    def __init__(self, folder: IFolder, segment: Segment, *, checked: bool = False) -> None:
        """Open it, and check it unless it was ``checked`` before; CatchUpError says what is wrong with which file."""
        self.segment = segment
        self._where = f"{folder.url}/{segment.name}"
        try:
            self._source = folder.open(segment.name)
        except OSError as error:
            raise CatchUpError(f"{self._where}: {error.strerror or error}") from error
        if checked:
            return
        try:
            self._check()
            self._source.seek(0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def facts(self) -> Iterator[list[Fact]]:
        """Yield its facts, some at a time; one without texts has to be fetched elsewhere.

        CatchUpError if a line is not one of this segment: the manifest agrees with it, so it was written like that.
        """
        gather = _Gather(self.segment)
        rest = b""
        for chunk in self._lines():
            whole, _, rest = (rest + chunk).rpartition(b"\n")
            if whole:
                try:
                    yield gather.facts(whole.decode())
                except (RemoteProtocolError, UnicodeDecodeError) as error:
                    raise CatchUpError(f"{self._where}: {error}") from error
        if rest or not gather.complete:
            raise CatchUpError(f"{self._where}: it ends in the middle of a fact")

    def _check(self) -> None:
        found, size = hashlib.sha256(), 0
        for chunk in self._lines():
            found.update(chunk)
            size += len(chunk)
        if (size, found.hexdigest()) != (self.segment.size, self.segment.sha256):
            raise CatchUpError(f"{self._where}: damaged: its lines are not those that the manifest says")

    def _lines(self) -> Iterator[bytes]:
        try:
            yield from _chunks(self._source, self.segment.compression)
        except (OSError, EOFError, zlib.error) as error:
            raise CatchUpError(f"{self._where}: damaged: {error}") from error
        except ConfigError as error:
            raise CatchUpError(f"{self._where}: {error}") from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # a class of an optional module
                raise
            raise CatchUpError(f"{self._where}: damaged: {error}") from error


class _Gather:
    """Lines of one segment back into facts."""

    def __init__(self, segment: Segment) -> None:
        self._rdata = f"RDATA {segment.stream} {segment.instance} "
        self._position = f"POSITION {segment.stream} {segment.instance} "
        self._begun: list[str] = []

    @property
    def complete(self) -> bool:
        """Whether no fact has begun and not ended."""
        return not self._begun

    def facts(self, lines: str) -> list[Fact]:
        """Return the facts that these lines complete; RemoteProtocolError for a line that does not belong here."""
        rdata = self._rdata
        rows = lines.removeprefix(rdata).split(f"\n{rdata}")
        if not lines.startswith(rdata) or len(rows) <= lines.count("\n"):
            return [fact for line in lines.split("\n") for fact in self._fact(line)]
        split = [row.partition(" ") for row in rows]
        places = grammar.places([place for place, _, _ in split])
        texts = [text for _, _, text in split]
        if self._begun or None in places:
            return self._join(places, texts)
        return facts_of_rows(cast("Sequence[Token]", places), texts)

    def _fact(self, line: str) -> list[Fact]:
        if line.startswith(self._rdata):
            return self.facts(line)
        first, _, second = line.removeprefix(self._position).partition(" ")
        if not line.startswith(self._position) or first != second or self._begun:
            raise RemoteProtocolError(f"not a line of this segment: {line[:80]!r}")
        return [Fact(grammar.token(first), ())]

    def _join(self, places: Sequence[Token | None], texts: Sequence[str]) -> list[Fact]:
        facts, start = [], 0
        for end, place in enumerate(places, 1):
            if place is not None:
                facts.append(Fact(place, (*self._begun, *texts[start:end])))
                self._begun.clear()
                start = end
        self._begun += texts[start:]
        return facts


# ---- checking


def verify(folder: IFolder) -> Iterator[tuple[Segment | None, str | None]]:
    """Yield each segment with what is wrong with it, or None; and what is wrong with the whole, with no segment.

    CatchUpError if there is no manifest to check by.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CatchUpError(f"{folder.url} has no {MANIFEST}: it is not a folder of segments, or no run has finished")
    for fault in manifest.faults():
        yield None, fault
    for segment in manifest.segments:
        yield segment, fault_of(folder, segment)


def fault_of(folder: IFolder, segment: Segment) -> str | None:
    """Return what is wrong with a segment: its file, its sums, its lines, their order; None if nothing is."""
    try:
        opened = OpenSegment(folder, segment)
    except CatchUpError as error:
        return str(error)
    try:
        return _fault_in(folder, opened, segment)
    except CatchUpError as error:
        return str(error)
    finally:
        opened.close()


def _fault_in(folder: IFolder, opened: OpenSegment, segment: Segment) -> str | None:
    where = f"{folder.url}/{segment.name}"
    if (size := folder.size(segment.name)) != segment.stored_size:
        return f"{where}: it has {size} bytes, the manifest says {segment.stored_size}"
    first, last, rows = None, segment.after, 0
    for facts in opened.facts():
        tokens = tokens_of(facts)
        if not is_ascending([last, *tokens]) or (tokens and tokens[-1] > segment.upto):
            return f"{where}: its tokens do not ascend from {segment.after} to {segment.upto}"
        if tokens:
            first, last = first or tokens[0], tokens[-1]
        rows += sum([len(fact.texts) for fact in facts])
        try:
            grammar.row_texts(texts_of(facts))
        except RemoteProtocolError as error:
            return f"{where}: between fact {tokens[0]} and {tokens[-1]}: {error}"
    if (first, last if first else None, rows) != (segment.first, segment.last, segment.rows):
        return f"{where}: it has {rows} rows from {first} to {last}, the manifest says otherwise"
    return None


# ---- sweeping


def sweep(folder: IFolder, manifest: Manifest, keep: Iterable[str] = ()) -> list[str]:
    """Remove what interrupted runs have left and nobody will ask for; returns the names of the files.

    Those are segments that no manifest lists, and files that were not written to their end.  ``keep`` names others that
    are still needed.
    """
    known = {*[each.name for each in manifest.segments], *keep}
    swept = [name for name in folder.names() if _is_ours(name) and name not in known]
    for name in swept:
        folder.remove(name)
    return swept


def _is_ours(name: str) -> bool:
    match name.split("/"):
        case [file]:
            return file.startswith(".") and file.endswith(TEMPORARY)
        case [_, _, file]:
            stem, _, suffix = file.partition(".rdata")
            return suffix in SUFFIXES.values() and len(stem) == 41 and stem.replace("-", "", 1).isdigit()  # noqa: PLR2004
    return False


def check_folder(folder: IFolder) -> Manifest:
    """Return the manifest of a folder that is to be written to, an empty one if it has none; StoreError if damaged."""
    try:
        manifest = read_manifest(folder) or Manifest()
    except CatchUpError as error:
        raise StoreError(f"{error}; give another folder, or move this one away") from error
    if faults := manifest.faults():
        raise StoreError(f"{folder.url}: {faults[0]}: move this folder away and begin a new one")
    return manifest
