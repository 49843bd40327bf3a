"""The table ``stream_histories``, in SQLite and PostgreSQL: the epochs of each writer (docs/protocol/following.md E7).

A writer stores its own history, and a copy stores that of its writer, under an empty follower name.  A follower with
functions stores the history of each writer under its own name.  On SQLite it finds that of its former name, too: one
process uses a file, under any name, and the positions there have none.  Everything here blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from replication.errors import PositionMovedError, StoreError
from replication.storage.migrations import LOCK
from replication.streams.history import encode_history, read_history
from replication.wire.grammar import StreamName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.contract import ISession
    from replication.streams.history import History
    from replication.streams.interfaces import ISqlExecutor, Write
    from replication.wire.grammar import InstanceName

CREATE: Final = """
    CREATE TABLE IF NOT EXISTS stream_histories (
        stream_name TEXT NOT NULL, instance_name TEXT NOT NULL, follower_name TEXT NOT NULL, epochs TEXT NOT NULL,
        PRIMARY KEY (stream_name, instance_name, follower_name)
    )
"""
EXISTS: Final[Mapping[str, str]] = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'stream_histories'",
    "postgresql": "SELECT 1 WHERE to_regclass('stream_histories') IS NOT NULL",
}
ALL: Final = "SELECT stream_name, instance_name, epochs FROM stream_histories WHERE follower_name = ''"
GET: Final = "SELECT epochs FROM stream_histories WHERE stream_name = ? AND instance_name = ? AND follower_name = ?"
RENAMED: Final = (  # on SQLite; older programs have left several names
    "SELECT epochs FROM stream_histories WHERE stream_name = ? AND instance_name = ? AND follower_name <> '' "
    "ORDER BY follower_name = ? DESC, rowid DESC LIMIT 1"
)
FORGET_RENAMED: Final = (
    "DELETE FROM stream_histories "
    "WHERE stream_name = ? AND instance_name = ? AND follower_name <> '' AND follower_name <> ?"
)
EVERY: Final = "SELECT stream_name, instance_name, follower_name FROM stream_histories"
OWN: Final = "SELECT stream_name, epochs FROM stream_histories WHERE instance_name = ? AND follower_name = ''"
PUT: Final = (
    "INSERT INTO stream_histories (stream_name, instance_name, follower_name, epochs) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (stream_name, instance_name, follower_name) DO UPDATE SET epochs = excluded.epochs"
)
# Locks the row, and creates it if it is missing: waits for another transaction that changes it.
LOCK_ROW: Final = (
    "INSERT INTO stream_histories (stream_name, instance_name, follower_name, epochs) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (stream_name, instance_name, follower_name) DO UPDATE SET epochs = stream_histories.epochs"
)
# Each promotion of a standby, and each recovery to a point in time, begins another one.
TIMELINE: Final = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)"


def get_timeline(database: ISqlExecutor) -> str:
    """Return the timeline of a PostgreSQL server; empty for SQLite."""
    return str(database.execute(TIMELINE)[0][0]) if database.dialect == "postgresql" else ""


def get_history(database: ISqlExecutor, stream: StreamName, writer: InstanceName, follower: str) -> History:
    """Return a stored history; empty if there is none, or no table, as in a database of version 0.1."""
    if not database.execute(EXISTS[database.dialect]):
        return ()
    return _only(stream, writer, database.execute(_get(database, follower), (stream, writer, follower)))


def find_history(session: ISession, stream: StreamName, writer: InstanceName, follower: str) -> History:
    """Return a stored history, read outside a transaction; StoreError if there is no table."""
    return _only(stream, writer, session.ask(_get(session, follower), (stream, writer, follower)))


def get_histories(database: ISqlExecutor, writer: InstanceName) -> dict[StreamName, History]:
    """Return the stored history of a writer in every stream that has one."""
    if not database.execute(EXISTS[database.dialect]):
        return {}
    found = database.execute(_sql(database, OWN), (writer,))
    return {StreamName(stream): _read(StreamName(stream), writer, epochs) for stream, epochs in found}


def get_histories_of_all(database: ISqlExecutor) -> dict[tuple[StreamName, InstanceName, str], History]:
    """Return every stored history by stream, writer and follower, as ``get_history`` returns it."""
    keys = database.execute(EVERY) if database.execute(EXISTS[database.dialect]) else ()
    return {
        (stream, writer, follower): get_history(database, stream, writer, follower) for stream, writer, follower in keys
    }


def put_histories(
    database: ISqlExecutor, writer: InstanceName, histories: Mapping[StreamName, History], follower: str
) -> None:
    """Store the history of a writer in each of these streams."""
    _create(database)
    rows = [(stream, writer, follower, encode_history(each)) for stream, each in histories.items()]
    database.executemany(_sql(database, PUT), rows)
    if follower and database.dialect == "sqlite":
        database.executemany(FORGET_RENAMED, [(stream, writer, follower) for stream in histories])


def replace_history(database: ISqlExecutor, write: Write, history: History, former: History) -> None:
    """Replace the history ``former`` of the writer of ``write``; PositionMovedError if another one is stored."""
    stream, writer = write.stream, write.writer
    _create(database)
    database.execute(_sql(database, LOCK_ROW), (stream, writer, "", encode_history(())))
    if [*get_history(database, stream, writer, "")] != [*former]:
        raise PositionMovedError(f"another process has changed the history of {writer!r} in stream {stream!r}")
    put_histories(database, writer, {stream: history}, "")


def _create(database: ISqlExecutor) -> None:
    if not database.execute(EXISTS[database.dialect]):
        if database.dialect == "postgresql":
            database.execute(LOCK)
        database.execute(CREATE)


def _only(stream: StreamName, writer: InstanceName, rows: Sequence[tuple[str]]) -> History:
    return _read(stream, writer, rows[0][0]) if rows else ()


def _read(stream: StreamName, writer: InstanceName, epochs: str) -> History:
    try:
        return read_history(epochs)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the history of {writer!r} in stream {stream!r} cannot be read: {error}") from error


def _get(database: ISqlExecutor | ISession, follower: str) -> str:
    return RENAMED if follower and database.dialect == "sqlite" else _sql(database, GET)


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
