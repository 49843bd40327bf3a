"""A stream that lives in a table of the application: its columns are the fields of a row.

A value is what SQLite says: an integer, a real, a text or NULL.  A row is spelt when it is read, as one is when it is
written.  Rows of one ID are a fact; among them, ``rowid`` says the order.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

import sqlite3
from math import inf
from typing import TYPE_CHECKING, Any, Final, cast

from replication.errors import RowError, SchemaError, StoreError, ValueRefusedError
from replication.storage.pages import Rows, cut_rows
from replication.storage.tables import DOWN, UP
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition

MASTER: Final = InstanceName("master")  # who wrote the rows that name no writer
SEEK: Final = "writers_of_this_table"  # a name that no table or column of the application has


_IS_VIEW: Final = "SELECT 1 FROM sqlite_master WHERE type = 'view' AND name = ? COLLATE NOCASE"


class MappedTable:
    """A table that the application made, as its StreamDefinition describes it."""

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = DOWN if definition.negative else UP
        self._columns = definition.row or ()
        way, minus = self.direction, "-" if definition.negative else ""
        # Qualified, because SQLite takes a quoted name that it does not know for a text.
        place = f'source."{definition.id_column}"'
        row = ", ".join(f'source."{column}"' for column in self._columns)
        where = f" AND ({definition.where})" if definition.where else ""
        mine, instance, group = "", "NULL", ""  # no group: then an index has the answer at its end
        written = [definition.id_column, *self._columns]
        if definition.instance_column is not None:
            instance = f"coalesce(source.\"{definition.instance_column}\", '{MASTER}')"
            mine, group = f" AND {instance} = :writer", " GROUP BY 1"
            written.insert(1, definition.instance_column)
        source = f'"{definition.table}" AS source'
        span = f"{place} {way.above} :after AND {place} {way.upto} :upto{mine}{where}"
        order = f"{place} {way.order}, source.rowid"
        self._page = f"SELECT {minus}{place}, {row} FROM {source} WHERE {span} ORDER BY {order} LIMIT :limit"
        self._newest = f"SELECT {instance}, {minus}{way.furthest}({place}) FROM {source} WHERE true{where}{group}"
        self._seek_newest = ""
        if definition.instance_column is not None:  # from each writer's name to the next one, and to its newest row
            name, table = f'"{definition.instance_column}"', f'"{definition.table}"'
            newest = f"SELECT {minus}{way.furthest}({place}) FROM {source} WHERE true{where} AND source.{name}"
            self._seek_newest = (
                f"WITH RECURSIVE {SEEK} (name) AS (SELECT min({name}) FROM {table} UNION ALL "
                f"SELECT (SELECT min(source.{name}) FROM {source} WHERE source.{name} > {SEEK}.name) FROM {SEEK} "
                f"WHERE {SEEK}.name IS NOT NULL) "
                f"SELECT {SEEK}.name, ({newest} = {SEEK}.name) FROM {SEEK} WHERE {SEEK}.name IS NOT NULL "
                f"UNION ALL SELECT '{MASTER}', ({newest} IS NULL)"
            )
        self._last = f"SELECT {minus}{way.furthest}({place}) FROM {source}"
        self._delete = f"DELETE FROM {source} WHERE {place} {way.above} :after{mine}{where}"
        names = ", ".join(f'"{column}"' for column in written)
        values = ", ".join("?" * len(written))
        self._insert = f'INSERT INTO "{definition.table}" ({names}) VALUES ({values})'

    def declare(self, database: sqlite3.Connection, *, may_create: bool) -> Sequence[str]:
        """Try what will be asked of the table: SchemaError if it cannot be, a warning if it would be slow."""
        name, table = self.definition.name, self.definition.table
        span = {"writer": "", "after": 0, "upto": 0, "limit": 1}
        if database.execute(_IS_VIEW, (table,)).fetchall():
            raise SchemaError(f"stream {name!r} cannot be mapped onto {table!r}, a view: map the table behind it")
        try:
            plan = database.execute(f"EXPLAIN QUERY PLAN {self._page}", span).fetchall()
            database.execute(f"EXPLAIN {self._insert}", (None,) * self._insert.count("?")).fetchall()
        except sqlite3.Error as error:
            why = "it is WITHOUT ROWID, and that orders the rows of one ID" if "source.rowid" in str(error) else error
            raise SchemaError(f"stream {name!r} cannot be mapped onto table {table!r}: {why}") from error
        if may_create:
            self._use_up_first_id(database)
        if any(step.startswith("SCAN") for *_, step in plan):
            column = self.definition.id_column
            cure = f'CREATE INDEX {table}_{column} ON "{table}" ("{column}")'
            return [f"stream {name!r}: table {table!r} has no index on {column!r}, so a page reads all of it: {cure}"]
        return self._seek_writers(database)

    def _use_up_first_id(self, database: sqlite3.Connection) -> None:
        """Let an empty table give others 2 first: in this protocol 1 counts as told (protocol F5)."""
        made = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE"
        for name, sql in database.execute(made, (self.definition.table,)).fetchall():
            if " AUTOINCREMENT" in sql.upper():
                known = "SELECT 1 FROM sqlite_sequence WHERE name = :name"
                use_up = f"INSERT INTO sqlite_sequence (name, seq) SELECT :name, 1 WHERE NOT EXISTS ({known})"
                database.execute(use_up, {"name": name})

    def _seek_writers(self, database: sqlite3.Connection) -> Sequence[str]:
        """Let an index lead to each writer's newest row; a warning if there is none."""
        name, table, column = self.definition.instance_column, self.definition.table, self.definition.id_column
        if name is None:
            return ()
        seek = f'EXPLAIN QUERY PLAN SELECT max("{column}") FROM "{table}" AS source WHERE source."{name}" = \'\''
        if any(f"({name}=?" in step for *_, step in database.execute(seek).fetchall()):
            self._newest = self._seek_newest
            return ()
        pair = f'"{table}" ("{name}", "{column}")'
        cure = f"CREATE INDEX {table}_{name} ON {pair}"
        said = f"stream {self.definition.name!r}: table {table!r} has no index that leads to a writer's newest row"
        return [f"{said}, so a start reads all of it: {cure}"]

    def insert(self, database: sqlite3.Connection, writer: InstanceName, facts: Sequence[Fact]) -> None:
        """Store the rows of ``facts``, one value a column, unless the application has: StoreError if they do not match.

        Each is read again, because a follower that reads it later must get what another one hears now: a column may
        turn a number into a text, ``where`` may not pick the row, and the application may have written another one.
        """
        start = [] if self.definition.instance_column is None else [writer]
        for token, texts in facts:
            place = self.direction.sign * token
            kept = self._whole(database, writer, token)
            was_there = bool(kept)
            if not kept:
                rows = [(place, *start, *self._values(text)) for text in texts]
                database.executemany(self._insert, rows)
                kept = self._whole(database, writer, token)
            if kept != [*texts]:
                raise differs(self.definition, token, texts, kept, was_there=was_there)

    def delete(self, database: sqlite3.Connection, writer: InstanceName, above: Token) -> None:
        """Delete what ``writer`` wrote above a token; of a table without instances, what anybody did."""
        database.execute(self._delete, {"after": self.direction.sign * above, "writer": writer})

    def rows(
        self, database: sqlite3.Connection, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Rows:
        """Return a page; StoreError names a column whose value has no place in JSON."""
        sign = self.direction.sign
        span = {"writer": writer, "after": sign * after, "upto": sign * upto, "limit": limit + 1}
        found = database.execute(self._page, span).fetchall()
        tokens = self._tokens([row[0] for row in found])
        rows = cut_rows(tokens, self._spell(found), upto=upto, limit=limit)
        if rows is not None:
            return rows
        return Rows.of_fact(tokens[0], self._whole(database, writer, tokens[0]), upto)

    def newest(
        self, database: sqlite3.Connection, stored: Mapping[InstanceName, Token]
    ) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token; without instances it is everybody's.

        Everybody is whoever has stored a position, else the stream's ``writers``, else ``master``.
        """
        found: dict[InstanceName | None, Token] = {}
        for writer, place in database.execute(self._newest).fetchall():
            if place is not None:
                (token,) = self._tokens([place])
                found[writer] = max(token, found.get(writer, token))
        if self.definition.instance_column is None and found:
            found = dict.fromkeys(stored or self.definition.writers or [MASTER], found[None])
        return {InstanceName(writer): token for writer, token in found.items() if writer is not None and token > 0}

    def last_id(self, database: sqlite3.Connection) -> Token:
        """Return the largest token, whatever ``where`` says."""
        ((place,),) = database.execute(self._last).fetchall()
        return Token(0) if place is None else max(Token(0), *self._tokens([place]))

    def _whole(self, database: sqlite3.Connection, writer: InstanceName, token: Token) -> list[str]:
        sign = self.direction.sign
        span = {"writer": writer, "after": sign * (token - 1), "upto": sign * token, "limit": -1}
        return self._spell(database.execute(self._page, span).fetchall())

    def _tokens(self, places: Sequence[object]) -> list[Token]:
        if {*map(type, places)} - {int}:
            place = next(place for place in places if type(place) is not int)
            raise StoreError(
                f"stream {self.definition.name!r}: column {self.definition.id_column!r} of table "
                f"{self.definition.table!r} holds {place!r}, not an integer"
            )
        return cast("list[Token]", places)

    def _spell(self, rows: Sequence[tuple[Any, ...]]) -> list[str]:
        try:
            return grammar.spell_rows([row[1:] for row in rows])
        except RowError as error:
            token, column = next(
                (row[0], column)
                for row in rows
                for column, value in zip(self._columns, row[1:], strict=True)
                if isinstance(value, bytes) or value in (inf, -inf)
            )
            raise StoreError(
                f"stream {self.definition.name!r}: column {column!r} of table {self.definition.table!r} has, at ID "
                f"{token}, what is no JSON: {error}"
            ) from error

    def _values(self, text: str) -> list[Any]:
        row = grammar.read_json(text)
        if not isinstance(row, list) or len(row) != len(self._columns):
            columns = ", ".join(self._columns)
            raise ValueRefusedError(f"stream {self.definition.name!r}: {text[:200]} is not an array of {columns}")
        for column, value in zip(self._columns, row, strict=True):
            if isinstance(value, (list, dict)):
                raise ValueRefusedError(
                    f"stream {self.definition.name!r}: column {column!r} holds no arrays and objects: {text[:200]}"
                )
        return row


def refuse_another(definition: StreamDefinition, me: InstanceName, stored: Collection[str], *more: str) -> None:
    """Raise StoreError if rows that do not say whose they are have been told under another name than ``me``.

    All of them would be told once more.  ``more`` are further tables of positions in the database.
    """
    name, table = definition.name, definition.table
    others = sorted(set(stored) - {me, ""})
    if not others:
        return
    who = ", ".join(map(repr, others))
    where = f"WHERE stream_name = '{name}' AND instance_name = '{others[0]}'"
    change = f"SET instance_name = '{me}' {where}"
    changes = "; ".join(f"UPDATE {each} {change}" for each in ("stream_positions", *more))
    cure = f"DELETE FROM stream_positions {where}" if me in stored else f"{changes}; and likewise where it is followed"
    raise StoreError(
        f"stream {name!r}: rows of table {table!r} do not say who wrote them, so they have one writer, and that is "
        f"{who}, not {me!r}: start it under that name; if several write, give instance_column; if {others[0]!r} has "
        f"become {me!r}, {cure}"
    )


def differs(
    definition: StreamDefinition, token: Token, texts: Sequence[str], kept: Sequence[str], *, was_there: bool
) -> StoreError:
    """Return what is wrong with a fact whose rows are others in its table: if that ``was_there``, another ID may do."""
    said = f"fact {token} is {_shown(texts)}, but table {definition.table!r} has {_shown(kept)} for it"
    if was_there:
        return StoreError(f"stream {definition.name!r}: {said}, which somebody else wrote")
    return ValueRefusedError(f"stream {definition.name!r}: {said}: append what its columns make of the values")


def _shown(texts: Sequence[str]) -> str:
    return " ".join(texts)[:200] or "no row"
