"""Where SQLite keeps the facts of one stream: what a table of facts must do, and the generic one, which is ours.

Everything here blocks, and leaves it to the caller to say which file an ``sqlite3.Error`` is about.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import attrs

from replication.errors import SchemaError
from replication.storage.pages import SEPARATOR, Rows, cut_rows, split_rows
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import Receipt, Write

_Table = TypeVar("_Table")


@attrs.frozen
class Direction:
    """Which way a table counts: a stored ID is ``sign`` times its token; the rest is the SQL that goes with it."""

    sign: int
    above: str
    upto: str
    furthest: str
    order: str


UP: Final = Direction(1, ">", "<=", "max", "ASC")
DOWN: Final = Direction(-1, "<", ">=", "min", "DESC")


@attrs.frozen
class Batch(Generic[_Table]):
    """What one commit stores: writes beside their tables, and a receipt; ``now`` is its time in seconds."""

    writes: Sequence[tuple[_Table, Write]]
    receipt: Receipt | None
    now: float


class Table(Protocol):
    """Where the facts of one stream are."""

    definition: StreamDefinition
    direction: Direction

    def declare(self, database: sqlite3.Connection, *, may_create: bool) -> Sequence[str]:
        """Make sure that the table is there and fits, else SchemaError; returns warnings."""
        ...

    def insert(self, database: sqlite3.Connection, writer: InstanceName, facts: Sequence[Fact]) -> None:
        """Store the rows of ``facts``."""
        ...

    def delete(self, database: sqlite3.Connection, writer: InstanceName, above: Token) -> None:
        """Delete what ``writer`` wrote above a token."""
        ...

    def rows(
        self, database: sqlite3.Connection, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Rows:
        """Return a page as ``IStreamStore.facts`` does, as columns."""
        ...

    def newest(
        self, database: sqlite3.Connection, stored: Mapping[InstanceName, Token]
    ) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token, at least where it is above its ``stored`` position."""
        ...

    def last_id(self, database: sqlite3.Connection) -> Token | None:
        """Return the largest token in a table of the application, whoever wrote it; None if the table is ours."""
        ...


class GenericTable:
    """``stream_NAME``: a row of the table is a row of the stream, as the text that travels."""

    COLUMNS: Final = ("stream_id", "ord", "instance_name", "row")

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = DOWN if definition.negative else UP
        self.name = f"stream_{definition.name}"
        way, table, minus = self.direction, f'"{self.name}"', "-" if definition.negative else ""
        self._create = (
            f"CREATE TABLE IF NOT EXISTS {table} (stream_id INTEGER NOT NULL, ord INTEGER NOT NULL, "
            'instance_name TEXT NOT NULL, "row" TEXT NOT NULL, PRIMARY KEY (stream_id, ord)) WITHOUT ROWID'
        )
        self._insert = f'INSERT INTO {table} (stream_id, ord, instance_name, "row") VALUES (?, ?, ?, ?)'
        self._delete = f"DELETE FROM {table} WHERE stream_id {way.above} ? AND instance_name = ?"
        # One step for a whole page, because the driver lets go of the interpreter's lock at every step: row by row, a
        # page beside a busy reactor took 4 to 90 times as long.
        self._page = (
            f'SELECT group_concat({minus}stream_id), group_concat("row", char({ord(SEPARATOR)})) FROM ('
            f'SELECT stream_id, "row" FROM {table} WHERE stream_id {way.above} ? AND stream_id {way.upto} ? '
            f"AND instance_name = ? ORDER BY stream_id {way.order}, ord LIMIT ?)"
        )
        self._fact = f'SELECT "row" FROM {table} WHERE stream_id = ? ORDER BY ord'
        self._newest = (
            f"SELECT instance_name, {minus}{way.furthest}(stream_id) FROM {table} WHERE stream_id {way.above} ? "
            "GROUP BY instance_name"
        )

    def declare(self, database: sqlite3.Connection, *, may_create: bool) -> Sequence[str]:
        """Create the table unless it is there; SchemaError if one of that name is not ours."""
        if may_create:
            database.execute(self._create)
        columns = [name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (self.name,))]
        if not columns:
            raise SchemaError(
                f"there is no table {self.name!r}: nothing of stream {self.definition.name!r} is kept here"
            )
        if columns != [*self.COLUMNS]:
            raise SchemaError(
                f"table {self.name!r} has the columns {', '.join(columns)}, so it is not one of ours: "
                f"rename it, or map stream {self.definition.name!r} onto it"
            )
        return ()

    def insert(self, database: sqlite3.Connection, writer: InstanceName, facts: Sequence[Fact]) -> None:
        """Store the rows of ``facts``."""
        sign = self.direction.sign
        rows = [(sign * token, place, writer, text) for token, texts in facts for place, text in enumerate(texts)]
        database.executemany(self._insert, rows)

    def delete(self, database: sqlite3.Connection, writer: InstanceName, above: Token) -> None:
        """Delete what ``writer`` wrote above a token."""
        database.execute(self._delete, (self.direction.sign * above, writer))

    def rows(
        self, database: sqlite3.Connection, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Rows:
        """Return a page; a shorter one if what ``limit`` allows would not fit into one value of the database."""
        sign = self.direction.sign
        try:
            ((ids, texts),) = database.execute(self._page, (sign * after, sign * upto, writer, limit + 1)).fetchall()
        except sqlite3.DataError:
            if limit == 1:
                raise
            return self.rows(database, writer, after=after, upto=upto, limit=limit // 2)
        if ids is None:
            return Rows([], [], upto, limited=False)
        tokens, texts = split_rows(self.name, ids, texts)
        rows = cut_rows(tokens, texts, upto=upto, limit=limit)
        if rows is not None:
            return rows
        whole = database.execute(self._fact, (sign * tokens[0],)).fetchall()
        return Rows.of_fact(tokens[0], [text for (text,) in whole], upto)

    def newest(
        self, database: sqlite3.Connection, stored: Mapping[InstanceName, Token]
    ) -> Mapping[InstanceName, Token]:
        """Look above the lowest stored position only: whoever wrote here has one, so the history is not scanned."""
        floor = min(stored.values(), default=0)
        return {
            InstanceName(writer): Token(token)
            for writer, token in database.execute(self._newest, (self.direction.sign * floor,)).fetchall()
        }

    def last_id(self, database: sqlite3.Connection) -> None:
        """Return None: whoever writes here is one of us."""
