"""A joined stream in PostgreSQL; and which kind of table a stream has.

The value of an expression in a row is that of a column of the same type in a mapped table.
"""

# ruff: noqa: S608 - names in SQL are quoted plain names; expressions come from the stream's definition

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from replication.errors import SchemaError, StoreError
from replication.storage.contract import MASTER
from replication.storage.joined import JoinedRows
from replication.storage.names import quoted, relation_name
from replication.storage.postgres.checks import has_default_id
from replication.storage.postgres.generic import KIND, GenericTable, Table
from replication.storage.postgres.mapped import (
    JSON_TYPES,
    RETYPED,
    MappedTable,
    Types,
    has_index,
    sequence_of,
    typed,
    types_of,
)
from replication.storage.postgres.session import PostgresSession
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.storage.contract import WrittenFact
    from replication.storage.joined import Ask, SourceQuery
    from replication.storage.pages import Rows
    from replication.streams.definitions import StreamDefinition

_T = TypeVar("_T")


def table_of(definition: StreamDefinition) -> Table:
    """Return where a PostgreSQL database has the facts of a stream."""
    if definition.in_memory:
        return Table(definition)
    if definition.sources("postgresql"):
        return JoinedTable(definition)
    return MappedTable(definition) if definition.maps("postgresql") else GenericTable(definition)


class _RetypedError(StoreError):
    """An expression has another type than at the declaration."""


class JoinedTable(JoinedRows[PostgresSession]):
    """The tables of one stream; ``declare`` comes first.  The place in a table orders the rows of one ID in it."""

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, definition.sources("postgresql"), mark="%s", order="source.tableoid, source.ctid")
        self.sequence = quoted(definition.sequence or relation_name(definition.name, "_seq"))
        self.sources: Sequence[str] = sorted({quoted(query.source.table) for query in self.queries})
        self._types: dict[SourceQuery, Types] = {}

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - it never does
        """Try the statements: SchemaError if one does not work, a warning if one would be slow."""
        return [warning for query in self.queries for warning in self._declare(session, query)]

    def insert(self, session: PostgresSession, written: Sequence[WrittenFact]) -> None:
        """Do what ``JoinedRows.insert`` does."""
        self._typed(session, partial(super().insert, session, written))

    def rows(self, session: PostgresSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return what ``JoinedRows.rows`` does."""
        return self._typed(session, partial(super().rows, session, writer, after=after, upto=upto, limit=limit))

    # ---- inside

    def _typed(self, session: PostgresSession, read: Callable[[], _T]) -> _T:
        """Return what ``read`` returns; if expressions have other types meanwhile, read types and rows again."""
        for _ in range(RETYPED):
            try:
                return read()
            except _RetypedError:
                for query in self.queries:
                    self._read_types(session, query)
        return read()

    def _read_types(self, session: PostgresSession, query: SourceQuery) -> None:
        tables = f"{query.table} {query.source.joins}"
        kinds = types_of(session, f"SELECT {query.id}, {', '.join(query.values)} FROM {tables}", query.source.id_column)
        values, self._types[query] = typed([f"({each})" for each in query.values], kinds)
        query.shape(values, [place for place, (code, _) in enumerate(kinds) if code in JSON_TYPES])

    def _ask(self, session: PostgresSession, *, in_transaction: bool) -> Ask:
        read = partial(session.typed, prepare=not in_transaction, again=not in_transaction)

        def ask(sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
            codes, rows = read(sql, parameters)
            types = next((self._types.get(each) for each in self.queries if each.page == sql), None)
            if types is None or not types.are(codes):
                raise _RetypedError(f"stream {self.definition.name!r}: its tables change their types all the time")
            return types.cut(rows)

        return ask

    def _declare(self, session: PostgresSession, query: SourceQuery) -> Sequence[str]:
        name, source = self.definition.name, query.source
        refused = f"stream {name!r} cannot be joined from table {source.table!r}"
        kinds = session.run(KIND, (quoted(source.table),))
        if not kinds:
            raise SchemaError(f"{refused}: there is no table of that name")
        if kinds[0][0] not in ("r", "p"):
            raise SchemaError(f"{refused}, a view or the like: name the tables behind it")
        try:
            self._read_types(session, query)
            session.run(query.page, query.parameters(MASTER, Token(0), Token(0), 0))
            session.run(query.newest)
        except StoreError as error:
            raise SchemaError(f"{refused}: {error}") from error
        warnings = []
        if has_default_id(session, quoted(source.table), source.id_column):
            self.default_id = (source.table, source.id_column)
            found = sequence_of(session, quoted(source.table), source.id_column)
            if self.definition.sequence is None:
                warnings.append(
                    f"stream {name!r}: table {source.table!r} fills {source.id_column!r} from "
                    f"{found or 'a DEFAULT whose sequence is unknown'}, and the stream has another sequence, so rows "
                    "of external writers are not published: name that sequence, as sequence in [[streams]]"
                )
        if has_index(session, source.table, source.id_column, partial=source.where is not None):
            self._indexed.append(query)
        else:
            warnings.append(self.missing_index(query))
        return warnings
