"""A range of history from a table into segments: scan, spell, compress, sum up, all on Arrow columns.

A line is never a Python object: 3 million rows a second and core, were it not for reading and compressing them.
Spark is not needed for any of it.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Self

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
    from replication.replay.tables import Columns, ITable, Tokens
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
        chains = [
            stack.enter_context(_Chain(folder, definition, window, number, shape))
            for number, window in enumerate(span.windows)
        ]
        if shape.compact and definition.key:
            for columns in read():
                for chain in chains:
                    chain.look(columns)
        for columns in read():
            for chain in chains:
                chain.take(columns)
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

    The lines of the newest fact are held back until a newer one comes: only then is it known where it ends.
    """

    def __init__(
        self, folder: IFolder, definition: StreamDefinition, window: Window, number: int, shape: Shape
    ) -> None:
        self._folder = folder
        self._stream = definition.name
        self._window = window
        self._number = number
        self._shape = shape
        self._last = LastFacts(definition) if shape.compact and definition.key else None
        self._speller = LineSpeller(definition.name, window.instance, shape.line_limit)
        self._held: tuple[Lines, pa.Array] | None = None
        self._finished: list[Segment] = []
        self._open(window.after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def look(self, columns: Columns) -> None:
        """Learn which facts are the last of their key."""
        if self._last is not None:
            self._last.learn(*self._mine(columns))

    def take(self, columns: Columns) -> None:
        """Take some rows of the table, in order; those of others are passed over."""
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow as pa  # noqa: PLC0415

        tokens, rows = self._mine(columns)
        if self._last is not None:
            tokens, rows = self._last.only(tokens, rows)
        if not len(tokens):
            return
        if self._held is not None:
            before, texts = self._held
            if before.tokens[0] == tokens[0]:
                tokens, rows = np.concatenate([before.tokens, tokens]), pa.concat_arrays([texts, rows])
            else:
                self._write(before)
        lines = self._speller.spell(tokens, rows)
        start = int(np.searchsorted(tokens, tokens[-1]))
        self._write(lines.part(0, start))
        self._held = lines.part(start, len(tokens)), rows[start:]

    def _mine(self, columns: Columns) -> tuple[Tokens, pa.Array]:
        """Return the rows of the window."""
        import pyarrow as pa  # noqa: PLC0415 (see above)

        tokens, writers, rows = columns
        wanted = None if writers is None else writers == self._number
        if not (self._window.after < tokens[0] and tokens[-1] <= self._window.upto):
            inside = (tokens > self._window.after) & (tokens <= self._window.upto)
            wanted = inside if wanted is None else wanted & inside
        if wanted is None or wanted.all():
            return tokens, rows
        return tokens[wanted], rows.filter(pa.array(wanted))

    def finish(self) -> list[Segment]:
        """Return the segments, the last of which ends with the window."""
        if self._held is not None:
            self._write(self._held[0])
        self._close(self._window.upto)
        return self._finished

    def _write(self, lines: Lines) -> None:
        """Write whole facts, into as many segments as it takes."""
        import numpy as np  # noqa: PLC0415 (see above)

        places = lines.tokens
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
            some = lines.part(start, end)
            self._writer.write(some.data(), some.rdata(), Token(int(places[start])), Token(int(places[end - 1])))
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
        self._writer.end()
        self._stack.close()
        self._finished.append(self._writer.finish(upto, self._folder.size(self._staged) or 0))


class LastFacts:
    """Which facts are the last with the values that they have in the fields of a stream's key.

    A fact stays whole: it is kept if one of its rows is the last of its key.  Every key is held in memory.
    """

    def __init__(self, definition: StreamDefinition) -> None:
        self._places = [(definition.row or ()).index(each) for each in definition.key]
        self._last: dict[str, int] = {}
        self._kept: Tokens | None = None

    def learn(self, tokens: Tokens, rows: pa.Array) -> None:
        """Look at some rows, in order."""
        self._last.update(zip(map(self._key, rows.to_pylist()), tokens.tolist(), strict=True))

    def only(self, tokens: Tokens, rows: pa.Array) -> tuple[Tokens, pa.Array]:
        """Return the rows of the facts that are kept, once all have been looked at."""
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow as pa  # noqa: PLC0415

        if self._kept is None:
            self._kept = np.array(sorted({*self._last.values()}), np.int64)
        kept = np.isin(tokens, self._kept)
        return tokens[kept], rows.filter(pa.array(kept))

    def _key(self, text: str) -> str:
        row = grammar.read_json(text)
        if not isinstance(row, list) or len(row) <= max(self._places):
            return text  # a row without the fields is its own key
        return grammar.spell_row([row[place] for place in self._places])


@attrs.frozen
class Lines:
    """The lines of a writer's rows, one for each row; it is empty where a row has none.

    Each *begins* with its line feed: so one text less is joined, and nothing is copied again.
    """

    tokens: Tokens
    _texts: pa.Array
    _positions: Tokens | None = None  # which of them are no RDATA, if any are not

    def part(self, start: int, end: int) -> Lines:
        """Return the lines of some rows."""
        positions = None if self._positions is None else self._positions[start:end]
        return Lines(self.tokens[start:end], self._texts[start:end], positions)

    def rdata(self) -> int:
        """Return how many lines are RDATA."""
        return len(self.tokens) - (0 if self._positions is None else int(self._positions.sum()))

    def data(self) -> memoryview:
        """Return all of them."""
        return _data_of(self._texts)


class LineSpeller:
    """Makes RDATA lines of one writer's columns, byte for byte as ``session.feed`` does of facts."""

    def __init__(self, stream: StreamName, instance: InstanceName, line_limit: int) -> None:
        self._of = f"{stream} {instance}"
        self._limit = line_limit

    def spell(self, tokens: Tokens, rows: pa.Array) -> Lines:
        """Return the lines of whole facts; StoreError if a row is no line."""
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.compute as pc  # noqa: PLC0415

        places = pc.cast(pa.array(tokens), pa.string())
        goes_on: Tokens = np.append(tokens[:-1] == tokens[1:], [False])
        if goes_on.any():
            places = pc.if_else(pa.array(goes_on), "batch", places)
        lines = pc.binary_join_element_wise(f"\nRDATA {self._of}", places, rows, " ")
        self._check(tokens, rows)
        if pc.max(pc.binary_length(lines)).as_py() > self._limit + 1:
            return self._without_long_facts(tokens, goes_on, lines)
        return Lines(tokens, lines)

    def _without_long_facts(self, tokens: Tokens, goes_on: Tokens, lines: pa.Array) -> Lines:
        """Let a fact with a line over the limit be a POSITION."""
        import numpy as np  # noqa: PLC0415 (see above)
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.compute as pc  # noqa: PLC0415

        long = pc.binary_length(lines).to_numpy() > self._limit + 1
        elsewhere = np.isin(tokens, tokens[long])
        texts = pc.cast(pa.array(tokens), lines.type)
        positions = pc.binary_join_element_wise(f"\nPOSITION {self._of}", texts, texts, " ")
        last = pc.if_else(pa.array(goes_on), "", positions)
        return Lines(tokens, pc.if_else(pa.array(elsewhere), last, lines), elsewhere)

    def _check(self, tokens: Tokens, rows: pa.Array) -> None:
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
