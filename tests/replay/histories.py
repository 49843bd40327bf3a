"""Databases with a known history, segments written by hand, and the lines that the live master would send for both."""

from __future__ import annotations

import sqlite3
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from replication.replay.folders import LocalFolder
from replication.replay.segments import Manifest, SegmentWriter, compressed, write_manifest
from replication.session.feed import spell_facts
from replication.storage.connection import POSITION, PUT_POSITION, STEPS
from replication.storage.migrate import upgrade
from replication.storage.tables import GenericTable
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from replication.replay.segments import Segment

STREAM = StreamName("orders")
MASTER = InstanceName("master")
OTHER = InstanceName("worker2")


def fact(token: int, *rows: object) -> Fact:
    """Return a fact with these rows, spelt."""
    return Fact(Token(token), tuple(grammar.spell_row(row) for row in rows))


def live_lines(facts: Sequence[Fact], writer: str = MASTER, stream: str = STREAM, limit: int = LINE_LIMIT) -> bytes:
    """Return what the master sends for facts, all of them being settled."""
    told = [each for each in facts if each.texts]
    after, upto = (Token(0), told[-1].token) if told else (Token(0), Token(0))
    chunks = spell_facts(StreamName(stream), InstanceName(writer), told, after=after, upto=upto, line_limit=limit)
    return b"".join(chunk.data for chunk in chunks)


def write_database(
    path: Path,
    histories: Mapping[str, Sequence[Fact]],
    *,
    stream: StreamDefinition | str = STREAM,
    positions: Mapping[str, int] | None = None,
) -> str:
    """Add facts, by writer, to a database as the store has it, and return its URL.

    A writer's position is its last fact's token unless ``positions`` says otherwise.
    """
    table = GenericTable(StreamDefinition(stream) if isinstance(stream, str) else stream)
    reached = {writer: facts[-1].token for writer, facts in histories.items() if facts} | dict(positions or {})
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("PRAGMA journal_mode = WAL")
        upgrade(lambda sql: database.execute(sql).fetchall(), nullcontext, STEPS)
        table.declare(database, may_create=True)
        for writer, facts in histories.items():
            table.insert(database, InstanceName(writer), facts)
        for writer, token in reached.items():
            key = (table.definition.name, writer)
            database.execute(f"{PUT_POSITION} excluded.stream_id", (*key, table.direction.sign * token))
            assert database.execute(POSITION, key).fetchall()
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
    """Write one segment, not yet in the manifest, line by line."""
    of = StreamName(stream), InstanceName(writer), Token(after)
    with folder.create("being written") as sink, compressed(sink, compression) as lines:
        writing = SegmentWriter(lines, *of, compression, compacted=False)
        for each in facts:
            if data := live_lines([each], writer, stream, limit):
                writing.write(b"\n" + data[:-1], data.count(b"RDATA"), each.token, each.token)
        writing.end()
    end = upto if upto is not None else facts[-1].token
    segment = writing.finish(Token(end), folder.size("being written") or 0)
    folder.move("being written", segment.name)
    return segment


def write_folder(path: Path, facts: Sequence[Fact], *, ends: Sequence[int], compression: str = "none") -> LocalFolder:
    """Write a chain of segments that end at these tokens, with its manifest."""
    folder = LocalFolder(path)
    segments = []
    after = 0
    for end in ends:
        some = [each for each in facts if after < each.token <= end]
        segments.append(write_segment(folder, some, after=after, upto=end, compression=compression))
        after = end
    write_manifest(folder, Manifest(segments))
    return folder


def lines_of(folder: LocalFolder, segment: Segment) -> bytes:
    """Return the lines of a segment, read without our own code."""
    data = (folder.path / segment.name).read_bytes()
    if segment.compression == "gzip":
        import gzip

        return gzip.decompress(data)
    if segment.compression == "zstd":
        import zstandard

        return bytes(zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).readall())
    return data
