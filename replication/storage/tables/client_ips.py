"""The table ``users_last_seen``, in SQLite and PostgreSQL: the last client IPs of users, from USER_IP commands.

Everything here blocks.  It runs on the database's thread, in one transaction or on one snapshot.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import attrs

from replication.storage.migrations import upgrade
from replication.wire.commands import UserIp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.interfaces import ISqlExecutor

STEPS: Final = (
    (
        # last_seen is in ms.  The columns are those of Synapse's table, so there are access tokens: they are secrets.
        """
        CREATE TABLE users_last_seen (
            user_id TEXT NOT NULL, access_token TEXT NOT NULL, ip TEXT NOT NULL, user_agent TEXT NOT NULL,
            device_id TEXT, last_seen BIGINT NOT NULL, PRIMARY KEY (user_id, access_token, ip)
        )
        """,
        "CREATE INDEX users_last_seen_age ON users_last_seen (last_seen)",
    ),
)
_PUT: Final = (
    "INSERT INTO users_last_seen (user_id, access_token, ip, user_agent, device_id, last_seen) "
    "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (user_id, access_token, ip) DO UPDATE SET "
    "user_agent = excluded.user_agent, device_id = excluded.device_id, last_seen = excluded.last_seen "
    "WHERE excluded.last_seen > users_last_seen.last_seen"
)


def declare_last_seen(database: ISqlExecutor) -> None:
    """Bring the table up to date; SchemaError if it is newer than this code."""
    if database.dialect == "postgresql":
        database.execute("SELECT pg_advisory_xact_lock(7236830)")  # two writers may start at once
    upgrade(database.execute, nullcontext, STEPS, "users_schema")


def put_last_seen(database: ISqlExecutor, seen: Sequence[UserIp]) -> None:
    """Store a batch; a row that is older than the stored one changes nothing."""
    # In one order, so that two writers cause no deadlock.
    rows = sorted(seen, key=lambda each: (each.user_id, each.access_token, each.ip))
    database.executemany(_sql(database, _PUT), [attrs.astuple(each) for each in rows])


def forget_last_seen(database: ISqlExecutor, before: int) -> None:
    """Delete rows from before ``before``, in ms since 1970."""
    database.execute(_sql(database, "DELETE FROM users_last_seen WHERE last_seen < ?"), (before,))


def read_last_seen(database: ISqlExecutor, user_id: str) -> list[UserIp]:
    """Return the rows of one user, the latest first."""
    sql = "SELECT * FROM users_last_seen WHERE user_id = ? ORDER BY last_seen DESC, access_token, ip"
    return [UserIp(*row) for row in database.execute(_sql(database, sql), (user_id,))]


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
