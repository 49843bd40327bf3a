"""A stream whose rows are gathered from several PostgreSQL tables of the application, or by joins; and who keeps which.

What an expression has in a row is what a column of that type has in a mapped table.  Rows of one ID are a fact; among
them, first the order of the tables, then the place in the table says the order.
"""

# ruff: noqa: S608 - names in SQL are quoted plain ones; expressions come from whoever defines the stream

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from replication.errors import SchemaError, StoreError
from replication.storage.gathering import MASTER, Gathering
from replication.storage.notable import NoTable
from replication.storage.postgres_checks import gives_ids
from replication.storage.postgres_mapped import JSON_TYPES, MappedTable, as_json, has_index, sequence_of, types_of
from replication.storage.postgres_tables import KIND, GenericTable, quoted, relation_name
from replication.storage.tables import DOWN, UP
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.gathering import Part
    from replication.storage.pages import Rows
    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table, Written
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import InstanceName


def table_of(definition: StreamDefinition) -> Table:
    """Return where a PostgreSQL database keeps the facts of a stream."""
    if definition.in_memory:
        return NoTable(definition)
    if definition.sources("postgresql"):
        return GatheredTable(definition)
    return MappedTable(definition) if definition.maps("postgresql") else GenericTable(definition)


class GatheredTable:
    """The tables of one stream; to be declared before it is used."""

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = DOWN if definition.negative else UP
        self.sequence = quoted(definition.sequence or relation_name(definition.name, "_seq"))
        self.gathering = Gathering(
            definition, definition.sources("postgresql"), mark="%s", order="source.tableoid, source.ctid"
        )
        self.sources: Sequence[str] = sorted({quoted(part.source.table) for part in self.gathering.parts})

        self.gives_ids: tuple[str, str] | None = None
        self._indexed: list[Part] = []

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - never
        """Look at each table and try what will be asked: SchemaError if it cannot be, a warning if it would be slow."""
        return [warning for part in self.gathering.parts for warning in self._declare(session, part)]

    def _declare(self, session: PostgresSession, part: Part) -> Sequence[str]:
        name, source = self.definition.name, part.source
        refused = f"stream {name!r} cannot be gathered from table {source.table!r}"
        kinds = session.run(KIND, (quoted(source.table),))
        if not kinds:
            raise SchemaError(f"{refused}: there is no table of that name")
        if kinds[0][0] not in ("r", "p"):
            raise SchemaError(f"{refused}, a view or the like: name the tables behind it")
        try:
            sql = f"SELECT {part.place}, {', '.join(part.values)} FROM {part.table} {source.joins}"
            types = types_of(session, sql, source.id_column)
            part.shape(
                [as_json(f"({value})", *kind) for value, kind in zip(part.values, types, strict=True)],
                [place for place, (code, _) in enumerate(types) if code in JSON_TYPES],
            )
            session.run(part.page, part.parameters(MASTER, Token(0), Token(0), 0))
            session.run(part.newest)
        except StoreError as error:
            raise SchemaError(f"{refused}: {error}") from error
        said = []
        if gives_ids(session, quoted(source.table), source.id_column):
            self.gives_ids = (source.table, source.id_column)
            found = sequence_of(session, quoted(source.table), source.id_column)
            if self.definition.sequence is None:
                said.append(
                    f"stream {name!r}: table {source.table!r} fills {source.id_column!r} from "
                    f"{found or 'a sequence that its DEFAULT does not tell'}, and the stream has another one, so rows "
                    "that others insert are not seen: name that one, as sequence in [[streams]]"
                )
        if has_index(session, source.table, source.id_column, partial=source.where is not None):
            self._indexed.append(part)
            return said
        column = source.id_column
        cure = f"CREATE INDEX {source.table}_{column} ON {quoted(source.table)} ({quoted(column)})"
        return [
            *said,
            f"stream {name!r}: table {source.table!r} has no index on {column!r}, so a page reads all of it: {cure}",
        ]

    def insert(self, session: PostgresSession, written: Sequence[Written]) -> None:
        """Return if the application has written the rows of facts; else StoreError."""
        for writer, facts in written:
            self.gathering.check(partial(session.run, prepare=False), writer, facts)

    def delete(self, session: PostgresSession, writer: InstanceName, above: Token) -> None:  # noqa: ARG002
        """Refuse, by StoreError: these tables are the application's."""
        raise StoreError(f"stream {self.definition.name!r} is gathered from tables, from which nothing is deleted here")

    def rows(self, session: PostgresSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; StoreError names a table whose value has no place in JSON."""
        return self.gathering.rows(partial(session.ask, prepare=False), writer, after=after, upto=upto, limit=limit)

    def newest(self, session: PostgresSession, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token."""
        return self.gathering.newest(partial(session.ask, prepare=False), stored)

    def beyond(self, token: Token) -> Sequence[str]:
        """Return SQL that asks each table with an index for the largest token above one."""
        return [part.beyond(token) for part in self._indexed]
