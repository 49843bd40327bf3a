"""Reading the tables of streams in bulk: tokens, instances and rows as Arrow columns, in the order of the wire.

A generic table (``stream_NAME``) is read with ADBC, whose batches never become Python objects.  What an application has
in tables of its own is read page by page with the code of the store: only that makes the very same bytes of values.

Everything here blocks.  A stored ID is the token times the table's sign: a ``negative`` stream counts -1, -2, …
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from replication.errors import StoreError
from replication.storage.gathering import Gathering
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from replication.replay.databases import IDatabase
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import InstanceName

PAGE_ROWS: Final = 10_000  # of a mapped table
ID_BITS: Final = 48  # of a 64-bit integer, for the place in a span; the others are for the number of a writer
MAX_WRITERS: Final = 2**15 - 1  # of whom a query tells apart
Tokens = Any  # a one-dimensional array of numpy's, of int64: numpy is an extra


class Columns(NamedTuple):
    """Some rows in order, at least one: their tokens and texts, and the number of each one's writer among those asked.

    ``writers`` is None where there is but one.
    """

    tokens: Tokens
    writers: Tokens | None
    rows: pa.Array


class ITable(Protocol):
    """Where the facts of one stream are; StoreError names what refuses."""

    def columns(self, writers: Sequence[InstanceName], *, after: Token, upto: Token, alone: bool) -> Iterator[Columns]:
        """Yield the rows of ``writers`` with ``after < token <= upto``, each writer's in the order of the wire.

        If they are ``alone``, nobody else has rows there; else rows of others may be among them.
        """
        ...

    def reach(self, after: Token, count: int) -> Token | None:
        """Return the token up to which at most ``count`` rows follow ``after``, in whole facts; None: that is all.

        A first fact with more rows than that comes whole.
        """
        ...

    def is_empty(self) -> bool:
        """Whether there is no fact at all."""
        ...


def open_table(database: IDatabase, definition: StreamDefinition) -> ITable:
    """Return the table of a stream; StoreError if it has none, SchemaError if it cannot be read."""
    if definition.in_memory:
        raise StoreError(f"stream {definition.name!r} has no history: its facts are in the memory of their writer")
    if definition.sources(database.dialect):
        return GatheredTables(database, definition)
    if definition.maps(database.dialect):
        return MappedTable(database, definition)
    return GenericTable(database, definition)


class _Places:
    """The SQL of where facts are in a table."""

    def __init__(self, database: IDatabase, source: str, column: str, definition: StreamDefinition) -> None:
        self.database = database
        self.source = source
        self.token = f"-{column}" if definition.negative else column
        self.order = f"ORDER BY {column}{' DESC' if definition.negative else ''}"
        self._column = column
        self._definition = definition

    def span(self, after: Token, upto: Token | None) -> str:
        """Return the condition ``after < token <= upto``."""
        above, below, sign = ("<", ">=", -1) if self._definition.negative else (">", "<=", 1)
        end = "" if upto is None else f" AND {self._column} {below} {sign * upto}"
        where = f" AND ({self._definition.where})" if self._definition.where else ""
        return f"{self._column} {above} {sign * after}{end}{where}"

    def is_empty(self) -> bool:
        """Ask for a row."""
        return not self.database.rows(f"SELECT 1 FROM {self.source} WHERE {self.span(Token(0), None)} LIMIT 1")

    def reach(self, after: Token, count: int) -> Token | None:
        """Ask the index."""
        sql = f"SELECT {self.token} FROM {self.source} WHERE {self.span(after, None)} {self.order} LIMIT 2 OFFSET "
        match self.database.rows(f"{sql}{count - 1}"):
            case [(last,), (beyond,)] if last == beyond:  # its fact is cut: end before it, unless it is the first
                newest = "min" if self._definition.negative else "max"
                before = self.span(after, Token(last - 1))
                ((found,),) = self.database.rows(f"SELECT {newest}({self._column}) FROM {self.source} WHERE {before}")
                return Token(last if found is None else abs(found))
            case [(last,), _]:
                return Token(last)
        return None


class GenericTable(_Places):
    """``stream_NAME``, as the stores make it: a row of the table is a row of the stream, as the text that travels."""

    def __init__(self, database: IDatabase, definition: StreamDefinition) -> None:
        super().__init__(database, database.generic_table(definition), "stream_id", definition)

    def columns(self, writers: Sequence[InstanceName], *, after: Token, upto: Token, alone: bool) -> Iterator[Columns]:
        """Read them with ADBC, the order being the primary key's.

        A column costs a tenth of the time, so that the writer's number travels with the ID, in its upper bits.
        """
        one = len(writers) == 1
        if not one and (upto - after >> ID_BITS or len(writers) > MAX_WRITERS):
            for number, each in enumerate(writers):
                yield from self._numbered(number, self.columns([each], after=after, upto=upto, alone=False))
            return
        mine = "" if alone and not one else f" AND instance_name IN ({', '.join(map(_quoted, writers))})"
        place = self.token if one else self._numbering(writers, after)
        sql = f'SELECT {place}, "row" FROM {self.source} WHERE {self.span(after, upto)}{mine} {self.order}, ord'
        for batch in self.database.batches(sql):
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
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)

        return (each._replace(writers=np.full(len(each.tokens), number)) for each in some)


class _Paged:
    """What only the store's own code can read."""

    def __init__(self, database: IDatabase, definition: StreamDefinition) -> None:
        self._page = database.pages(definition)

    def columns(self, writers: Sequence[InstanceName], *, after: Token, upto: Token, alone: bool) -> Iterator[Columns]:  # noqa: ARG002
        """Read page by page, a writer after the other."""
        import numpy as np  # noqa: PLC0415 (only who needs it must have it)
        import pyarrow as pa  # noqa: PLC0415

        for number, writer in enumerate(writers):
            reached = after
            while reached < upto:
                page = self._page(writer, after=reached, upto=upto, limit=PAGE_ROWS)
                reached = page.upto
                if page.tokens:
                    numbers = None if len(writers) == 1 else np.full(len(page.tokens), number)
                    yield Columns(np.array(page.tokens, np.int64), numbers, pa.array(page.texts, pa.string()))


class MappedTable(_Paged, _Places):
    """A table that the application made, as its StreamDefinition describes it."""

    def __init__(self, database: IDatabase, definition: StreamDefinition) -> None:
        _Paged.__init__(self, database, definition)
        source, column = f'"{definition.table}" AS source', f'source."{definition.id_column}"'
        _Places.__init__(self, database, source, column, definition)


class GatheredTables(_Paged):
    """Tables of the application that give their rows to one stream."""

    def __init__(self, database: IDatabase, definition: StreamDefinition) -> None:
        super().__init__(database, definition)
        self._database = database
        # Only tokens are asked for here, which take neither parameters nor the order of rows.
        self._parts = Gathering(definition, definition.sources(database.dialect), mark="", order="").parts

    def reach(self, after: Token, count: int) -> Token | None:
        """Ask each table's index."""
        some = self._tokens(after, count + 1)
        if len(some) <= count:
            return None
        whole = [token for token in some[:count] if token < some[count]]
        return whole[-1] if whole else some[count]

    def is_empty(self) -> bool:
        """Ask each table for a row."""
        return not self._tokens(Token(0), 1)

    def _tokens(self, after: Token, count: int) -> list[Token]:
        asked = [self._database.rows(part.tokens(after, count)) for part in self._parts]
        return sorted(Token(token) for rows in asked for (token,) in rows)[:count]


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
