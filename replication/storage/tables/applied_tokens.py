"""The table ``applied_tokens``, in SQLite and PostgreSQL: which facts a follower has applied, by token.

It is for followers with a function: of streams in which any writer may send a fact (``known_by_token`` of a
definition), and of streams that are compared with the writers' database (docs/protocol/redis.md, Audit).  Of a copy
the table of the stream has the tokens.  Everything here blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.storage.migrations import LOCK
from replication.storage.names import quoted, relation_name
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from replication.streams.interfaces import ISqlExecutor
    from replication.wire.grammar import InstanceName, StreamName

CREATE: Final = """
    CREATE TABLE IF NOT EXISTS applied_tokens (
        stream_name TEXT NOT NULL, follower_name TEXT NOT NULL, stream_id BIGINT NOT NULL, instance_name TEXT NOT NULL,
        PRIMARY KEY (stream_name, follower_name, stream_id)
    )
"""
EXISTS: Final[Mapping[str, str]] = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'applied_tokens'",
    "postgresql": "SELECT 1 WHERE to_regclass('applied_tokens') IS NOT NULL",
}
_FOLLOWER: Final = "stream_name = ? AND follower_name = ?"
FIND: Final = f"SELECT stream_id FROM applied_tokens WHERE {_FOLLOWER} AND stream_id BETWEEN ? AND ?"  # noqa: S608
PUT: Final = (
    "INSERT INTO applied_tokens (stream_name, follower_name, stream_id, instance_name) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (stream_name, follower_name, stream_id) DO NOTHING"
)
FORGET: Final = f"DELETE FROM applied_tokens WHERE {_FOLLOWER} AND stream_id <= ?"  # noqa: S608
FORGET_OF: Final = f"{FORGET} AND instance_name = ?"
# On SQLite one process uses a file, under any name: it takes the tokens that were noted under its former names.
FORMER: Final = "SELECT 1 FROM applied_tokens WHERE stream_name = ? AND follower_name <> ? LIMIT 1"
RENAME: Final = "UPDATE OR REPLACE applied_tokens SET follower_name = ? WHERE stream_name = ? AND follower_name <> ?"
UNDO: Final = f"DELETE FROM applied_tokens WHERE {_FOLLOWER} AND stream_id > ? AND instance_name = ?"  # noqa: S608


def find_copied(database: ISqlExecutor, stream: StreamName, first: Token, last: Token) -> set[Token]:
    """Return the tokens from ``first`` to ``last`` of facts of all writers that a copy has."""
    name = f"stream_{stream}" if database.dialect == "sqlite" else relation_name(stream)
    sql = f"SELECT DISTINCT stream_id FROM {quoted(name)} WHERE stream_id BETWEEN ? AND ?"  # noqa: S608
    return {Token(token) for (token,) in database.execute(_sql(database, sql), (first, last))}


def find_applied(
    database: ISqlExecutor, stream: StreamName, follower: InstanceName, first: Token, last: Token
) -> set[Token]:
    """Return the tokens from ``first`` to ``last`` that a follower has noted."""
    if not database.execute(EXISTS[database.dialect]):
        return set()
    found = database.execute(_sql(database, FIND), (stream, follower, first, last))
    return {Token(token) for (token,) in found}


def has_former_tokens(database: ISqlExecutor, stream: StreamName, follower: InstanceName) -> bool:
    """Whether an SQLite file has tokens under former names of the follower."""
    if database.dialect != "sqlite" or not database.execute(EXISTS["sqlite"]):
        return False
    return bool(database.execute(FORMER, (stream, follower)))


def take_former_tokens(database: ISqlExecutor, stream: StreamName, follower: InstanceName) -> None:
    """Give a follower on SQLite the tokens of its former names."""
    if has_former_tokens(database, stream, follower):
        database.execute(RENAME, (follower, stream, follower))


def note_applied(
    database: ISqlExecutor,
    stream: StreamName,
    follower: InstanceName,
    writer: InstanceName,
    *,
    tokens: Iterable[Token],
    floor: Token,
) -> None:
    """Note tokens that ``writer`` has sent; forget those up to ``floor``, which no writer sends again."""
    _create(database)
    database.executemany(_sql(database, PUT), [(stream, follower, each, writer) for each in tokens if each > floor])
    database.execute(_sql(database, FORGET), (stream, follower, floor))


def forget_applied(
    database: ISqlExecutor,
    stream: StreamName,
    follower: InstanceName,
    *,
    of_writers: Mapping[InstanceName, Token],
    floor: Token,
) -> None:
    """Forget the tokens up to ``floor``, and those of each writer up to another token."""
    _create(database)
    database.execute(_sql(database, FORGET), (stream, follower, floor))
    for writer, upto in of_writers.items():
        database.execute(_sql(database, FORGET_OF), (stream, follower, upto, writer))


def undo_applied(
    database: ISqlExecutor, stream: StreamName, follower: InstanceName, writer: InstanceName, above: Token
) -> None:
    """Forget the tokens above ``above`` that ``writer`` has sent: it went back."""
    _create(database)
    database.execute(_sql(database, UNDO), (stream, follower, above, writer))


def _create(database: ISqlExecutor) -> None:
    if not database.execute(EXISTS[database.dialect]):
        if database.dialect == "postgresql":
            database.execute(LOCK)
        database.execute(CREATE)


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
