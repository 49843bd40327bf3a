"""Write one range of a stream's table as segments: read, compact, encode, compress, compute checksums.

This module needs the extra ``segments``.  No line becomes a Python object, because that would be slow.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from replication.errors import StoreError
from replication.segments.compression import compress
from replication.segments.databases import open_database
from replication.segments.files import MAX_LINE, SegmentWriter
from replication.segments.kept import check_kept
from replication.segments.manifest import Segment, staged_name
from replication.segments.tables import open_table
from replication.session.encoder import FIRST_GAP
from replication.streams.access_tokens import MAY_HAVE, hide_in_row
from replication.streams.definitions import CACHES
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from replication.segments.folders import Folder
    from replication.segments.run import SegmentOptions, StreamRange, WriterRange
    from replication.segments.tables import Columns, IntArray
    from replication.streams.definitions import StreamDefinition
    from replication.urls import Url
    from replication.wire.grammar import InstanceName, StreamName


LF: Final = 10
SPACE: Final = 32
FEW_ROWS: Final = 1_000  # in a segment, if rows are long: a batch has no rows of another range
NOT_ASCII: Final = 128  # the smallest byte that is not ASCII


def export_range(
    database_url: str | Url, folder: Folder, part: StreamRange, options: SegmentOptions, work: str
) -> list[Segment]:
    """Write the segments of a range, each under :func:`staged_name` in ``work``, and return their entries.

    StoreError if the database or the folder fails, or if rows are too long; then no file is left.
    """
    try:
        return _export_range(database_url, folder, part, options, work)
    except pa.ArrowCapacityError as error:  # a batch has a limit of rows, and Arrow one of its bytes
        rows = max(min(FEW_ROWS, options.segment_rows // 10), 1)
        raise StoreError(
            f"the rows of stream {part.definition.name!r} between ID {part.after} and {part.upto} are too long to be "
            f"read at once: give a smaller --segment-rows than {options.segment_rows}, such as {rows}"
        ) from error


def _export_range(
    database_url: str | Url, folder: Folder, part: StreamRange, options: SegmentOptions, work: str
) -> list[Segment]:
    definition = part.definition
    with closing(open_database(database_url)) as database, ExitStack() as stack:
        if gc.isenabled():  # it costs a third of the time, and these values form no cycles
            gc.disable()
            stack.callback(gc.enable)
        table = open_table(database, definition)
        exports = [
            stack.enter_context(_WriterExport(_TaskFolder(folder, work), definition, each, number, options))
            for number, each in enumerate(part.writers)
        ]
        hide = _without_access_tokens if definition.name == CACHES and not options.access_tokens else iter
        if options.compact and definition.key:
            for columns in hide(table.columns(part)):
                for each in exports:
                    each.find_last_facts(columns)
        for columns in hide(table.columns(part)):
            for each in exports:
                each.add(columns)
        check_kept(database, part)  # facts may have been deleted while they were read
        return [segment for each in exports for segment in each.finish()]


def _without_access_tokens(found: Iterator[Columns]) -> Iterator[Columns]:
    for columns in found:
        with_tokens = pc.match_substring_regex(columns.rows, MAY_HAVE)
        if pc.any(with_tokens).as_py():
            hidden = pa.array(map(hide_in_row, columns.rows.filter(with_tokens).to_pylist()), pa.string())
            columns = columns._replace(rows=pc.replace_with_mask(columns.rows, with_tokens, hidden))  # noqa: PLW2901
        yield columns


@attrs.frozen
class Lines:
    """The lines of a writer's rows, one for each row; the line is empty if the row has none.

    Each line begins with its line feed, so the joined texts are the content of the file and are not copied again.
    """

    tokens: IntArray
    _texts: pa.Array
    _positions: IntArray | None = None  # a mask of the rows whose facts are POSITIONs, None if there is no such fact

    def part(self, start: int, end: int) -> Lines:
        """Return the lines of the rows ``start`` to ``end``."""
        positions = None if self._positions is None else self._positions[start:end]
        return Lines(self.tokens[start:end], self._texts[start:end], positions)

    def rdata(self) -> int:
        """Return the number of lines that are RDATA."""
        return len(self.tokens) - (0 if self._positions is None else int(self._positions.sum()))

    def left_out(self) -> IntArray:
        """Return the tokens of the facts that are POSITIONs."""
        return self.tokens[:0] if self._positions is None else np.unique(self.tokens[self._positions])

    def data(self) -> memoryview:
        """Return all lines as bytes, without a copy."""
        return _data_of(self._texts)


class LineEncoder:
    """Makes the lines of one writer, byte for byte those that ``replication.session.encoder`` makes of facts."""

    def __init__(self, stream: StreamName, instance: InstanceName, line_limit: int) -> None:
        self._of = f"{stream} {instance}"
        self._limit = min(line_limit, MAX_LINE)

    def encode(self, tokens: IntArray, rows: pa.Array) -> Lines:
        """Return the lines of whole facts; StoreError if a row is not JSON text on one line."""
        places = pc.cast(pa.array(tokens), pa.string())
        continues: IntArray = np.append(tokens[:-1] == tokens[1:], [False])
        if continues.any():
            places = pc.if_else(pa.array(continues), "batch", places)
        lines = pc.binary_join_element_wise(f"\nRDATA {self._of}", places, rows, " ")
        self._check(tokens, rows)
        if pc.max(pc.binary_length(lines)).as_py() > self._limit + 1:
            return self._without_long_facts(tokens, continues, lines)
        return Lines(tokens, lines)

    def _without_long_facts(self, tokens: IntArray, continues: IntArray, lines: pa.Array) -> Lines:
        """Replace each fact that has a line over the limit by a POSITION (docs/protocol/wire.md A4)."""
        too_long = pc.binary_length(lines).to_numpy() > self._limit + 1
        replaced = np.isin(tokens, tokens[too_long])
        prev, new = (pc.cast(pa.array(each), lines.type) for each in (np.maximum(tokens, FIRST_GAP), tokens))
        positions = pc.binary_join_element_wise(f"\nPOSITION {self._of}", prev, new, " ")
        at_last_row = pc.if_else(pa.array(continues), "", positions)
        return Lines(tokens, pc.if_else(pa.array(replaced), at_last_row, lines), replaced)

    def _check(self, tokens: IntArray, rows: pa.Array) -> None:
        data: Any = np.frombuffer(_data_of(rows), np.uint8)
        try:
            if data.max(initial=0) >= NOT_ASCII:
                rows.validate(full=True)
            broken = data.min(initial=SPACE) < SPACE and np.count_nonzero(data == LF) > 0
        except ValueError:  # not UTF-8
            broken = True
        if broken:
            stream, _, instance = self._of.partition(" ")
            raise StoreError(
                f"a row of stream {stream!r}, written by {instance!r} between ID {tokens[0]} and {tokens[-1]}, is not "
                "JSON text on one line: correct it in the table"
            )


def _data_of(texts: pa.Array) -> memoryview:
    """Return the strings of an array, joined: the part of its buffer that they take."""
    _, places, joined = texts.buffers()
    start, end = np.frombuffer(places, np.int32)[[texts.offset, texts.offset + len(texts)]].tolist()
    return memoryview(joined or b"")[start:end]


class LastFacts:
    """``--compact``: finds the last fact of each key; all keys are held in memory (Kafka: log compaction).

    A fact stays whole: it is kept if one of its rows is the last of its key.
    """

    def __init__(self, definition: StreamDefinition) -> None:
        self._fields = [(definition.row or ()).index(each) for each in definition.key]
        self._last: dict[str, int] = {}
        self._kept: IntArray | None = None

    def add(self, tokens: IntArray, rows: pa.Array) -> None:
        """First pass: add some rows, in ascending order of their tokens."""
        self._last.update(zip(map(self._key, rows.to_pylist()), tokens.tolist(), strict=True))

    def filter(self, tokens: IntArray, rows: pa.Array) -> tuple[IntArray, pa.Array]:
        """Second pass, once all rows were added: return those that are kept."""
        if self._kept is None:
            self._kept = np.array(sorted({*self._last.values()}), np.int64)
        kept = np.isin(tokens, self._kept)
        return tokens[kept], rows.filter(pa.array(kept))

    def _key(self, text: str) -> str:
        row = grammar.read_json(text)
        if not isinstance(row, list) or len(row) <= max(self._fields):
            return text  # a row without these fields is its own key
        return grammar.encode_again([row[place] for place in self._fields])


@attrs.frozen
class _TaskFolder:
    """The folder ``work`` of one task, in a folder of segments."""

    _folder: Folder
    _work: str

    def create(self, instance: InstanceName, after: Token) -> AbstractContextManager[BinaryIO]:
        """Begin the segment of ``instance`` after an ID."""
        return self._folder.create(staged_name(self._work, instance, after))

    def size(self, instance: InstanceName, after: Token) -> int:
        """Return the bytes of a segment's file."""
        return self._folder.size(staged_name(self._work, instance, after)) or 0


