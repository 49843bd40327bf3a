"""A stream whose rows are gathered from several SQLite tables of the application, or by joins; and who keeps which.

Rows of one ID are a fact; among them, first the order of the tables, then ``rowid`` says the order.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from replication.errors import SchemaError, StoreError
from replication.storage.gathering import MASTER, Gathering
from replication.storage.mapped import MappedTable
from replication.storage.notable import NoTable
from replication.storage.tables import DOWN, UP, GenericTable
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.gathering import Ask
    from replication.storage.pages import Rows
    from replication.storage.tables import Table
    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import InstanceName


def table_of(definition: StreamDefinition) -> Table:
    """Return where an SQLite database keeps the facts of a stream."""
    if definition.in_memory:
        return NoTable(definition)
    if definition.sources("sqlite"):
        return GatheredTable(definition)
    return MappedTable(definition) if definition.maps("sqlite") else GenericTable(definition)


class GatheredTable:
    """The tables of one stream."""

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = DOWN if definition.negative else UP
        self.gathering = Gathering(definition, definition.sources("sqlite"), mark="?", order="source.rowid")

    def declare(self, database: sqlite3.Connection, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - never
        """Try what will be asked of each table: SchemaError if it cannot be, a warning if it would be slow."""
        warnings = []
        for part in self.gathering.parts:
            table, column = part.source.table, part.source.id_column
            try:
                plan = database.execute(
                    f"EXPLAIN QUERY PLAN {part.page}", part.parameters(MASTER, Token(0), Token(0), 0)
                ).fetchall()
                database.execute(f"EXPLAIN {part.newest}").fetchall()
            except sqlite3.Error as error:
                raise SchemaError(
                    f"stream {self.definition.name!r} cannot be gathered from table {table!r}: {error}"
                ) from error
            if any(step.startswith("SCAN source") for *_, step in plan):
                cure = f'CREATE INDEX {table}_{column} ON "{table}" ("{column}")'
                warnings.append(
                    f"stream {self.definition.name!r}: table {table!r} has no index on {column!r}, so a page reads all "
                    f"of it: {cure}"
                )
        return warnings

    def insert(self, database: sqlite3.Connection, writer: InstanceName, facts: Sequence[Fact]) -> None:
        """Return if the application has written the rows of ``facts``; else StoreError."""
        self.gathering.check(_asking(database), writer, facts)

    def delete(self, database: sqlite3.Connection, writer: InstanceName, above: Token) -> None:  # noqa: ARG002
        """Refuse, by StoreError: these tables are the application's."""
        raise StoreError(f"stream {self.definition.name!r} is gathered from tables, from which nothing is deleted here")

    def rows(
        self, database: sqlite3.Connection, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Rows:
        """Return a page; StoreError names a table whose value has no place in JSON."""
        return self.gathering.rows(_asking(database), writer, after=after, upto=upto, limit=limit)

    def newest(
        self, database: sqlite3.Connection, stored: Mapping[InstanceName, Token]
    ) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token."""
        return self.gathering.newest(_asking(database), stored)

    def last_id(self, database: sqlite3.Connection) -> Token:
        """Return the largest token, whoever wrote it and whatever ``where`` says: what an index has at its end."""
        answers = [database.execute(part.last).fetchall() for part in self.gathering.parts]
        return Token(max([0, *[place for ((place,),) in answers if place is not None]]))


def _asking(database: sqlite3.Connection) -> Ask:
    def ask(sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        return database.execute(sql, parameters).fetchall()

    return ask
