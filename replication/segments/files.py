"""Segment files: RDATA lines in, facts out; and ``replication replay --verify``, which reads every file of a folder.

A line is byte for byte the line that the live master sends for the same fact.  A fact with a row that no line can hold
is ``POSITION stream instance T T``, or ``2 1`` for token 1, as on the wire: its rows must be fetched elsewhere.
"""

from __future__ import annotations

import hashlib
import zlib
from contextlib import closing
from gzip import BadGzipFile
from os import SEEK_END
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from replication.errors import CatchUpError, ConfigError, RemoteProtocolError, StoreError
from replication.segments.compression import check_compression, decompress
from replication.segments.histories import stored_histories
from replication.segments.manifest import MANIFEST, read_manifest
from replication.session.encoder import FIRST_GAP
from replication.streams.facts import Fact, count_rows, facts_of_rows, is_ascending, row_bytes, texts_of, tokens_of
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.segments.compression import ISink
    from replication.segments.folders import Folder
    from replication.segments.manifest import Segment
    from replication.wire.grammar import Token

MAX_LINE: Final = 64 * 2**20  # bytes without the LF; CHUNK is less
MAX_FACT: Final = 2**30  # bytes of memory for the rows of one fact; appends accept much less (MAX_FACT_BYTES)
_CUT: Final = "it ends in the middle of a fact"


class UnreadableError(CatchUpError):
    """A file could not be read now; what it has may be right."""


@attrs.define
class SegmentWriter:
    """Writes the lines of one segment to ``sink``, counts them, and computes their checksum."""

    sink: ISink
    rows: int = 0
    first: Token | None = None
    last: Token | None = None
    size: int = 0
    _checksum: Any = attrs.field(factory=hashlib.sha256)

    def write(self, lines: bytes | memoryview, rows: int, first: Token, last: Token) -> None:
        """Write the lines of whole facts.

        Args:
            lines: each begins with its line feed.
            rows: how many of the lines are RDATA.
            first: the token of the first fact.
            last: the token of the last fact.

        """
        self._add(lines if self.size else lines[1:])
        self.rows += rows
        self.last = last
        if self.first is None:
            self.first = first

    def end(self) -> None:
        """Write the line feed of the last line."""
        if self.size:
            self._add(b"\n")

    def _add(self, data: bytes | memoryview) -> None:
        self._checksum.update(data)
        self.sink.write(data)
        self.size += len(data)

    def summary(self) -> tuple[int, Token | None, Token | None, int, str]:
        """Return rows, first and last token, size and checksum, as the manifest's entry has them."""
        return self.rows, self.first, self.last, self.size, self._checksum.hexdigest()