class _WriterExport(ExitStack):
    """The segments of one writer in a range; the stack has the files that are being written.

    The newest fact's lines are held back until a newer fact comes, because the next batch may have more of its rows.
    """

    def __init__(
        self, folder: _TaskFolder, definition: StreamDefinition, part: WriterRange, number: int, options: SegmentOptions
    ) -> None:
        """Begin the first segment; ``number`` is the writer's number in :class:`Columns`."""
        super().__init__()
        self._folder = folder
        self._stream = definition.name
        self._range = part
        self._number = number
        self._options = options
        self._last_facts = LastFacts(definition) if options.compact and definition.key else None
        self._encoder = LineEncoder(definition.name, part.instance, options.line_limit)
        self._held: tuple[Lines, pa.Array] | None = None
        self._finished: list[Segment] = []
        self._left_out, self._left_out_from = 0, Token(0)
        self._open(part.after)

    def find_last_facts(self, columns: Columns) -> None:
        """First pass of a compaction."""
        if self._last_facts is not None:
            self._last_facts.add(*self._own_rows(columns))

    def add(self, columns: Columns) -> None:
        """Write rows of the table, in order; rows of other writers are skipped."""
        tokens, rows = self._own_rows(columns)
        if self._last_facts is not None:
            tokens, rows = self._last_facts.filter(tokens, rows)
        if not len(tokens):
            return
        if self._held is not None:
            before, texts = self._held
            if before.tokens[0] == tokens[0]:
                tokens, rows = np.concatenate([before.tokens, tokens]), pa.concat_arrays([texts, rows])
            else:
                self._write(before)
        lines = self._encoder.encode(tokens, rows)
        start = int(np.searchsorted(tokens, tokens[-1]))
        self._write(lines.part(0, start))
        self._held = lines.part(start, len(tokens)), rows[start:]

    def _own_rows(self, columns: Columns) -> tuple[IntArray, pa.Array]:
        """Return the rows of this writer in its range."""
        tokens, writers, rows = columns
        wanted = None if writers is None else writers == self._number
        if not (self._range.after < tokens[0] and tokens[-1] <= self._range.upto):
            inside = (tokens > self._range.after) & (tokens <= self._range.upto)
            wanted = inside if wanted is None else wanted & inside
        if wanted is None or wanted.all():
            return tokens, rows
        return tokens[wanted], rows.filter(pa.array(wanted))

    def finish(self) -> list[Segment]:
        """Finish the last segment, which ends with the range, and return all of them."""
        if self._held is not None:
            self._write(self._held[0])
        self._close(self._range.upto)
        return self._finished

    def _write(self, lines: Lines) -> None:
        """Write whole facts, and begin a new segment wherever one is full."""
        tokens = lines.tokens
        start = 0
        while start < len(tokens):
            room = self._options.segment_rows - self._writer.rows
            end = len(tokens)
            if end - start > room:
                end = int(np.searchsorted(tokens, tokens[start + max(room, 0)]))
            if end == start and self._writer.last is not None:  # the next fact does not fit
                last = self._writer.last
                self._close(last)
                self._open(last)
                continue
            if end == start:  # a fact with more rows than a segment may have gets a segment of its own
                end = int(np.searchsorted(tokens, tokens[start], side="right"))
            some = lines.part(start, end)
            self._writer.write(some.data(), some.rdata(), Token(int(tokens[start])), Token(int(tokens[end - 1])))
            if len(left_out := some.left_out()):
                self._left_out_from = self._left_out_from or Token(int(left_out[0]))
                self._left_out += len(left_out)
            start = end

    def _open(self, after: Token) -> None:
        self._after, self._left_out, self._left_out_from = after, 0, Token(0)
        sink = self.enter_context(self._folder.create(self._range.instance, after))
        self._writer = SegmentWriter(self.enter_context(compress(sink, self._options.compression)))

    def _close(self, upto: Token) -> None:
        writer, instance = self._writer, self._range.instance
        writer.end()
        self.close()
        size = self._folder.size(instance, self._after)
        compression = self._options.compression
        segment = Segment(self._stream, instance, self._after, upto, *writer.summary(), size, compression)
        segment = replace(segment, left_out=self._left_out, left_out_from=self._left_out_from)
        if self._last_facts is not None:
            segment = replace(segment, compacted=True, compacted_upto=self._range.upto)
        self._finished.append(segment)
