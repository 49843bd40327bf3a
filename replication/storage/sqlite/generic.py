"""The generic table ``stream_NAME`` in SQLite."""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from sqlite3 import IntegrityError
from typing import TYPE_CHECKING, Final

from replication.errors import StoreError
from replication.storage.contract import TAKEN_CURE
from replication.storage.generic import GenericRows, newest_of
from replication.storage.pages import SEPARATOR
from replication.storage.sqlite.session import SqliteSession
from replication.storage.table import StreamTable
from replication.storage.tables.kept_facts import EXISTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.contract import WrittenFact
    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import InstanceName, Token

COLUMNS: Final = "SELECT name FROM pragma_table_info(?)"

Table = StreamTable[SqliteSession]


class GenericTable(GenericRows[SqliteSession]):
    """``stream_NAME``.

    Its rows have rowids.  In a table WITHOUT ROWID, as 0.1.0 made it, inner nodes of the tree hold whole rows: an
    insert reads each large row that it passes on its way to the end.
    """

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, f"stream_{definition.name}", "?")
        way, table = self.direction, f'"{self.name}"'
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} (stream_id INTEGER NOT NULL, ord INTEGER NOT NULL, "
            'instance_name TEXT NOT NULL, "row" TEXT NOT NULL, PRIMARY KEY (stream_id, ord))'
        )
        self._insert = f'INSERT INTO {table} (stream_id, ord, instance_name, "row") VALUES (?, ?, ?, ?)'
        self._other_writer = f"SELECT instance_name FROM {table} WHERE stream_id = ? AND instance_name <> ? LIMIT 1"
        some = (
            f'FROM (SELECT stream_id, "row" FROM {table} WHERE instance_name = ? AND stream_id {way.above} ? '
            f"AND stream_id {way.upto} ? ORDER BY stream_id {way.order}, ord LIMIT ?)"
        )
        page = f'SELECT group_concat({way.minus}stream_id), group_concat("row", char({ord(SEPARATOR)}))'
        self._page = f"{page}, ({EXISTS['sqlite']}) {some}"
        gone = f"SELECT stream_id FROM gone_facts WHERE stream_name = '{definition.name}' AND instance_name = ?"
        self._page_after_gone = f"{page}, ({gone}) {some}"
        self._measure = f'SELECT {way.furthest}(stream_id), count(*), coalesce(sum(length("row")), 0) {some}'
        self._newest = (
            f"SELECT instance_name, {way.minus}{way.furthest}(stream_id) FROM {table} WHERE stream_id {way.above} ? "
            "GROUP BY instance_name"
        )

    def declare(self, session: SqliteSession, *, may_create: bool) -> Sequence[str]:
        """Create the table unless it exists; SchemaError if another program created one of that name."""
        if may_create:
            session.run(self._create)
        self.check_columns([name for (name,) in session.run(COLUMNS, (self.name,))])
        return ()

    def is_missing(self, session: SqliteSession) -> bool:
        """Whether there is no table of that name."""
        return not session.run(COLUMNS, (self.name,))

    def insert(self, session: SqliteSession, written: Sequence[WrittenFact]) -> None:
        """Store the rows of facts; StoreError names the writer that has used one of the IDs."""
        rows = self.rows_of(written)
        if len(written) > 1:
            rows.sort()  # neighbours in the table have neighbouring IDs: a page of them is read faster
        try:
            session.executemany(self._insert, rows)
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError) and (taken := self._find_taken(session, written)):
                raise StoreError(f"{error}; {taken}; {TAKEN_CURE}") from error.__cause__
            raise

    def _find_taken(self, session: SqliteSession, written: Sequence[WrittenFact]) -> str:
        """Return a sentence about the first fact whose ID has a fact of another writer."""
        for writer, facts in written:
            for token, _ in facts:
                found = session.run(self._other_writer, (self.direction.sign * token, writer))
                if found:
                    return f"fact {token} of {writer} has the ID of a fact of {found[0][0]}"
        return ""

    def newest(self, session: SqliteSession, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token above the lowest stored position.

        Each writer has a stored position, so the rows below the lowest one need not be read.
        """
        floor = min(stored.values(), default=0)
        return newest_of(session.run(self._newest, (self.direction.sign * floor,)))
