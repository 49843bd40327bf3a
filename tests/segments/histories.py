"""Databases with known facts, segments written by hand, and the lines that the live master sends for both."""

from __future__ import annotations

import hashlib
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from replication.segments.compression import compress
from replication.segments.files import SegmentWriter, verify
from replication.segments.folders import LocalFolder
from replication.segments.histories import HISTORIES
from replication.segments.manifest import WORK, Manifest, Segment, read_manifest, staged_name, write_manifest
from replication.segments.run import ReplayRequest, SegmentOptions, StreamRange, WriterRange
from replication.session.encoder import encode_facts
from replication.storage.migrations import upgrade
from replication.storage.sqlite.connection import ON_DEMAND, POSITION, PUT_POSITION, STEPS
from replication.storage.sqlite.generic import GenericTable
from replication.storage.sqlite.session import SqliteSession
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STREAM = StreamName("orders")
MASTER = InstanceName("master")
OTHER = InstanceName("worker2")


def fact(token: int, *rows: object) -> Fact:
    """Return a fact with these rows, encoded."""
    return Fact(Token(token), tuple(grammar.encode_row(row) for row in rows))


def live_lines(facts: Sequence[Fact], writer: str = MASTER, stream: str = STREAM, limit: int = LINE_LIMIT) -> bytes:
    """Return what the master sends for settled facts."""
    sent = [each for each in facts if each.texts]
    after, upto = (Token(0), sent[-1].token) if sent else (Token(0), Token(0))
    chunks = encode_facts(StreamName(stream), InstanceName(writer), sent, after=after, upto=upto, line_limit=limit)
    return b"".join(chunk.data for chunk in chunks)


def write_database(
    path: Path,
    histories: Mapping[str, Sequence[Fact]],
    *,
    stream: StreamDefinition | str = STREAM,
    positions: Mapping[str, int] | None = None,
) -> str:
    """Add facts, by writer, to a database with the store's schema, and return its URL.

    A writer's position is its last fact's token unless ``positions`` has another.
    """
    table = GenericTable(StreamDefinition(stream) if isinstance(stream, str) else stream)
    reached = {writer: facts[-1].token for writer, facts in histories.items() if facts} | dict(positions or {})
    with closing(SqliteSession(str(path))) as session:
        session.connect()
        session.run("PRAGMA synchronous = OFF")
        session.run("PRAGMA journal_mode = WAL")
        session.begin()
        upgrade(session.run, nullcontext, STEPS, on_demand=ON_DEMAND)
        table.declare(session, may_create=True)
        table.insert(session, [(InstanceName(writer), facts) for writer, facts in histories.items()])
        for writer, token in reached.items():
            key = (table.definition.name, writer)
            session.run(f"{PUT_POSITION} excluded.stream_id", (*key, table.direction.sign * token))
            assert session.run(POSITION, key)
        session.commit()
    return f"sqlite:///{path}"


def write_segment(
    folder: LocalFolder,
    facts: Sequence[Fact],
    *,
    after: int = 0,
    upto: int | None = None,
    writer: str = MASTER,
    stream: str = STREAM,
    compression: str = "none",
    limit: int = LINE_LIMIT,
) -> Segment:
    """Write one segment line by line, without a manifest."""
    with folder.create("incomplete") as sink, compress(sink, compression) as lines:
        writing = SegmentWriter(lines)
        for each in facts:
            if data := live_lines([each], writer, stream, limit):
                rows = len(each.texts) if data.startswith(b"RDATA ") else 0
                writing.write(b"\n" + data[:-1], rows, each.token, each.token)
        writing.end()
    end = upto if upto is not None else facts[-1].token
    size = folder.size("incomplete") or 0
    instance = InstanceName(writer)
    segment = Segment(StreamName(stream), instance, Token(after), Token(end), *writing.summary(), size, compression)
    folder.move("incomplete", segment.name)
    return segment


def replace_lines(folder: LocalFolder, segment: Segment, lines: bytes) -> Segment:
    """Replace what an uncompressed segment has, and return its entry with the checksum of the new lines."""
    (folder.path / segment.name).write_bytes(lines)
    return replace(segment, sha256=hashlib.sha256(lines).hexdigest(), size=len(lines), stored_size=len(lines))


def write_folder(
    path: Path,
    facts: Sequence[Fact],
    *,
    ends: Sequence[int],
    after: int = 0,
    compression: str = "none",
    limit: int = LINE_LIMIT,
) -> LocalFolder:
    """Write a chain of segments that end at these tokens, with its manifest."""
    folder = LocalFolder(path)
    segments = []
    for end in ends:
        some = [each for each in facts if after < each.token <= end]
        segments.append(write_segment(folder, some, after=after, upto=end, compression=compression, limit=limit))
        after = end
    write_manifest(folder, Manifest(segments))
    return folder


def lines_of(folder: LocalFolder, segment: Segment) -> bytes:
    """Return the lines of a segment, read without the code under test."""
    data = (folder.path / segment.name).read_bytes()
    if segment.compression == "gzip":
        import gzip

        return gzip.decompress(data)
    if segment.compression == "zstd":
        import zstandard

        return bytes(zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).readall())
    return data


HISTORY = [fact(2, "a"), fact(5, "b", ["c", None]), fact(6, {"d": "é"}), fact(9, "e")]
FACTS = [fact(token, *[[token, index] for index in range(token % 3 + 1)]) for token in range(2, 200, 3)]
MASTERS_FACTS, OTHERS_FACTS = FACTS[::2], FACTS[1::2]


def writer_range(after: int, upto: int, writer: str = MASTER) -> WriterRange:
    """Return a writer's range."""
    return WriterRange(InstanceName(writer), Token(after), Token(upto))


def export(
    database: str,
    folder: LocalFolder,
    *writers: WriterRange,
    options: SegmentOptions | None = None,
    definition: StreamDefinition | None = None,
    exclusive: bool = True,
) -> list[Segment]:
    """Write one range over all that ``writers`` cover, each segment under its final name."""
    from replication.segments.export import export_range  # it needs an extra

    part = StreamRange.of(definition or StreamDefinition(STREAM), writers, exclusive=exclusive)
    segments = export_range(database, folder, part, options or SegmentOptions(compression="none"), WORK)
    for each in segments:
        folder.move(staged_name(WORK, each.instance, each.after), each.name)
    return segments


def segment_lines(folder: LocalFolder, segments: Sequence[Segment], writer: str = MASTER) -> bytes:
    """Return the lines of a writer's segments, joined."""
    return b"".join(lines_of(folder, each) for each in segments if each.instance == writer)


def request(database: str, tmp_path: Path, rows: int = 20, out: str = "out", **changes: Any) -> ReplayRequest:
    """Return a request for small segments."""
    return ReplayRequest(database, str(tmp_path / out), options=SegmentOptions(rows, "gzip"), **changes)


def chain_lines(folder: Path, writer: str = MASTER, stream: str = STREAM) -> bytes:
    """Return the lines of a chain, after checking that manifest and files agree and that there is no other file."""
    opened = LocalFolder(folder)
    assert [fault for _, fault in verify(opened) if fault] == []
    manifest = read_manifest(opened)
    assert manifest is not None
    names = [each for each in opened.names() if each != HISTORIES]
    assert names == sorted(["manifest.json", *[each.name for each in manifest.segments]])
    chain = manifest.chains().get((StreamName(stream), InstanceName(writer)), [])
    return b"".join(lines_of(opened, each) for each in chain)
