"""Where users were last seen, as USER_IP says: a table for SQLite and PostgreSQL alike, ``users_last_seen``.

Everything here blocks; it runs on the database's thread, in one transaction or on one snapshot.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import attrs

from replication.storage.migrate import upgrade
from replication.wire.commands import UserIp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.seams import IStatements

STEPS: Final = (
    (
        # last_seen in ms; a token is a secret: the table has what Synapse's has, and it is for the application to read
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


def declare_last_seen(database: IStatements) -> None:
    """Bring the table up to date; SchemaError if it is newer than this code."""
    if database.dialect == "postgresql":
        database.execute("SELECT pg_advisory_xact_lock(7236830)")  # two writers may begin at once
    upgrade(database.execute, nullcontext, STEPS, "users_schema")


def put_last_seen(database: IStatements, seen: Sequence[UserIp]) -> None:
    """Store a batch; what is older than the table's own stays away."""
    in_order = sorted(
        seen, key=lambda each: (each.user_id, each.access_token, each.ip)
    )  # or two writers wait in a ring
    database.executemany(_spell(database, _PUT), [attrs.astuple(each) for each in in_order])


def forget_last_seen(database: IStatements, before: int) -> None:
    """Delete what is older than ``before``, in ms."""
    database.execute(_spell(database, "DELETE FROM users_last_seen WHERE last_seen < ?"), (before,))


def read_last_seen(database: IStatements, user_id: str) -> list[UserIp]:
    """Return where one user was seen, the latest first."""
    sql = "SELECT * FROM users_last_seen WHERE user_id = ? ORDER BY last_seen DESC, access_token, ip"
    return [UserIp(*row) for row in database.execute(_spell(database, sql), (user_id,))]


def _spell(database: IStatements, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
