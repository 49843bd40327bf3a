"""A joined stream in PostgreSQL; and which kind of table a stream has.

The value of an expression in a row is that of a column of the same type in a mapped table.
"""

# ruff: noqa: S608 - names in SQL are quoted plain names; expressions come from the stream's definition

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import SchemaError, StoreError
from replication.storage.contract import MASTER
from replication.storage.joined import JoinedRows
from replication.storage.names import quoted, relation_name
from replication.storage.postgres.checks import has_default_id
from replication.storage.postgres.generic import KIND, GenericTable, Table
from replication.storage.postgres.mapped import JSON_TYPES, MappedTable, as_json, has_index, sequence_of, types_of
from replication.storage.postgres.session import PostgresSession
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.storage.joined import SourceQuery
    from replication.streams.definitions import StreamDefinition


def table_of(definition: StreamDefinition) -> Table:
    """Return where a PostgreSQL database has the facts of a stream."""
    if definition.in_memory:
        return Table(definition)
    if definition.sources("postgresql"):
        return JoinedTable(definition)
    return MappedTable(definition) if definition.maps("postgresql") else GenericTable(definition)


class JoinedTable(JoinedRows[PostgresSession]):
    """The tables of one stream; ``declare`` comes first.  The place in a table orders the rows of one ID in it."""

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, definition.sources("postgresql"), mark="%s", order="source.tableoid, source.ctid")
        self.sequence = quoted(definition.sequence or relation_name(definition.name, "_seq"))
        self.sources: Sequence[str] = sorted({quoted(query.source.table) for query in self.queries})

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - it never does
        """Try the statements: SchemaError if one does not work, a warning if one would be slow."""
        return [warning for query in self.queries for warning in self._declare(session, query)]

    def _declare(self, session: PostgresSession, query: SourceQuery) -> Sequence[str]:
        name, source = self.definition.name, query.source
        refused = f"stream {name!r} cannot be joined from table {source.table!r}"
        kinds = session.run(KIND, (quoted(source.table),))
        if not kinds:
            raise SchemaError(f"{refused}: there is no table of that name")
        if kinds[0][0] not in ("r", "p"):
            raise SchemaError(f"{refused}, a view or the like: name the tables behind it")
        try:
            sql = f"SELECT {query.id}, {', '.join(query.values)} FROM {query.table} {source.joins}"
            types = types_of(session, sql, source.id_column)
            query.shape(
                [as_json(f"({value})", *kind) for value, kind in zip(query.values, types, strict=True)],
                [place for place, (code, _) in enumerate(types) if code in JSON_TYPES],
            )
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
