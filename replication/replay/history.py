"""A range of history from a table into segments: scan, spell, compress, sum up, all on Arrow columns.

A line is never a Python object: 3 million rows a second and core, were it not for reading and compressing them.
Spark is not needed for any of it.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import attrs

from replication.errors import StoreError
from replication.replay.databases import open_database
from replication.replay.segments import WORK, Segment, SegmentWriter, compressed, folder_of
from replication.replay.tables import open_table
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import pyarrow as pa

    from replication.replay.folders import IFolder
    from replication.replay.tables import ITable
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import InstanceName, StreamName

SEGMENT_ROWS: Final = 1_000_000
PROBE: Final = 20_000  # rows that are counted to guess where a segment's worth of them ends
LF: Final = 10
SPACE: Final = 32
ASCII: Final = 128  # the first byte that is not
FULL: Final = (9, 10)  # how full a segment is to be by that guess, so that few have to be cut


@attrs.frozen
class Window:
    """The facts of one writer with ``after < token <= upto``."""

    instance: InstanceName
    after: Token
    upto: Token


@attrs.frozen
class Span:
    """A range of a stream's table, and what of it is wanted: what one task does."""

    definition: StreamDefinition
    after: Token
    upto: Token
    windows: tuple[Window, ...]
    everybody: bool = True  # whether no other instance has rows in the table


@attrs.frozen
class Shape:
    """How segments are to be; ``compact`` leaves out what a later fact of the same span replaces."""

    segment_rows: int = SEGMENT_ROWS
    compression: str = "zstd"
    line_limit: int = LINE_LIMIT
    compact: bool = False


def plan_spans(
    table: ITable, definition: StreamDefinition, windows: Sequence[Window], segment_rows: int, *, everybody: bool = True
) -> Iterator[Span]:
    """Cut what ``windows`` cover into spans of about ``segment_rows`` rows.

    Up to PROBE rows are counted; for more, the distance that so many rows take is taken as a measure.
    """
    after = min(each.after for each in windows)
    end = max(each.upto for each in windows)
    while after < end:
        upto = min(_span_end(table, after, segment_rows) or end, end)
        parts = [
            Window(each.instance, max(after, each.after), min(upto, each.upto))
            for each in windows
            if each.after < upto and after < each.upto
        ]
        if parts:
            yield Span(definition, after, upto, tuple(parts), everybody)
        after = upto


