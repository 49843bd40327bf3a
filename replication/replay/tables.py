"""Reading the tables of streams in bulk: tokens, instances and rows as Arrow columns, in the order of the wire.

A generic table (``stream_NAME``) is read with ADBC, whose batches never become Python objects.  A mapped table is read
with the driver and spelt with the encoder of the live path, because only those give the very same bytes.

Everything here blocks.  A stored ID is the token times the table's sign: a ``negative`` stream counts -1, -2, …
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from replication.errors import RowError, StoreError
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from replication.replay.databases import IDatabase
    from replication.streams.registry import StreamDefinition

MASTER = InstanceName("master")  # who wrote the rows of a mapped table that name no writer


class Columns(NamedTuple):
    """Some rows in order: int64, string, string; ``instances`` is None where all are of the one that was asked for."""

    tokens: pa.Array
    instances: pa.Array | None
    rows: pa.Array


class ITable(Protocol):
    """Where the facts of one stream are; StoreError names what refuses."""

    def columns(self, after: Token, upto: Token, writers: Sequence[InstanceName]) -> Iterator[Columns]:
        """Yield the rows with ``after < token <= upto``, by token and then by their place in the fact.

        Only those of ``writers``, if any are named.
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
    """Return the table of a stream."""
    return GenericTable(database, definition) if definition.table is None else MappedTable(database, definition)


class GenericTable:
    """``stream_NAME``, as the stores make it: a row of the table is a row of the stream, as the text that travels."""

    def __init__(self, database: IDatabase, definition: StreamDefinition) -> None:
        self._database = database
        self._place = _Place(f'"stream_{definition.name}"', "stream_id", "ord", negative=definition.negative)

    def columns(self, after: Token, upto: Token, writers: Sequence[InstanceName]) -> Iterator[Columns]:
        """Read them with ADBC, the order being the primary key's; a column less is a fifth of the time."""
        place, alone = self._place, len(writers) == 1
        mine = f" AND instance_name IN ({', '.join(map(_quoted, writers))})" if writers else ""
        columns = f'{place.token}, "row"' if alone else f'{place.token}, instance_name, "row"'
        sql = f"SELECT {columns} FROM {place.source} WHERE {place.span(after, upto)}{mine} {place.order}"
        for batch in self._database.batches(sql):
            yield Columns(batch.column(0), None if alone else batch.column(1), batch.column(batch.num_columns - 1))

    def reach(self, after: Token, count: int) -> Token | None:
        """Ask the primary key."""
        return self._place.reach(self._database, after, count)

    def is_empty(self) -> bool:
        """Ask for a row."""
        return self._place.is_empty(self._database)


class MappedTable:
    """A table that the application made, as its StreamDefinition describes it."""

    def __init__(self, database: IDatabase, definition: StreamDefinition) -> None:
        self._database = database
        self._definition = definition
        self._fields = definition.row or ()
        instance = definition.instance_column
        self._instance = None if instance is None else f"coalesce(source.\"{instance}\", '{MASTER}')"
        self._place = _Place(
            f'"{definition.table}" AS source',
            f'source."{definition.id_column}"',
            f"source.{database.physical_order}",
            negative=definition.negative,
            where=definition.where,
        )

    def columns(self, after: Token, upto: Token, writers: Sequence[InstanceName]) -> Iterator[Columns]:
        """Read values with the driver, and spell each row."""
        import pyarrow as pa  # noqa: PLC0415 (only who needs it must have it)

        place = self._place
        mine = f" AND {self._instance} IN ({', '.join(map(_quoted, writers))})" if writers and self._instance else ""
        fields = ", ".join([f'source."{field}"' for field in self._fields])
        sql = (
            f"SELECT {place.token}, {self._instance or 'NULL'}, {fields} FROM {place.source} "
            f"WHERE {place.span(after, upto)}{mine} {place.order}"
        )
        for values in self._database.values(sql):
            tokens = pa.array([row[0] for row in values], pa.int64())
            instances = None if self._instance is None else pa.array([row[1] for row in values], pa.string())
            yield Columns(tokens, instances, pa.array(self._spell(values), pa.string()))

    def reach(self, after: Token, count: int) -> Token | None:
        """Ask the table's index."""
        return self._place.reach(self._database, after, count)

    def is_empty(self) -> bool:
        """Ask for a row."""
        return self._place.is_empty(self._database)

    def _spell(self, values: Sequence[tuple[object, ...]]) -> list[str]:
        spell = grammar.spell_row
        try:
            return [spell(row[2:]) for row in values]
        except RowError:
            for row in values:
                for field, value in zip(self._fields, row[2:], strict=True):
                    try:
                        spell(value)
                    except RowError as error:
                        raise StoreError(
                            f"stream {self._definition.name!r}: column {field!r} of table {self._definition.table!r} "
                            f"has, at ID {row[0]}, what is no JSON: {error}"
                        ) from error
            raise


class _Place:
    """The SQL of a table's order: where a token is, and what lies between two."""

    def __init__(self, source: str, column: str, ordinal: str, *, negative: bool, where: str | None = None) -> None:
        self.source = source
        self.token = f"-{column}" if negative else column
        self._column = column
        self._negative = negative
        self._where = f" AND ({where})" if where else ""
        self.order = f"ORDER BY {column}{' DESC' if negative else ''}, {ordinal}"

    def span(self, after: Token, upto: Token | None) -> str:
        """Return the condition ``after < token <= upto``."""
        above, below, sign = ("<", ">=", -1) if self._negative else (">", "<=", 1)
        end = "" if upto is None else f" AND {self._column} {below} {sign * upto}"
        return f"{self._column} {above} {sign * after}{end}{self._where}"

    def is_empty(self, database: IDatabase) -> bool:
        """Whether nothing is there."""
        return not database.rows(f"SELECT 1 FROM {self.source} WHERE {self.span(Token(0), None)} LIMIT 1")

    def reach(self, database: IDatabase, after: Token, count: int) -> Token | None:
        """Return the last token of the whole facts among the first ``count`` rows, at least one fact's."""
        sql = f"SELECT {self.token} FROM {self.source} WHERE {self.span(after, None)} {self.order} LIMIT 2 OFFSET "
        match database.rows(f"{sql}{count - 1}"):
            case [(last,), (beyond,)] if last == beyond:  # its fact is cut: end before it, unless it is the first
                newest = "min" if self._negative else "max"
                above = f"{self.span(after, Token(last - 1))}"
                ((found,),) = database.rows(f"SELECT {newest}({self._column}) FROM {self.source} WHERE {above}")
                return Token(last if found is None else abs(found))
            case [(last,), _]:
                return Token(last)
        return None


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
