"""The table ``applied_counts``, in SQLite and PostgreSQL: how many facts a function has applied of late, per writer.

Each commit of a position replaces the text, so the two belong together (docs/protocol/following.md E7).  The first text
creates the table.  On SQLite the follower's name is empty: one process uses a file, under any name.  Everything here
blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.storage.migrations import LOCK
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.storage.contract import ISession
    from replication.streams.interfaces import ISqlExecutor, Write
    from replication.wire.grammar import StreamName

_CREATE: Final = """
    CREATE TABLE IF NOT EXISTS applied_counts (
        stream_name TEXT NOT NULL, instance_name TEXT NOT NULL, follower_name TEXT NOT NULL, counts TEXT NOT NULL,
        PRIMARY KEY (stream_name, instance_name, follower_name)
    )
"""
CREATE: Final[Mapping[str, str]] = {"sqlite": f"{_CREATE} WITHOUT ROWID", "postgresql": _CREATE}
# Whether the table exists, and whether this user may create it.
STATE: Final[Mapping[str, str]] = {
    "sqlite": "SELECT count(*) > 0, 1 FROM sqlite_master WHERE type = 'table' AND name = 'applied_counts'",
    "postgresql": (
        "SELECT to_regclass('applied_counts') IS NOT NULL, "
        "coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)"
    ),
}
GET: Final[Mapping[str, str]] = {
    "sqlite": "SELECT instance_name, counts FROM applied_counts WHERE stream_name = ? AND follower_name = ?",
    "postgresql": "SELECT instance_name, counts FROM applied_counts WHERE stream_name = %s AND follower_name = %s",
}
_PUT: Final = (
    "INSERT INTO applied_counts (stream_name, instance_name, follower_name, counts) VALUES ({marks}) "
    "ON CONFLICT (stream_name, instance_name, follower_name) DO UPDATE SET counts = excluded.counts"
)
PUT: Final[Mapping[str, str]] = {
    "sqlite": _PUT.format(marks="?, ?, ?, ?"),
    "postgresql": _PUT.format(marks="%s, %s, %s, %s"),
}


def has_counts(session: ISession) -> bool:
    """Return whether the table exists, read outside a transaction."""
    ((exists, _),) = session.ask(STATE[session.dialect])
    return bool(exists)


def find_counts(session: ISession, stream: StreamName, follower: str) -> dict[InstanceName, str]:
    """Return the stored texts of a follower, by writer, read outside a transaction; StoreError without the table."""
    found = session.ask(GET[session.dialect], (stream, _follower(session, follower)))
    return {InstanceName(writer): counts for writer, counts in found}


def prepare_counts(database: ISqlExecutor) -> bool:
    """Create the table if it is missing; return False if this user may not, and nothing can be stored."""
    ((exists, may_create),) = database.execute(STATE[database.dialect])
    if not exists and may_create:
        if database.dialect == "postgresql":
            database.execute(LOCK)
        database.execute(CREATE[database.dialect])
    return bool(exists or may_create)


def put_counts(session: ISession, write: Write) -> None:
    """Store the text of a write, in the table that ``prepare_counts`` has found or created."""
    key = (write.stream, write.writer, _follower(session, write.follower or ""))
    session.add(PUT[session.dialect], (*key, write.counts))


def _follower(database: ISqlExecutor | ISession, follower: str) -> str:
    return "" if database.dialect == "sqlite" else follower
