"""Read the tables of streams in bulk: tokens, writers and rows as Arrow columns, in the order of the wire.

A generic table (``stream_NAME``) is read with ADBC; its values never become Python objects.  Mapped and joined streams
are read page by page with the store's code, so that a value has the same bytes here as on the wire.

All calls block.  A stored ID is the token times the table's sign: a ``negative`` stream counts -1, -2, …
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from replication.errors import StoreError
from replication.storage.joined import JoinedRows
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from replication.segments.databases import Database
    from replication.segments.run import StreamRange
    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import InstanceName

SAMPLES: Final = 16  # of a range of a generic table, at even distances
SAMPLE_ROWS: Final = 64
PAGE_ROWS: Final = 10_000  # of a mapped or joined stream, at most
FIRST_ROWS: Final = 1_000  # of the first page, which shows how long rows are
PAGE_BYTES: Final = 64 * 2**20  # about; rows may become longer
ID_BITS: Final = 48  # the bits of a 64-bit integer that hold the offset in a range; the others hold the writer's number
MAX_WRITERS: Final = 2**15 - 1  # that one query can number
IntArray = Any  # a one-dimensional numpy array of int64; numpy is an extra


class Columns(NamedTuple):
    """At least one row, in order: tokens, writers and JSON texts.

    ``writers`` has each row's index in the list of requested writers, or is None if one writer was requested.
    """

    tokens: IntArray
    writers: IntArray | None
    rows: pa.Array


def open_table(database: Database, definition: StreamDefinition) -> Table:
    """Return the table of a stream; StoreError if there is none, SchemaError if it does not fit the definition."""
    if definition.in_memory:
        raise StoreError(f"stream {definition.name!r} has no history: its writer keeps its facts in memory")
    if definition.sources(database.dialect):
        return JoinedTables(database, definition)
    if definition.maps(database.dialect):
        return MappedTable(database, definition)
    return GenericTable(database, definition)


class _TokenQueries:
    """Queries for the tokens of a table."""

    def __init__(self, database: Database, source: str, column: str, definition: StreamDefinition) -> None:
        self.database = database
        self.source = source
        self.token = f"-{column}" if definition.negative else column
        self.order = f"ORDER BY {column}{' DESC' if definition.negative else ''}"
        self._column = column
        self._definition = definition

    def between(self, after: Token, upto: Token | None) -> str:
        """Return the condition ``after < token <= upto``."""
        above, below, sign = ("<", ">=", -1) if self._definition.negative else (">", "<=", 1)
        end = "" if upto is None else f" AND {self._column} {below} {sign * upto}"
        where = f" AND ({self._definition.where})" if self._definition.where else ""
        return f"{self._column} {above} {sign * after}{end}{where}"

    def is_empty(self) -> bool:
        """Return whether there is no fact."""
        return not self.database.rows(f"SELECT 1 FROM {self.source} WHERE {self.between(Token(0), None)} LIMIT 1")

    def reach(self, after: Token, count: int) -> Token | None:
        """Return the token up to which at most ``count`` rows follow ``after``, None if no more rows follow.

        Facts are whole: if the first fact has more rows than ``count``, its token is returned.
        """
        sql = f"SELECT {self.token} FROM {self.source} WHERE {self.between(after, None)} {self.order} LIMIT 2 OFFSET "
        match self.database.rows(f"{sql}{count - 1}"):
            case [(last,), (beyond,)] if last == beyond:  # the limit cuts a fact: end before it, unless it is the first
                newest = "min" if self._definition.negative else "max"
                before = self.between(after, Token(last - 1))
                ((found,),) = self.database.rows(f"SELECT {newest}({self._column}) FROM {self.source} WHERE {before}")
                return Token(last if found is None else abs(found))
            case [(last,), _]:
                return Token(last)
        return None


class GenericTable(_TokenQueries):
    """``stream_NAME``: each row of the table holds one row of the stream, as the JSON text of the wire."""

    def __init__(self, database: Database, definition: StreamDefinition) -> None:
        super().__init__(database, database.generic_table(definition), "stream_id", definition)

    def columns(self, part: StreamRange) -> Iterator[Columns]:
        """Yield the rows of all writers of ``part`` in its range; each writer's are in the order of the wire.

        If ``part`` is exclusive, the query needs no condition.
        The writer's number is returned in the upper bits of the ID: a column of its own would cost a tenth of the time.
        """
        writers, after = [each.instance for each in part.writers], part.after
        one = len(writers) == 1
        if not one and (part.upto - after >> ID_BITS or len(writers) > MAX_WRITERS):
            for number, each in enumerate(part.writers):
                yield from self._numbered(number, self.columns(replace(part, writers=(each,))))
            return
        where = self.between(after, part.upto)
        if one or not part.exclusive:
            where += f" AND instance_name IN ({', '.join(map(_quoted, writers))})"
        place = self.token if one else self._numbering(writers, after)
        sql = f'SELECT {place}, "row" FROM {self.source} WHERE {where} {self.order}, ord'
        for batch in self.database.batches(sql, self._longest(after, part.upto)):
            places, rows = batch.column(0).to_numpy(), batch.column(1)
            if one:
                yield Columns(places, None, rows)
            else:
                yield Columns((places & 2**ID_BITS - 1) + after, places >> ID_BITS, rows)

    def _numbering(self, writers: Sequence[InstanceName], after: Token) -> str:
        places = [f"{self.token} + {(number << ID_BITS) - after}" for number in range(len(writers) + 1)]
        cases = " ".join(f"WHEN {_quoted(each)} THEN {place}" for each, place in zip(writers, places, strict=False))
        return f"CASE instance_name {cases} ELSE {places[-1]} END"

    def _numbered(self, number: int, some: Iterator[Columns]) -> Iterator[Columns]:
        import numpy as np  # noqa: PLC0415 (an extra)

        return (each._replace(writers=np.full(len(each.tokens), number)) for each in some)

    def _longest(self, after: Token, upto: Token) -> str:
        """Return the query for the bytes of the longest row of a sample: measuring all takes too long."""
        places = [Token(after + (upto - after) * place // SAMPLES) for place in range(SAMPLES)]
        samples = " UNION ALL ".join(
            f'SELECT * FROM (SELECT length(CAST("row" AS BLOB)) AS size FROM {self.source} '
            f"WHERE {self.between(place, upto)} {self.order} LIMIT {SAMPLE_ROWS})"
            for place in places
        )
        return f"SELECT max(size) FROM ({samples})"


class _PagedTable:
    """A stream that is read in pages, with the store's code."""

    def __init__(self, database: Database, definition: StreamDefinition) -> None:
        self._page = database.pages(definition)

    def columns(self, part: StreamRange) -> Iterator[Columns]:
        """Yield rows as GenericTable does, one writer after the other."""
        import numpy as np  # noqa: PLC0415 (an extra)
        import pyarrow as pa  # noqa: PLC0415

        for number, writer in enumerate(part.writers):
            reached, limit = part.after, min(FIRST_ROWS, PAGE_ROWS)
            while reached < part.upto:
                page = self._page(writer.instance, after=reached, upto=part.upto, limit=limit)
                reached = page.upto
                if page.tokens:
                    fitting = PAGE_BYTES * len(page.texts) // max(sum(map(len, page.texts)), 1)
                    limit = max(min(PAGE_ROWS, fitting), 1)
                    numbers = None if len(part.writers) == 1 else np.full(len(page.tokens), number)
                    yield Columns(np.array(page.tokens, np.int64), numbers, pa.array(page.texts, pa.string()))


