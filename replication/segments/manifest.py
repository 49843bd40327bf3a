"""The manifest of a segments folder: the JSON file that lists the segments that count (docs/spark.md).

::

    DIR/manifest.json
    DIR/STREAM/INSTANCE/FROM-UPTO.rdata[.gz|.zst]     FROM is exclusive, UPTO inclusive, twenty digits each
    DIR/.replay/                                      the unfinished work of a run

The segments of a stream and instance form a chain: each begins where the one before it ends.
A file that the manifest does not list does not count.
"""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import attrs
import msgspec

from replication.errors import CatchUpError, RemoteProtocolError, StoreError
from replication.segments.compression import SUFFIXES
from replication.segments.folders import TEMPORARY, read_index, write_index
from replication.streams.ids import LARGEST
from replication.streams.retention import SegmentChain
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from replication.segments.folders import Folder

_OUTSIDE: Final = frozenset(("", ".", ".."))  # no stream and no instance has such a folder
MANIFEST: Final = "manifest.json"
WORK: Final = ".replay"
VERSION: Final = 1  # of the manifest's format
NOT_DECODED: Final = (msgspec.MsgspecError, ValueError, RecursionError)  # what msgspec raises
NOT_AN_ENTRY: Final = (*NOT_DECODED, RemoteProtocolError, TypeError, KeyError)

# By the keys of an entry, the attributes.
KEYS: Final = {
    "stream": "stream",
    "instance": "instance",
    "from": "after",
    "upto": "upto",
    "rows": "rows",
    "first_token": "first",
    "last_token": "last",
    "bytes": "size",
    "sha256": "sha256",
    "file": "name",
    "file_bytes": "stored_size",
    "compression": "compression",
    "compacted": "compacted",
    "compacted_upto": "compacted_upto",
    "left_out": "left_out",
    "left_out_from": "left_out_from",
}
_OPTIONAL: Final = frozenset(
    {"compacted", "compacted_upto", "left_out", "left_out_from"}
)  # an entry lacks them if they are false or 0
_ATTRIBUTES: Final = {field: key for key, field in KEYS.items()}

