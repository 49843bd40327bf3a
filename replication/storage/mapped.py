"""A mapped stream, for every database: its rows are those of one table of the application."""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from replication.errors import RowError, RowRefusedError, StoreError, ValueRefusedError
from replication.storage.contract import MASTER, ISession
from replication.storage.joined import ApplicationTables
from replication.storage.names import quoted
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Session = TypeVar("_Session", bound=ISession)


class NotJsonError(StoreError):
    """A column of an application's table has a value that JSON cannot express."""


QUOTED: Final = 200  # characters of a fact in an error
SEEK: Final = "writers_of_this_table"  # no table or column of the application has this name


class MappedRows(ApplicationTables[_Session]):
    """What mapped tables of all databases share.

    ``mark`` stands for a parameter.  ``order`` are the columns that order the rows of one ID.
    """

    def __init__(self, definition: StreamDefinition, *, mark: str, order: str) -> None:
        table, instance, columns = definition.table or "", definition.instance_column, definition.row or ()
        source = SourceTable(
            table=table, row=columns, where=definition.where, id_column=definition.id_column, instance_column=instance
        )
        super().__init__(definition, [source], mark=mark, order=order)
        (self._query,) = self.queries
        self._columns = columns
        self._table = quoted(table)
        written = [definition.id_column, *([] if instance is None else [instance]), *columns]
        self._insert = (
            f"INSERT INTO {self._table} ({', '.join(map(quoted, written))}) VALUES ({', '.join([mark] * len(written))})"
        )
        query, above = self._query, self.direction.above
        self._delete = f"DELETE FROM {query.table} WHERE {query.id} {above} {mark}{query.own}"

    def delete(self, session: _Session, writer: InstanceName, above: Token) -> None:
        """Delete the facts of ``writer`` above a token; of a table without an instance column, all facts above it."""
        session.run(self._delete, [self.direction.sign * above, *self.own(writer)])

    def seek_newest(self, cast: str = "") -> str:
        """Return SQL for each writer's largest token: an index on instance and ID is asked once for each writer."""
        name = quoted(self.definition.instance_column or "")
        newest = f"{self._query.newest_above(Token(0))} AND source.{name}"
        return (
            f"WITH RECURSIVE {SEEK} (name) AS (SELECT min({name}){cast} FROM {self._table} UNION ALL "
            f"SELECT (SELECT min(source.{name}) FROM {self._table} AS source WHERE source.{name} > {SEEK}.name) "
            f"FROM {SEEK} WHERE {SEEK}.name IS NOT NULL) "
            f"SELECT {SEEK}.name, ({newest} = {SEEK}.name) FROM {SEEK} WHERE {SEEK}.name IS NOT NULL "
            f"UNION ALL SELECT '{MASTER}', ({newest} IS NULL)"
        )

    def parse(self, text: str) -> list[Any]:
        """Return the values of a row, one a column; ValueRefusedError if it has another number."""
        row = grammar.read_json(text)
        if not isinstance(row, list) or len(row) != len(self._columns):
            columns = ", ".join(self._columns)
            raise ValueRefusedError(f"stream {self.definition.name!r}: {text[:200]} is not an array of {columns}")
        return row

    def encode_rows(self, rows: Sequence[tuple[Any, ...]]) -> list[str]:
        """Return rows, each with its ID first, as JSON texts; NotJsonError names a column that JSON cannot express."""
        try:
            return grammar.encode_rows([row[1:] for row in rows])
        except RowError as error:
            token, column = next(
                (row[0], column)
                for row in rows
                for column, value in zip(self._columns, row[1:], strict=True)
                if not _is_json([value])
            )
            raise self.not_json(token, column, error) from error

    def not_json(self, token: int, column: str, error: Exception) -> NotJsonError:
        """Return the error for a value that JSON cannot express."""
        return NotJsonError(
            f"stream {self.definition.name!r}: column {column!r} of table {self.definition.table!r} has, at ID "
            f"{token}, what is no JSON: {error}"
        )

    @contextmanager
    def refused_rows(
        self, is_refusal: Callable[[BaseException | None], bool], texts: Sequence[str] = ()
    ) -> Iterator[None]:
        """Raise RowRefusedError, with the rows of a fact, if the driver raised an error that ``is_refusal``."""
        try:
            yield
        except StoreError as error:
            if is_refusal(error.__cause__) and not isinstance(error, ValueRefusedError):
                rows = f", for the fact {shown[:QUOTED]}" if (shown := ", ".join(texts)) else ""
                raise RowRefusedError(f"{error}{rows}") from error.__cause__
            raise

    @contextmanager
    def reading_again(self) -> Iterator[None]:
        """Raise ValueRefusedError if the column has changed a value just stored here into one that is no JSON."""
        try:
            yield
        except NotJsonError as error:
            raise ValueRefusedError(str(error)) from error

    def own(self, writer: InstanceName) -> Sequence[InstanceName]:
        """Return the parameter for the instance column, if there is one."""
        return [] if self.definition.instance_column is None else [writer]


def _is_json(value: object) -> bool:
    try:
        grammar.encode_row(value)
    except RowError:
        return False
    return True
