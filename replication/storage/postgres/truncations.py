"""TRUNCATE in PostgreSQL (docs/operations.md, TRUNCATE).

In a table of this package, the facts are gone, and a mark has to show that.  TRUNCATE gives a table a new file.  So do
VACUUM FULL and CLUSTER, after which the facts are still there.

In a mapped table, RESTART IDENTITY may give rows IDs that were published.  The table ``reused_ids`` has the ID up to
which: the stream stops also after a restart of its master.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from replication.storage.migrations import LOCK
from replication.storage.names import quoted
from replication.storage.tables.kept_facts import get_gone
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.storage.postgres.generic import GenericTable
    from replication.storage.postgres.session import PostgresSession
    from replication.wire.grammar import StreamName

FILES: Final = (
    "SELECT pg_relation_filenode(to_regclass(name)) FROM unnest(%s::text[]) WITH ORDINALITY AS each (name, place) "
    "ORDER BY place"
)
READ_AT_ONCE: Final = 100  # tables whose oldest fact is read in one call
POSITIONS: Final = "SELECT instance_name, abs(stream_id) FROM stream_positions WHERE stream_name = %s"
REUSED_EXISTS: Final = "SELECT to_regclass('reused_ids') IS NOT NULL"
REUSED: Final = "SELECT stream_name, stream_id FROM reused_ids"
CREATE_REUSED: Final = "CREATE TABLE reused_ids (stream_name text NOT NULL PRIMARY KEY, stream_id bigint NOT NULL)"
PUT_REUSED: Final = (
    "INSERT INTO reused_ids AS kept (stream_name, stream_id) VALUES (%s, %s) ON CONFLICT (stream_name) "
    "DO UPDATE SET stream_id = greatest(kept.stream_id, excluded.stream_id)"
)


class _Known(NamedTuple):
    """A fact that the table had, and the table's file at that time."""

    file: int
    token: Token
    writer: InstanceName


class Truncations:
    """Which tables were truncated while this process runs."""

    def __init__(self) -> None:
        self._known: dict[GenericTable, _Known] = {}

    def find(
        self, session: PostgresSession, writer: InstanceName, published: Mapping[GenericTable, Token]
    ) -> dict[GenericTable, dict[InstanceName, Token]]:
        """Return the tables that were truncated, and up to which token the facts of each writer are gone.

        ``published`` has the tables to look at, and the published position of ``writer``, this process, in each.  A
        table is returned until ``forget`` is called.
        """
        found, unread = {}, READ_AT_ONCE
        files = [file for (file,) in session.ask(FILES, ([quoted(table.name) for table in published],))]
        for (table, position), file in zip(published.items(), files, strict=True):
            known = self._known.get(table)
            if file is None or (known is not None and known.file == file):
                continue
            if known is not None and _is_truncated(session, table, known):
                found[table] = _lost(session, table, {**_positions(session, table), writer: position})
            elif position > 1 and unread:
                unread -= 1
                self._known.pop(table, None)
                for stream_id, of in session.ask(_oldest(table, "")):
                    self._known[table] = _Known(file, Token(abs(stream_id)), InstanceName(of))
        return found

    def forget(self, table: GenericTable) -> None:
        """Forget a table that was truncated: its marks are stored."""
        self._known.pop(table, None)


def get_reused(session: PostgresSession) -> dict[StreamName, Token]:
    """Return, for mapped streams that were restarted, the token up to which rows may have IDs again."""
    ((exists,),) = session.ask(REUSED_EXISTS)
    return {stream: Token(token) for stream, token in session.ask(REUSED)} if exists else {}


def put_reused(session: PostgresSession, stream: StreamName, upto: Token) -> None:
    """Store up to which token rows of a mapped stream may have IDs again."""
    session.begin()
    try:
        session.run(LOCK)
        ((exists,),) = session.run(REUSED_EXISTS)
        if not exists:
            session.run(CREATE_REUSED)
        session.run(PUT_REUSED, (stream, upto))
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _oldest(table: GenericTable, where: str) -> str:
    return (
        f"SELECT stream_id, instance_name FROM {quoted(table.name)} {where} "
        f"ORDER BY stream_id {table.direction.order}, ord LIMIT 1"
    )


def _is_truncated(session: PostgresSession, table: GenericTable, known: _Known) -> bool:
    """Whether a fact is missing that no retention has deleted."""
    kept = _oldest(table, "WHERE stream_id = %s")
    if session.ask(kept, (table.direction.sign * known.token,)):
        return False
    return get_gone(session, table.definition.name).get(known.writer, Token(0)) < known.token


def _positions(session: PostgresSession, table: GenericTable) -> dict[InstanceName, Token]:
    rows = session.ask(POSITIONS, (table.definition.stored_name,))
    return {InstanceName(writer): Token(position) for writer, position in rows if writer}


def _lost(
    session: PostgresSession, table: GenericTable, positions: Mapping[InstanceName, Token]
) -> dict[InstanceName, Token]:
    """Return up to where the facts of each writer are gone: to its position, or to before its oldest fact."""
    lost = {}
    for writer, position in positions.items():
        rows = session.ask(_oldest(table, "WHERE instance_name = %s"), (writer,))
        upto = min([position, *[abs(stream_id) - 1 for stream_id, _ in rows]])
        if upto > 1:
            lost[writer] = Token(upto)
    return lost