class SegmentReader:
    """Reads the facts of a segment whose checksum is right."""

    def __init__(self, folder: Folder, segment: Segment, *, checked: object = None) -> None:
        """Open the file and compare its checksum; CatchUpError names the file.

        The checksum is not compared again if the file still has the stamp with which it was ``checked`` before.
        """
        self.segment = segment
        self._folder = folder
        self._path = f"{folder.url}/{segment.name}"
        try:
            self._source = folder.open(segment.name)
        except OSError as error:
            raise UnreadableError(f"{self._path}: {error.strerror or error}") from error
        try:
            self._stamp = self._stamp_now()  # before the content is read
            if checked is not None and checked == self._stamp:
                return
            self._check()
            self._source.seek(0)
        except OSError as error:
            self.close()
            raise UnreadableError(f"{self._path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def check_unchanged(self) -> None:
        """Raise UnreadableError if another program has written into the file since its checksum was compared.

        What was read then may have another checksum.  A file that takes the place of a local one does no harm.
        """
        if self._stamp_now() != self._stamp:
            raise UnreadableError(f"{self._path}: it was changed while it was read; it is checked again")

    def facts(self) -> Iterator[list[Fact]]:
        """Yield its facts in lists; a fact without rows must be fetched from another source.

        CatchUpError if a line or a fact cannot stand in this segment: as the checksum is right, the file or the
        manifest was written wrong.  Every fact of the lists before is right.
        """
        segment, parser = self.segment, _LineParser(self.segment)
        first, last, rows = None, segment.after, 0
        for lines in self._lines():
            try:
                facts = parser.facts(lines.decode())
            except (RemoteProtocolError, UnicodeDecodeError) as error:
                raise CatchUpError(f"{self._path}: {error}") from error
            if facts:
                self._check_facts(facts, last)
                first, last = first or facts[0].token, facts[-1].token
                rows += count_rows(facts)
                yield facts
        if not parser.complete:
            raise CatchUpError(f"{self._path}: {_CUT}")
        if (first, last if first else None, rows) != (segment.first, segment.last, segment.rows):
            expected = f"{segment.rows} rows from {segment.first} to {segment.last}"
            raise CatchUpError(f"{self._path}: it has {rows} rows from {first} to {last}; the manifest has {expected}")

    def _stamp_now(self) -> object:
        try:
            return self._folder.stamp_of(self._source, self.segment.name)
        except StoreError as error:
            raise UnreadableError(str(error)) from error

    def _check_facts(self, facts: Sequence[Fact], after: Token) -> None:
        """Raise CatchUpError unless facts ascend from ``after`` and their rows are JSON."""
        tokens = tokens_of(facts)
        if not is_ascending([after, *tokens]) or tokens[-1] > self.segment.upto:
            raise CatchUpError(
                f"{self._path}: its tokens do not ascend from {self.segment.after} to {self.segment.upto}"
            )
        try:
            grammar.json_texts(texts_of(facts))
        except RemoteProtocolError as error:
            raise CatchUpError(f"{self._path}: between fact {tokens[0]} and {tokens[-1]}: {error}") from error

    def _lines(self) -> Iterator[bytes]:
        """Yield whole lines, many at once, without the last line feed."""
        begun: list[bytes] = []
        for chunk in self._chunks():
            whole, found, rest = chunk.rpartition(b"\n")
            if found:
                yield b"".join([*begun, whole])
                begun.clear()
            begun.append(rest)
        if any(begun):
            raise CatchUpError(f"{self._path}: {_CUT}")

    def _check(self) -> None:
        stored = self._source.seek(0, SEEK_END)
        if stored != self.segment.stored_size:  # gzip would read any number of zeros at the end, one after the other
            expected = f"the manifest has {self.segment.stored_size}"
            raise CatchUpError(f"{self._path}: damaged: it has {stored} bytes; {expected}")
        self._source.seek(0)
        checksum, size = hashlib.sha256(), 0
        for chunk in self._chunks():
            checksum.update(chunk)
            size += len(chunk)
        if (size, checksum.hexdigest()) != (self.segment.size, self.segment.sha256):
            raise CatchUpError(f"{self._path}: damaged: its lines do not have the checksum of the manifest")

    def _chunks(self) -> Iterator[bytes]:
        """Yield the content in pieces; CatchUpError where it has more than the manifest, or too long a line."""
        size = line = 0
        for chunk in self._unpack():
            size += len(chunk)
            if size > self.segment.size:
                raise CatchUpError(
                    f"{self._path}: damaged: it has more than the {self.segment.size} bytes of the manifest"
                )
            ends = chunk.find(b"\n")
            if line + (len(chunk) if ends < 0 else ends) > MAX_LINE:
                raise CatchUpError(f"{self._path}: a line of more than {MAX_LINE} bytes")
            line = line + len(chunk) if ends < 0 else len(chunk) - chunk.rfind(b"\n") - 1
            yield chunk

    def _unpack(self) -> Iterator[bytes]:
        try:
            yield from decompress(self._source, self.segment.compression)
        except (BadGzipFile, EOFError, zlib.error) as error:
            raise CatchUpError(f"{self._path}: damaged: {error}") from error
        except OSError as error:
            raise UnreadableError(f"{self._path}: {error.strerror or error}") from error
        except ConfigError as error:
            raise CatchUpError(f"{self._path}: {error}") from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # a class of an optional module
                raise
            raise CatchUpError(f"{self._path}: damaged: {error}") from error


class _LineParser:
    """Turns the lines of one segment into facts."""

    def __init__(self, segment: Segment) -> None:
        self._rdata = f"RDATA {segment.stream} {segment.instance} "
        self._position = f"POSITION {segment.stream} {segment.instance} "
        self._begun: list[str] = []  # rows of a fact whose last row has not come yet
        self._begun_bytes = 0

    @property
    def complete(self) -> bool:
        """Whether the last row of every fact has come."""
        return not self._begun

    def facts(self, lines: str) -> list[Fact]:
        """Return the facts that ``lines`` complete; RemoteProtocolError for a line that cannot stand in the segment."""
        rdata = self._rdata
        rows = lines.removeprefix(rdata).split(f"\n{rdata}")
        if not lines.startswith(rdata) or len(rows) <= lines.count("\n"):
            return [fact for line in lines.split("\n") for fact in self._fact(line)]
        firsts, texts = list[str](), list[str]()
        for row in rows:  # a list of tuples would take longer: the garbage collector visits it
            first, _, text = row.partition(" ")
            firsts.append(first)
            texts.append(text)
        places = grammar.places(firsts)
        if self._begun or None in places:
            return self._join(places, texts)
        return facts_of_rows(cast("Sequence[Token]", places), texts)

    def _fact(self, line: str) -> list[Fact]:
        if line.startswith(self._rdata):
            return self.facts(line)
        first, _, second = line.removeprefix(self._position).partition(" ")
        is_gap = first == second or (first, second) == (str(FIRST_GAP), "1")
        if not line.startswith(self._position) or not is_gap or self._begun:
            raise RemoteProtocolError(f"not a line of this segment: {line[:80]!r}")
        return [Fact(grammar.token(second), ())]

    def _join(self, places: Sequence[Token | None], texts: Sequence[str]) -> list[Fact]:
        facts, start = [], 0
        for end, place in enumerate(places, 1):
            if place is not None:
                facts.append(Fact(place, (*self._begun, *texts[start:end])))
                self._begun.clear()
                start = end
        self._begun_bytes = row_bytes(texts[start:]) + (self._begun_bytes if self._begun else 0)
        if self._begun_bytes > MAX_FACT:
            raise RemoteProtocolError(f"a fact of more than {MAX_FACT} bytes")
        self._begun += texts[start:]
        return facts


def verify(folder: Folder) -> Iterator[tuple[Segment | None, str | None]]:
    """Read the histories of a folder, and compare every segment with the manifest (docs/spark.md).

    Yields each segment with its fault, or None; and each fault between segments, with None for the segment.

    CatchUpError if the folder has no manifest, ConfigError if this machine lacks a module that decompresses a segment.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CatchUpError(f"{folder.url} has no {MANIFEST}: it is not a segments folder, or no run has finished")
    for compression in {each.compression for each in manifest.segments}:
        check_compression(compression)
    for fault in manifest.faults():
        yield None, fault
    try:
        stored_histories(folder, manifest)
    except StoreError as error:
        yield None, str(error)
    for segment in manifest.segments:
        yield segment, verify_segment(folder, segment)


def verify_segment(folder: Folder, segment: Segment) -> str | None:
    """Return the first fault of a segment, None if it has none: file, sizes, checksum, lines, order, JSON, counts."""
    try:
        with closing(SegmentReader(folder, segment)) as reader:
            for _ in reader.facts():
                pass
    except CatchUpError as error:
        return str(error)
    return None