_Id = Annotated[Token, msgspec.Meta(ge=0, le=LARGEST)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class Segment(msgspec.Struct, frozen=True, rename=_ATTRIBUTES):
    """One file: the facts of one writer with ``after < token <= upto``.

    Attributes:
        rows: the number of its RDATA lines.
        first: the token of its first fact, None if it has no fact; ``last`` likewise.
        size: bytes of its lines, uncompressed; ``sha256`` is the checksum of the same bytes.
        stored_size: bytes of the file.
        compacted: whether facts were left out that a later fact with the same key replaces.
        compacted_upto: the end of the range that has these later facts; 0 if it is not compacted, or in older entries.
        left_out: the number of facts that no line can hold, of which it has a POSITION; ``left_out_from`` is the first.

    """

    stream: StreamName
    instance: InstanceName
    after: _Id
    upto: _Id
    rows: _Count
    first: _Id | None
    last: _Id | None
    size: _Count
    sha256: str
    stored_size: _Count
    compression: str
    compacted: bool = False
    compacted_upto: _Id = Token(0)
    left_out: _Count = 0
    left_out_from: _Id = Token(0)

    @property
    def name(self) -> str:
        """The file's path, relative to the folder."""
        suffix = SUFFIXES[self.compression]
        return f"{self.stream}/{instance_folder(self.instance)}/{self.after:020}-{self.upto:020}.rdata{suffix}"

    def to_json(self) -> dict[str, object]:
        """Return its entry in the manifest."""
        values = {**msgspec.structs.asdict(self), "name": self.name}
        return {key: values[field] for key, field in KEYS.items() if key not in _OPTIONAL or values[field]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Segment:
        """Return the segment of an entry; one of the errors of ``NOT_AN_ENTRY`` if it is not one."""
        segment = msgspec.convert(entry, cls)
        grammar.stream_name(segment.stream)
        grammar.instance_name(segment.instance)
        if segment.compression not in SUFFIXES:
            raise ValueError(f"`compression` is none of {', '.join(SUFFIXES)}")
        if 0 < segment.compacted_upto < segment.upto:
            raise ValueError(f"`compacted_upto` {segment.compacted_upto} is below `upto` {segment.upto}")
        if segment.left_out and not segment.after < segment.left_out_from <= segment.upto:
            raise ValueError(f"`left_out_from` {segment.left_out_from} is not above `from` and up to `upto`")
        if (name := entry.get("file")) != segment.name:
            raise ValueError(f"`file` {name!r:.200} should be {segment.name!r}")
        if not _OUTSIDE.isdisjoint(segment.name.split("/")):
            raise ValueError(f"`file` {name!r} is outside of the folder")
        return segment


def instance_folder(instance: InstanceName) -> str:
    """Return the name of an instance's folder: characters that a file name cannot have are percent-encoded."""
    name = quote(instance, safe="")
    return name.replace(".", "%2E", 1) if name.startswith(".") else name


def staged_name(work: str, instance: InstanceName, after: Token) -> str:
    """Return the path of a segment until its run has finished; ``work`` is the folder of its task."""
    return f"{work}/{instance_folder(instance)}/{after:020}"


def move_staged(folder: Folder, staged: str, segment: Segment) -> None:
    """Give a segment its name, unless an interrupted run has done it; StoreError if its file is lost."""
    if folder.size(staged) is not None:
        folder.move(staged, segment.name)
    if (size := folder.size(segment.name)) != segment.stored_size:
        what = "is missing" if size is None else f"has {size} bytes, not {segment.stored_size}"
        raise StoreError(
            f"{folder.url}/{segment.name} {what}: something else writes to this folder; no segment was added: run the "
            "same command again, alone"
        )


_RANGE: Final = re.compile(r"[0-9]{20}-[0-9]{20}")  # of a segment, in its name
_chain_of = attrgetter("stream", "instance")
_place_of = attrgetter("stream", "instance", "after")


def _in_order(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    return tuple(sorted(segments, key=_place_of))


@attrs.frozen
class Manifest:
    """The segments that count, sorted by stream, instance and token.

    ``has_histories``: the folder must have ``histories.json``; an older version wrote no such key.
    ``of_histories``: SHA-256 of that file, as runs over these segments have written it, the newest last.  Any of them
    is right, because what a writer's history adds later only makes less of the segments valid.  Empty: not checked.
    """

    segments: Sequence[Segment] = attrs.field(default=(), converter=_in_order)
    has_histories: bool = False
    of_histories: Sequence[str] = ()

    def chains(self) -> dict[tuple[StreamName, InstanceName], list[Segment]]:
        """Return the segments of each stream and instance."""
        return {key: list(chain) for key, chain in groupby(self.segments, _chain_of)}

    def summary(self, folder: str) -> list[SegmentChain]:
        """Return what the segments of each stream and instance have; ``folder`` is their URL."""
        return [
            SegmentChain(
                folder,
                stream,
                writer,
                chain[0].after,
                chain[-1].upto,
                sum(each.rows for each in chain),
                sum(each.stored_size for each in chain),
            )
            for (stream, writer), chain in self.chains().items()
        ]

    def faults(self) -> list[str]:
        """Return a line for each gap, each overlap, and each segment that ends before it begins."""
        found = []
        for chain in self.chains().values():
            found += [f"{each.name}: ends before it begins" for each in chain if each.upto <= each.after]
            for before, each in pairwise(chain):
                if before.upto != each.after:
                    what = "leaves a gap after" if each.after > before.upto else "overlaps"
                    found.append(f"{each.name}: {what} {before.name}")
        return found

    def encode(self) -> bytes:
        """Return the file's content: JSON, one line for each segment."""
        lines = ",\n".join([grammar.encode_row(each.to_json()) for each in self.segments])
        histories = ',"histories":true' if self.has_histories else ""
        if self.of_histories:
            histories += f',"histories_sha256":{grammar.encode_row(self.of_histories)}'
        return f'{{"version":{VERSION}{histories},"segments":[\n{lines}\n]}}\n'.encode()


class _Version(msgspec.Struct):
    version: int


class _Content(msgspec.Struct):
    segments: list[dict[str, Any]]
    histories: bool = False
    histories_sha256: tuple[str, ...] = ()


def read_manifest(folder: Folder) -> Manifest | None:
    """Return the manifest of a folder, None if it has none; CatchUpError if it cannot be read."""
    try:
        text = read_index(folder, MANIFEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CatchUpError(f"{folder.url}/{MANIFEST}: {error.strerror or error}") from error
    entries, segments = list[dict[str, Any]](), list[Segment]()
    try:
        content = msgspec.json.decode(text)
        if (version := msgspec.convert(content, _Version).version) != VERSION:
            cure = "update this package, or read another folder"
            raise CatchUpError(f"{folder.url}/{MANIFEST}: it has version {version}, not {VERSION}: {cure}")
        listed = msgspec.convert(content, _Content)
        entries = listed.segments
        segments.extend(map(Segment.from_json, entries))
    except NOT_AN_ENTRY as error:
        where = f"segment {len(segments) + 1}: " if entries else ""
        raise CatchUpError(
            f"{folder.url}/{MANIFEST}: not a manifest of segments: {where}{error}: restore it from a copy"
        ) from error
    return Manifest(segments, listed.histories, listed.histories_sha256)


def read_manifest_to_extend(folder: Folder) -> Manifest:
    """Return the manifest of a folder that segments will be added to, an empty one if it has none.

    StoreError if the manifest cannot be read, or if its ranges have gaps or overlap.
    """
    try:
        manifest = read_manifest(folder) or Manifest()
    except CatchUpError as error:
        raise StoreError(f"{error}; write to another folder, or move this one away") from error
    if faults := manifest.faults():
        raise StoreError(f"{folder.url}: {faults[0]}: write to another folder, or move this one away")
    return manifest


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Replace the manifest in one step; StoreError if the folder cannot be written, or has too many segments."""
    write_index(folder, MANIFEST, manifest.encode())


def remove_leftovers(
    folder: Folder,
    manifest: Manifest,
    begins: Mapping[tuple[StreamName, InstanceName], Token],
    keep: Iterable[str] = (),
) -> list[str]:
    """Remove what interrupted runs left behind, except the files in ``keep``; returns the removed files' names.

    These are temporary files, and segments that the manifest does not list.  ``begins`` has the places from which on
    this run writes: other segments stay, because their facts may be deleted, and the manifest may be an old one.
    """
    known = {*[each.name for each in manifest.segments], *keep}
    folders: dict[tuple[str, str], Token] = {
        (stream, instance_folder(writer)): begin for (stream, writer), begin in begins.items()
    }
    leftovers = [name for name in folder.names() if _is_leftover(name, folders) and name not in known]
    for name in leftovers:
        folder.remove(name)
    return leftovers


def _is_leftover(name: str, begins: Mapping[tuple[str, str], Token]) -> bool:
    match name.split("/"):
        case [file]:
            return file.startswith(".") and file.endswith(TEMPORARY)
        case [stream, writer, file] if (stream, writer) in begins:
            stem, _, suffix = file.partition(".rdata")
            is_ours = suffix in SUFFIXES.values() and _RANGE.fullmatch(stem) is not None
            return is_ours and int(stem.partition("-")[0]) >= begins[stream, writer]
    return False
