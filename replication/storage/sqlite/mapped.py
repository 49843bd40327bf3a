"""A mapped stream in SQLite.

A value in a row is what SQLite returns: an integer, a real number, a text or NULL.  ``rowid`` orders the rows of one
ID.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

import re
from sqlite3 import IntegrityError
from typing import TYPE_CHECKING, Any, Final

from replication.errors import SchemaError, StoreError, ValueRefusedError
from replication.storage.contract import MASTER, WrittenFact, differs
from replication.storage.joined import ALL_ROWS
from replication.storage.mapped import MappedRows
from replication.storage.names import quoted
from replication.storage.pages import Rows, cut_rows
from replication.storage.sqlite.session import SqliteSession, UndecodedError
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.definitions import StreamDefinition

_GIVEN: Final = "SELECT seq FROM sqlite_sequence WHERE name = ?"
_AUTOINCREMENT: Final = re.compile(r"\bAUTOINCREMENT\b", re.IGNORECASE)
_COMMENT: Final = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_KEY: Final = 'SELECT lower(name), upper(type), "notnull" FROM pragma_table_info(?) WHERE pk'
_ROWID: Final = frozenset(("rowid", "oid", "_rowid_"))
_IS_VIEW: Final = "SELECT 1 FROM sqlite_master WHERE type = 'view' AND name = ? COLLATE NOCASE"


def _is_refusal(error: BaseException | None) -> bool:
    return isinstance(error, IntegrityError)


class MappedTable(MappedRows[SqliteSession]):
    """A table of the application, as its StreamDefinition describes it."""

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, mark="?", order="source.rowid")
        self._least = Token(0)
        self._counter: str | None = None  # the name of the table in sqlite_sequence
        self._reached = 0  # the last ID that a poll found, or that was published before the start
        self._warns = False  # of deleted last rows, once: without AUTOINCREMENT, SQLite allocates their IDs again

    def declare(self, session: SqliteSession, *, may_create: bool) -> Sequence[str]:
        """Try the statements: SchemaError if one does not work, a warning if one would be slow."""
        name, table = self.definition.name, self.definition.table
        if session.run(_IS_VIEW, (table,)):
            raise SchemaError(f"stream {name!r} cannot be mapped onto {table!r}, a view: map the table behind it")
        try:
            nothing = self._query.parameters(MASTER, Token(0), Token(0), 1)
            plan = session.run(f"EXPLAIN QUERY PLAN {self._query.page}", nothing)
            session.run(f"EXPLAIN {self._insert}", (None, *self.own(MASTER), *self._columns))
        except StoreError as error:
            why: object = error.__cause__
            if "source.rowid" in str(why):
                why = "it is WITHOUT ROWID, and that orders the rows of one ID"
            raise SchemaError(f"stream {name!r} cannot be mapped onto table {table!r}: {why}") from error
        ids = [*self._find_null_ids(session), *self._find_moving_ids(session)]
        warnings = [*ids, *(self._use_up_ids(session) if may_create else [])]
        if any(step.startswith("SCAN") for *_, step in plan):
            return [*warnings, self.missing_index(self._query)]
        return [*warnings, *self._seek_writers(session)]

    def _find_null_ids(self, session: SqliteSession) -> list[str]:
        """Return a warning if the table has rows without an ID, or will have them: SQLite fills only a rowid."""
        table, column, where = quoted(self.definition.table or ""), quoted(self.definition.id_column), self._query.where
        warning = f"stream {self.definition.name!r}: table {self.definition.table!r} %s, which no follower receives: %s"
        cure = f"declare {self.definition.id_column} INTEGER PRIMARY KEY AUTOINCREMENT"
        first = session.run(f"SELECT {column} FROM {table} ORDER BY {column} LIMIT 1")  # NULL comes first
        null = f"SELECT 1 FROM {table} AS source WHERE {column} IS NULL{where} LIMIT 1"
        if first == [(None,)] and session.run(null):
            return [warning % ("has rows without an ID", f"give each row an ID, and {cure}")]
        match session.run(_KEY, (self.definition.table,)):
            case [(key, kind, 0)] if kind != "INTEGER" and key == self.definition.id_column.lower():
                what = (
                    f"declares {self.definition.id_column} {kind} PRIMARY KEY, so an INSERT without an ID stores NULL"
                )
                return [warning % (what, f"{cure}, or NOT NULL")]
        return []

    def _find_moving_ids(self, session: SqliteSession) -> list[str]:
        """Return a warning if the ID is a rowid that no column declares: VACUUM numbers such rows anew."""
        table, column = self.definition.table, self.definition.id_column
        declared = session.run("SELECT 1 FROM pragma_table_info(?) WHERE lower(name) = ?", (table, column.lower()))
        if declared or [kind for _, kind, _ in session.run(_KEY, (table,))] == ["INTEGER"]:
            return []
        what = f"stream {self.definition.name!r}: no column of table {table!r} declares the ID {column}"
        cure = "add a column INTEGER PRIMARY KEY AUTOINCREMENT, and give it as id_column"
        return [f"{what}, so VACUUM may change it, and new rows get IDs that were published: {cure}"]

    def _use_up_ids(self, session: SqliteSession) -> list[str]:
        """Let the next ID be above every published one, and at least 2; returns a warning if rows were deleted.

        In this protocol ID 1 counts as used (docs/protocol/ids.md F5).
        """
        made = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name = ? COLLATE NOCASE"
        ids = {self.definition.id_column.lower()}
        for name, sql in session.run(made, (self.definition.table,)):
            keys = {key for key, *_ in session.run(_KEY, (name,))}
            counts = _AUTOINCREMENT.search(_COMMENT.sub("", sql)) is not None
            if counts and (ids <= keys or ids <= _ROWID):  # else it counts another column of the application
                used = 1 if self.definition.negative else self._published(session)
                self._counter, self._least = name, Token(used)
                return self._move_forward(session, used)
            if not self.definition.negative and [kind for _, kind, _ in session.run(_KEY, (name,))] == ["INTEGER"]:
                self._warns, self._reached = True, self._published(session)
        return []

    def is_reset(self, session: SqliteSession, last: Token) -> bool:
        """Whether another program has set the last given ID back; ``last`` is that of the rows."""
        self._reached = max(self._reached, last)
        if self._counter is None or self.definition.negative:
            return False
        return all(given < self._reached for (given,) in session.run(_GIVEN, (self._counter,)))

    def warn_of_deleted(self, last: Token) -> list[str]:
        """Return a warning, once, if the last rows were deleted, and SQLite will allocate their IDs again."""
        if not self._warns or last >= self._reached or self._reached <= 1:
            return []
        self._warns = False
        what = f"stream {self.definition.name!r}: table {self.definition.table!r} ends at ID {last}, and IDs up to "
        what += f"{self._reached} were published: without AUTOINCREMENT, SQLite allocates these to new rows, "
        return [f"{what}which reach no follower: declare {self.definition.id_column} INTEGER PRIMARY KEY AUTOINCREMENT"]

    def move_forward(self, session: SqliteSession) -> list[str]:
        """Let the next ID be above each that was published; return a warning."""
        found = self._move_forward(session, self._reached)
        return [f"{each}; rows inserted between these IDs are not published" for each in found]

    def _move_forward(self, session: SqliteSession, used: int) -> list[str]:
        last = session.run(_GIVEN, (self._counter,))
        if not last:
            session.run("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (self._counter, used))
        elif last[0][0] < used:
            session.run("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (used, self._counter))
        before = last[0][0] if last else 0
        if used <= 1 or before >= used:
            return []
        what = f"the last ID of table {self._counter} was {before}, behind ID {used}, which is stored: moved forward"
        return [f"stream {self.definition.name!r}: {what}"]

    def _published(self, session: SqliteSession) -> int:
        """Return the largest ID that is stored as a position, at least 1."""
        stored = "SELECT max(stream_id) FROM stream_positions WHERE stream_name = ?"
        ((last,),) = session.run(stored, (self.definition.stored_name,))
        return max(1, int(last or 0))

    def last_id(self, session: SqliteSession) -> Token:
        """Return the largest token of all writers; at least 1 where ID 1 is used up."""
        return max(self._least, super().last_id(session))

    def _seek_writers(self, session: SqliteSession) -> Sequence[str]:
        """Read each writer's largest token by an index on instance and ID; return a warning if there is none."""
        name, table, column = self.definition.instance_column, self.definition.table, self.definition.id_column
        if name is None:
            return ()
        seek = f'EXPLAIN QUERY PLAN SELECT max("{column}") FROM "{table}" AS source WHERE source."{name}" = \'\''
        if any(f"({name}=?" in step for *_, step in session.run(seek)):
            self._query.newest = self.seek_newest()
            return ()
        pair = f'"{table}" ("{name}", "{column}")'
        missing = f"stream {self.definition.name!r}: table {table!r} has no index that leads to a writer's newest row"
        return [f"{missing}, so a start reads all of it: CREATE INDEX {table}_{name} ON {pair}"]

    def insert(self, session: SqliteSession, written: Sequence[WrittenFact]) -> None:
        """Store the rows of facts, one value a column, if the application has not; StoreError if they differ.

        They are read again, because a follower that reads them later must receive what another follower receives now.
        A column may turn a number into a text, ``where`` may exclude the row, and the application may have written
        another row.  If it has written nothing, another program has taken the ID.  Even equal rows are another fact
        then.
        """
        for writer, facts in written:
            for token, texts in facts:
                kept = self._whole(session, writer, token)
                was_there = bool(kept)
                if was_there and not session.application_wrote:
                    raise differs(self.definition, token, texts, kept, was_there=True)
                if not kept:
                    place = self.direction.sign * token
                    with self.refused_rows(_is_refusal, texts):
                        session.executemany(
                            self._insert, [(place, *self.own(writer), *self._values(text)) for text in texts]
                        )
                    with self.reading_again():
                        kept = self._whole(session, writer, token)
                if kept != [*texts]:
                    raise differs(self.definition, token, texts, kept, was_there=was_there)

    def rows(self, session: SqliteSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; StoreError names a column with a value that JSON cannot express."""
        found = self._page(session, self._query.parameters(writer, after, upto, limit + 1))
        tokens = self.tokens(self._query, [row[0] for row in found])
        rows = cut_rows(tokens, self.encode_rows(found), upto=upto, limit=limit)
        return rows or Rows.of_fact(tokens[0], self._whole(session, writer, tokens[0]), upto)

    def _whole(self, session: SqliteSession, writer: InstanceName, token: Token) -> list[str]:
        span = self._query.parameters(writer, Token(token - 1), token, ALL_ROWS)
        return self.encode_rows(self._page(session, span))

    def _page(self, session: SqliteSession, span: Sequence[object]) -> list[tuple[Any, ...]]:
        try:
            return session.run(self._query.page, span)
        except UndecodedError as error:
            wrong = session.find_undecoded(self._query.page, span)
            if wrong is None or not wrong[1]:  # column 0 is the ID
                raise
            token, column, text = wrong
            raise self.not_json(token, self._columns[column - 1], ValueError(f"{text[:80]!r} is not UTF-8")) from error

    def _values(self, text: str) -> list[Any]:
        row = self.parse(text)
        for column, value in zip(self._columns, row, strict=True):
            if isinstance(value, (list, dict)):
                raise ValueRefusedError(
                    f"stream {self.definition.name!r}: column {column!r} holds no arrays and objects: {text[:200]}"
                )
        return row
