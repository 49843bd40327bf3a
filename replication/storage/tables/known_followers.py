"""The table ``known_followers``, in SQLite and PostgreSQL: up to where followers have applied facts.

The first report creates it.  Everything here blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from replication.errors import StoreError
from replication.storage.migrations import LOCK
from replication.streams.interfaces import KnownFollower
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.interfaces import ISqlExecutor

CREATE: Final = """
    CREATE TABLE IF NOT EXISTS known_followers (
        follower_name TEXT NOT NULL PRIMARY KEY, positions TEXT NOT NULL, reported_at DOUBLE PRECISION NOT NULL
    )
"""
EXISTS: Final[Mapping[str, str]] = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'known_followers'",
    "postgresql": "SELECT 1 WHERE to_regclass('known_followers') IS NOT NULL",
}
ALL: Final = "SELECT follower_name, positions, reported_at FROM known_followers ORDER BY follower_name"
PUT: Final = (
    "INSERT INTO known_followers (follower_name, positions, reported_at) VALUES (?, ?, ?) "
    "ON CONFLICT (follower_name) DO UPDATE SET positions = excluded.positions, reported_at = excluded.reported_at"
)
DELETE: Final = "DELETE FROM known_followers WHERE follower_name = ?"

_decode = msgspec.json.Decoder(dict[str, dict[str, int]]).decode


def get_followers(database: ISqlExecutor) -> list[KnownFollower]:
    """Return all followers by name; none without the table."""
    if not database.execute(EXISTS[database.dialect]):
        return []
    return [
        KnownFollower(InstanceName(name), _read(name, positions), reported_at)
        for name, positions, reported_at in database.execute(ALL)
    ]


def put_follower(database: ISqlExecutor, follower: KnownFollower) -> None:
    """Store what a follower has reported."""
    if not database.execute(EXISTS[database.dialect]):
        if database.dialect == "postgresql":
            database.execute(LOCK)
        database.execute(CREATE)
    row = follower.name, msgspec.json.encode(follower.positions).decode(), follower.reported_at
    database.execute(_sql(database, PUT), row)


def delete_follower(database: ISqlExecutor, name: InstanceName) -> None:
    """Forget a follower."""
    if database.execute(EXISTS[database.dialect]):
        database.execute(_sql(database, DELETE), (name,))


def _read(name: str, positions: str) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
    try:
        found = _decode(positions)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the positions of {name!r} in the table known_followers cannot be read: {error}") from error
    return {
        StreamName(stream): {InstanceName(writer): Token(token) for writer, token in each.items()}
        for stream, each in found.items()
    }


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
