"""The table ``stream_audits``, in SQLite and PostgreSQL: up to where facts were compared with their database.

A row with an empty writer means that the audit of the stream has begun: a writer without a row is compared from its
first fact on.  The ID of that row is the one up to which former writers were searched.  Everything here blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.storage.migrations import LOCK
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.interfaces import ISqlExecutor
    from replication.wire.grammar import StreamName

CREATE: Final = """
    CREATE TABLE IF NOT EXISTS stream_audits (
        stream_name TEXT NOT NULL, follower_name TEXT NOT NULL, instance_name TEXT NOT NULL, stream_id BIGINT NOT NULL,
        PRIMARY KEY (stream_name, follower_name, instance_name)
    )
"""
EXISTS: Final[Mapping[str, str]] = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'stream_audits'",
    "postgresql": "SELECT 1 WHERE to_regclass('stream_audits') IS NOT NULL",
}
_FOLLOWER: Final = "stream_name = ? AND follower_name = ?"
GET: Final = f"SELECT instance_name, stream_id FROM stream_audits WHERE {_FOLLOWER}"  # noqa: S608
PUT: Final = (
    "INSERT INTO stream_audits (stream_name, follower_name, instance_name, stream_id) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (stream_name, follower_name, instance_name) DO UPDATE SET stream_id = excluded.stream_id"
)
LOWER: Final = (
    f"UPDATE stream_audits SET stream_id = ? WHERE {_FOLLOWER} "  # noqa: S608
    "AND instance_name IN (?, '') AND stream_id > ?"
)
# On SQLite one process uses a file, under any name: its audit goes on under a new one.  A copy has no name.
_OF_FORMER: Final = "stream_name = ? AND follower_name NOT IN ('', ?)"
TAKE_FORMER: Final = (
    "INSERT INTO stream_audits (stream_name, follower_name, instance_name, stream_id) "  # noqa: S608 - constant names
    f"SELECT stream_name, ?, instance_name, max(stream_id) FROM stream_audits WHERE {_OF_FORMER} "
    "GROUP BY stream_name, instance_name "
    "ON CONFLICT (stream_name, follower_name, instance_name) "
    "DO UPDATE SET stream_id = max(stream_id, excluded.stream_id)"
)
FORMER: Final = f"SELECT 1 FROM stream_audits WHERE {_OF_FORMER} LIMIT 1"  # noqa: S608
DELETE_FORMER: Final = f"DELETE FROM stream_audits WHERE {_OF_FORMER}"  # noqa: S608
DELETE: Final = f"DELETE FROM stream_audits WHERE {_FOLLOWER}"  # noqa: S608
BEGUN: Final = InstanceName("")


def read_audit(
    database: ISqlExecutor, stream: StreamName, follower: str, positions: Mapping[InstanceName, Token]
) -> dict[InstanceName, Token] | None:
    """Return up to where each writer in ``positions`` was compared; None if there is no audit."""
    if not database.execute(EXISTS[database.dialect]):
        return None
    found = {
        InstanceName(writer): Token(token)
        for writer, token in database.execute(_sql(database, GET), (stream, follower))
    }
    if not found:
        return None
    return {writer: min(found.get(writer, Token(0)), position) for writer, position in positions.items()}


def has_former_audit(database: ISqlExecutor, stream: StreamName, follower: str) -> bool:
    """Whether an SQLite file has an audit under former names of the follower."""
    if database.dialect != "sqlite" or not database.execute(EXISTS["sqlite"]):
        return False
    return bool(database.execute(FORMER, (stream, follower)))


def take_former_audit(database: ISqlExecutor, stream: StreamName, follower: str) -> None:
    """Give a follower on SQLite the audits of its former names."""
    if has_former_audit(database, stream, follower):
        database.execute(TAKE_FORMER, (follower, stream, follower))
        database.execute(DELETE_FORMER, (stream, follower))


def begin_audit(
    database: ISqlExecutor, stream: StreamName, follower: str, positions: Mapping[InstanceName, Token]
) -> dict[InstanceName, Token]:
    """Return up to where each writer was compared; where there was no audit, it begins at ``positions``."""
    found = read_audit(database, stream, follower, positions)
    if found is not None:
        return found
    if not database.execute(EXISTS[database.dialect]):
        if database.dialect == "postgresql":
            database.execute(LOCK)
        database.execute(CREATE)
    put_audited(database, stream, follower, {BEGUN: Token(0), **positions})
    return {**positions}


def read_searched(database: ISqlExecutor, stream: StreamName, follower: str) -> Token:
    """Return up to where former writers were searched; 0 without an audit."""
    if not database.execute(EXISTS[database.dialect]):
        return Token(0)
    found = dict(database.execute(_sql(database, GET), (stream, follower)))
    return Token(found.get(BEGUN, 0))


def put_searched(database: ISqlExecutor, stream: StreamName, follower: str, upto: Token) -> None:
    """Store up to where former writers were searched; the audit has begun."""
    put_audited(database, stream, follower, {BEGUN: upto})


def put_audited(
    database: ISqlExecutor, stream: StreamName, follower: str, checked: Mapping[InstanceName, Token]
) -> None:
    """Store up to where writers were compared."""
    database.executemany(_sql(database, PUT), [(stream, follower, *each) for each in checked.items()])


def lower_audited(
    database: ISqlExecutor, stream: StreamName, follower: str, writer: InstanceName, token: Token
) -> None:
    """Store that a writer has gone back: nothing above ``token`` was compared or searched."""
    if database.execute(EXISTS[database.dialect]):
        database.execute(_sql(database, LOWER), (token, stream, follower, writer, token))


def end_audit(database: ISqlExecutor, stream: StreamName, follower: str) -> None:
    """Forget the audit of a stream: what is applied without one is not noted."""
    if database.execute(EXISTS[database.dialect]):
        database.execute(_sql(database, DELETE), (stream, follower))


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
