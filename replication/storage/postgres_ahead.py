"""Rows above what the sequence of their stream has given: their IDs come from elsewhere, so nobody announces them.

A start moves the sequence past them, and the next row is above it again.  So who only looks at what is announced sees a
stream that works after each start, and stands still.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from replication.errors import StoreError
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table

_BRIEFLY: Final = "SELECT set_config('lock_timeout', '50ms', true), set_config('statement_timeout', '1s', true)"


def rows_ahead(session: PostgresSession, drawn: Mapping[Table, int]) -> dict[Table, str]:
    """Return what is to be said of tables, each with what was drawn from its sequence at some time, in one statement.

    That sees the rows that there are when it begins, and asks then what was drawn by now: who inserts draws before.
    """
    tables = [*drawn]
    asked = [
        f"SELECT {place}, ({sql}), coalesce(pg_sequence_last_value(to_regclass({_literal(table.sequence)})), 0)"
        for place, table in enumerate(tables)
        for sql in table.beyond(Token(max(1, drawn[table])))  # ID 1 counts as told
    ]
    said: dict[Table, str] = {}
    for place, newest, last in session.run(" UNION ALL ".join(asked), prepare=False) if asked else ():
        if newest is not None and newest > last:
            said[tables[place]] = _sentence(tables[place], newest, last)
    return said


@contextmanager
def briefly(session: PostgresSession) -> Iterator[None]:
    """Run statements that only read, and that fail rather than wait for a table that somebody has locked."""
    session.begin("READ ONLY")
    try:
        session.add(_BRIEFLY, ())
        yield
    finally:
        session.rollback()


def look_ahead(session: PostgresSession, drawn: Mapping[Table, int]) -> dict[Table, str]:
    """Do so without waiting for anybody: tables that cannot be asked now, locked or gone, are left out."""
    try:
        with briefly(session):
            return rows_ahead(session, drawn)
    except StoreError:
        if len(drawn) < 2:  # noqa: PLR2004 - nobody else is asked with it
            return {}
    tables, half = [*drawn.items()], len(drawn) // 2
    return look_ahead(session, dict(tables[:half])) | look_ahead(session, dict(tables[half:]))


def _sentence(table: Table, newest: int, drawn: int) -> str:
    return (
        f"stream {table.definition.name!r}: has rows up to ID {newest}, but sequence {table.sequence} has given "
        f"{drawn}: rows whose IDs come from elsewhere are not seen before the next start, which looks again for "
        "the sequence of the column: let all IDs come from that one, or name another one as sequence in [[streams]]"
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
