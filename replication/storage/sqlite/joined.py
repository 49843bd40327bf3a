"""A joined stream in SQLite; and which kind of table a stream has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import SchemaError, StoreError
from replication.storage.contract import MASTER
from replication.storage.joined import JoinedRows
from replication.storage.sqlite.generic import GenericTable, Table
from replication.storage.sqlite.mapped import MappedTable
from replication.storage.sqlite.session import SqliteSession
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.definitions import StreamDefinition


def table_of(definition: StreamDefinition) -> Table:
    """Return where an SQLite file has the facts of a stream."""
    if definition.in_memory:
        return Table(definition)
    if definition.sources("sqlite"):
        return JoinedTable(definition)
    return MappedTable(definition) if definition.maps("sqlite") else GenericTable(definition)


class JoinedTable(JoinedRows[SqliteSession]):
    """The tables of one stream; ``rowid`` orders the rows of one ID in a table."""

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, definition.sources("sqlite"), mark="?", order="source.rowid")

    def declare(self, session: SqliteSession, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - it never does
        """Try the statements: SchemaError if one does not work, a warning if one would be slow."""
        name, warnings = self.definition.name, []
        for query in self.queries:
            table = query.source.table
            try:
                plan = session.run(f"EXPLAIN QUERY PLAN {query.page}", query.parameters(MASTER, Token(0), Token(0), 0))
                session.run(f"EXPLAIN {query.newest}")
            except StoreError as error:
                raise SchemaError(
                    f"stream {name!r} cannot be joined from table {table!r}: {error.__cause__}"
                ) from error
            if any(step.startswith("SCAN source") for *_, step in plan):
                warnings.append(self.missing_index(query))
        return warnings