def _span_end(table: ITable, after: Token, rows: int) -> Token | None:
    probe = min(rows, PROBE)
    reached = table.reach(after, probe)
    if reached is None or probe == rows:
        return reached
    part, whole = FULL
    return Token(after + (reached - after) * rows * part // (probe * whole))


def write_span(database_url: str, folder: IFolder, span: Span, shape: Shape) -> list[Segment]:
    """Write the segments of a span, each under :func:`staged_name`; StoreError, and nothing is there."""
    definition, writers = span.definition, [each.instance for each in span.windows]
    with _no_collections(), closing(open_database(database_url)) as database, ExitStack() as stack:
        table = open_table(database, definition)
        read = partial(table.columns, writers, after=span.after, upto=span.upto, alone=span.everybody)
        chains = [stack.enter_context(_Chain(folder, definition, window, shape)) for window in span.windows]
        if shape.compact and definition.key:
            for columns in read():
                for chain in chains:
                    chain.look(*columns)
        for columns in read():
            for chain in chains:
                chain.take(*columns)
        return [segment for chain in chains for segment in chain.finish()]


@contextmanager
def _no_collections() -> Iterator[None]:
    """Let nobody look for cycles among millions of values that have none: a third of the time of a mapped table."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def staged_name(stream: StreamName, instance: InstanceName, after: Token) -> str:
    """Return where a segment lies until its run has finished."""
    return f"{WORK}/{stream}/{folder_of(instance)}/{after:020}"


class _Chain:
    """What one writer has in a span, segment by segment.

    The rows of the newest fact are held back until a newer one comes: only then is it known where it ends.
    """

    def __init__(self, folder: IFolder, definition: StreamDefinition, window: Window, shape: Shape) -> None:
        self._folder = folder
        self._stream = definition.name
        self._window = window
        self._shape = shape
        self._last = LastFacts(definition) if shape.compact and definition.key else None
        self._lines = LineSpeller(definition.name, window.instance, shape.line_limit)
        self._held: tuple[pa.Array, pa.Array] | None = None
        self._finished: list[Segment] = []
        self._open(window.after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def look(self, tokens: pa.Array, instances: pa.Array | None, rows: pa.Array) -> None:
        """Learn which facts are the last of their key."""
        if self._last is not None:
            self._last.learn(*self._mine(tokens, instances, rows))

    def take(self, tokens: pa.Array, instances: pa.Array | None, rows: pa.Array) -> None:
        """Take some rows of the table, in order; those of others are passed over."""
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow as pa  # noqa: PLC0415

        tokens, rows = self._mine(tokens, instances, rows)
        if self._last is not None:
            tokens, rows = self._last.only(tokens, rows)
        if not len(tokens):
            return
        if self._held is not None:
            before, texts = self._held
            if before[0] == tokens[0]:
                tokens, rows = pa.concat_arrays([before, tokens]), pa.concat_arrays([texts, rows])
            else:
                self._write(before, texts)
        places = tokens.to_numpy()
        start = int(np.searchsorted(places, places[-1]))
        self._held = tokens[start:], rows[start:]
        self._write(tokens[:start], rows[:start])

    def _mine(self, tokens: pa.Array, instances: pa.Array | None, rows: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the rows of the window."""
        import pyarrow.compute as pc  # noqa: PLC0415 (see above)

        wanted = None if instances is None else pc.equal(instances, self._window.instance)
        if not (self._window.after < tokens[0].as_py() and tokens[-1].as_py() <= self._window.upto):
            inside = pc.and_(pc.greater(tokens, self._window.after), pc.less_equal(tokens, self._window.upto))
            wanted = inside if wanted is None else pc.and_(wanted, inside)
        if wanted is None or pc.all(wanted).as_py():
            return tokens, rows
        return tokens.filter(wanted), rows.filter(wanted)

    def finish(self) -> list[Segment]:
        """Return the segments, the last of which ends with the window."""
        if self._held is not None:
            self._write(*self._held)
        self._close(self._window.upto)
        return self._finished

    def _write(self, tokens: pa.Array, rows: pa.Array) -> None:
        """Write whole facts, into as many segments as it takes."""
        import numpy as np  # noqa: PLC0415 (see above)

        places = tokens.to_numpy()
        start = 0
        while start < len(places):
            room = self._shape.segment_rows - self._writer.rows
            end = len(places)
            if end - start > room:
                end = int(np.searchsorted(places, places[start + max(room, 0)]))
            if end == start and self._writer.last is not None:  # not one more fact fits
                last = self._writer.last
                self._close(last)
                self._open(last)
                continue
            if end == start:  # a fact that is larger than a segment has one to itself
                end = int(np.searchsorted(places, places[start], side="right"))
            lines, count = self._lines.spell(tokens[start:end], rows[start:end])
            self._writer.write(lines, count, Token(int(places[start])), Token(int(places[end - 1])))
            start = end

    def _open(self, after: Token) -> None:
        self._staged = staged_name(self._stream, self._window.instance, after)
        self._stack = ExitStack()
        sink = self._stack.enter_context(self._folder.create(self._staged))
        lines = self._stack.enter_context(compressed(sink, self._shape.compression))
        self._writer = SegmentWriter(
            lines,
            self._stream,
            self._window.instance,
            after,
            self._shape.compression,
            compacted=self._last is not None,
        )

    def _close(self, upto: Token) -> None:
        self._stack.close()
        self._finished.append(self._writer.finish(upto, self._folder.size(self._staged) or 0))


class LastFacts:
    """Which facts are the last with the values that they have in the fields of a stream's key.

    A fact stays whole: it is kept if one of its rows is the last of its key.  Every key is held in memory.
    """

    def __init__(self, definition: StreamDefinition) -> None:
        self._places = [(definition.row or ()).index(each) for each in definition.key]
        self._last: dict[str, int] = {}
        self._kept: pa.Array | None = None

    def learn(self, tokens: pa.Array, rows: pa.Array) -> None:
        """Look at some rows, in order."""
        self._last.update(zip(map(self._key, rows.to_pylist()), tokens.to_pylist(), strict=True))

    def only(self, tokens: pa.Array, rows: pa.Array) -> tuple[pa.Array, pa.Array]:
        """Return the rows of the facts that are kept, once all have been looked at."""
        import pyarrow as pa  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow.compute as pc  # noqa: PLC0415

        if self._kept is None:
            self._kept = pa.array(sorted({*self._last.values()}), pa.int64())
        kept = pc.is_in(tokens, self._kept)
        return tokens.filter(kept), rows.filter(kept)

    def _key(self, text: str) -> str:
        row = grammar.read_json(text)
        if not isinstance(row, list) or len(row) <= max(self._places):
            return text  # a row without the fields is its own key
        return grammar.spell_row([row[place] for place in self._places])


class LineSpeller:
    """Makes RDATA lines of one writer's columns, byte for byte as ``session.feed`` does of facts."""

    def __init__(self, stream: StreamName, instance: InstanceName, line_limit: int) -> None:
        self._of = f"{stream} {instance}"
        self._limit = line_limit

    def spell(self, tokens: pa.Array, rows: pa.Array) -> tuple[memoryview, int]:
        """Return the lines of whole facts, and how many of them are RDATA; StoreError if a row is no line.

        Each line *begins* with its line feed: so one text less is joined, and nothing is copied again.
        """
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.compute as pc  # noqa: PLC0415

        places, numbers = pc.cast(tokens, pa.string()), tokens.to_numpy()
        goes_on: Any = np.append(numbers[:-1] == numbers[1:], [False])
        if goes_on.any():
            places = pc.if_else(pa.array(goes_on), "batch", places)
        lines = pc.binary_join_element_wise(f"\nRDATA {self._of}", places, rows, " ")
        count = len(lines)
        self._check(tokens, rows)
        if pc.max(pc.binary_length(lines)).as_py() > self._limit + 1:
            lines, count = self._without_long_facts(tokens, pa.array(~goes_on), lines)
        return _data_of(lines), count

    def _without_long_facts(self, tokens: pa.Array, ends: pa.Array, lines: pa.Array) -> tuple[pa.Array, int]:
        """Let a fact with a line over the limit be a POSITION."""
        import pyarrow.compute as pc  # noqa: PLC0415 (see above)

        long = pc.greater(pc.binary_length(lines), self._limit + 1)
        elsewhere = pc.is_in(tokens, pc.unique(tokens.filter(long)))
        texts = pc.cast(tokens, lines.type)
        positions = pc.binary_join_element_wise(f"\nPOSITION {self._of}", texts, texts, " ")
        kept = pc.or_(pc.invert(elsewhere), ends)
        return pc.if_else(elsewhere, positions, lines).filter(kept), pc.sum(pc.invert(elsewhere)).as_py()

    def _check(self, tokens: pa.Array, rows: pa.Array) -> None:
        """Return if each row is text on one line."""
        import numpy as np  # noqa: PLC0415 (see above)

        data = np.frombuffer(_data_of(rows), np.uint8)
        try:
            if data.max(initial=0) >= ASCII:
                rows.validate(full=True)
            broken = data.min(initial=SPACE) < SPACE and np.count_nonzero(data == LF) > 0
        except ValueError:  # not UTF-8
            broken = True
        if broken:
            stream, _, instance = self._of.partition(" ")
            raise StoreError(
                f"a row of stream {stream!r}, written by {instance!r} between ID {tokens[0]} and {tokens[-1]}, is no "
                "JSON text on one line: mend the table"
            )


def _data_of(texts: pa.Array) -> memoryview:
    """Return what the strings of an array are, one after the other."""
    import numpy as np  # noqa: PLC0415 (only who needs it must have it)

    _, places, joined = texts.buffers()
    start, end = np.frombuffer(places, np.int32)[[texts.offset, texts.offset + len(texts)]].tolist()
    return memoryview(joined or b"")[start:end]