class MappedTable(_PagedTable, _TokenQueries):
    """The table of a mapped stream."""

    def __init__(self, database: Database, definition: StreamDefinition) -> None:
        _PagedTable.__init__(self, database, definition)
        source, column = f'"{definition.table}" AS source', f'source."{definition.id_column}"'
        _TokenQueries.__init__(self, database, source, column, definition)


class JoinedTables(_PagedTable):
    """The tables of a joined stream."""

    def __init__(self, database: Database, definition: StreamDefinition) -> None:
        super().__init__(database, definition)
        self._database = database
        # Only tokens are queried here; they need neither parameters nor the order of rows.
        self._parts = JoinedRows(definition, definition.sources(database.dialect), mark="", order="").queries

    def reach(self, after: Token, count: int) -> Token | None:
        """Return a token as GenericTable does."""
        some = self._tokens(after, count + 1)
        if len(some) <= count:
            return None
        whole = [token for token in some[:count] if token < some[count]]
        return whole[-1] if whole else some[count]

    def is_empty(self) -> bool:
        """Return whether there is no fact."""
        return not self._tokens(Token(0), 1)

    def _tokens(self, after: Token, count: int) -> list[Token]:
        found = [self._database.rows(part.tokens(after, count)) for part in self._parts]
        return sorted(Token(token) for rows in found for (token,) in rows)[:count]


Table: TypeAlias = GenericTable | MappedTable | JoinedTables


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
