"""The table ``skipped_facts``, in SQLite and PostgreSQL: facts that a function could not take, by token.

The first such fact creates it.  On SQLite the follower's name is empty: one process uses a file, under any name.
Everything here blocks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from replication.storage.migrations import LOCK
from replication.streams.facts import Fact
from replication.streams.skips import LEFT_OUT, SkippedFact, SkipState
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.streams.interfaces import ISqlExecutor, Write

CREATE: Final = """
    CREATE TABLE IF NOT EXISTS skipped_facts (
        stream_name TEXT NOT NULL, follower_name TEXT NOT NULL, instance_name TEXT NOT NULL, stream_id BIGINT NOT NULL,
        state TEXT NOT NULL, fact_rows TEXT NOT NULL, error TEXT NOT NULL, decided_by TEXT NOT NULL,
        changed_at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (follower_name, stream_name, instance_name, stream_id)
    )
"""
EXISTS: Final[Mapping[str, str]] = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'skipped_facts'",
    "postgresql": "SELECT 1 WHERE to_regclass('skipped_facts') IS NOT NULL",
}
_COLUMNS: Final = "stream_name, instance_name, stream_id, state, fact_rows, error, decided_by, changed_at"
ENCODING: Final = "SELECT current_setting('server_encoding')"
GET: Final = f"SELECT {_COLUMNS} FROM skipped_facts WHERE follower_name = ?"  # noqa: S608 - constant names
COUNT: Final = (
    "SELECT instance_name, count(*) FROM skipped_facts WHERE follower_name = ? AND stream_name = ? AND state IN (?, ?) "
    "GROUP BY instance_name"
)
PUT: Final = (
    f"INSERT INTO skipped_facts (follower_name, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "  # noqa: S608
    "ON CONFLICT (follower_name, stream_name, instance_name, stream_id) DO UPDATE SET state = excluded.state, "
    "fact_rows = excluded.fact_rows, error = excluded.error, decided_by = excluded.decided_by, "
    "changed_at = excluded.changed_at"
)
UNDO: Final = (
    "DELETE FROM skipped_facts WHERE follower_name = ? AND stream_name = ? AND instance_name = ? AND stream_id > ?"
)

NEWEST: Final = (
    "SELECT instance_name, max(stream_id) FROM skipped_facts "
    "WHERE follower_name = ? AND stream_name = ? AND state <> ? GROUP BY instance_name"
)
FORGET: Final = f"{UNDO} AND state <> ?"


def get_skipped(
    database: ISqlExecutor,
    follower: str,
    stream: StreamName | None,
    key: tuple[InstanceName, Token] | None,
    *,
    states: Collection[SkipState],
    limit: int,
) -> list[SkippedFact]:
    """Return the latest facts as ``IStreamStore.skipped_facts`` does; none without the table."""
    if not database.execute(EXISTS[database.dialect]):
        return []
    sql, parameters = GET, [_follower(database, follower)]
    for column, value in (("stream_name", stream), ("instance_name", key and key[0]), ("stream_id", key and key[1])):
        if value is not None:
            sql += f" AND {column} = ?"
            parameters.append(value)  # type: ignore[arg-type]
    if states:
        sql += f" AND state IN ({', '.join('?' for _ in states)})"
        parameters += [each.value for each in states]
    sql += " ORDER BY changed_at DESC, stream_id DESC LIMIT ?"
    return [
        SkippedFact(
            StreamName(name),
            InstanceName(writer),
            Fact(Token(token), tuple(json.loads(rows))),
            SkipState(state),
            error,
            decided_by,
            changed_at,
        )
        for name, writer, token, state, rows, error, decided_by, changed_at in database.execute(
            _sql(database, sql), (*parameters, limit)
        )
    ]


def count_skipped(database: ISqlExecutor, follower: str, stream: StreamName) -> dict[InstanceName, int]:
    """Return how many facts of each writer are left out now."""
    if not database.execute(EXISTS[database.dialect]):
        return {}
    states = [each.value for each in LEFT_OUT]
    found = database.execute(_sql(database, COUNT), (_follower(database, follower), stream, *states))
    return {InstanceName(writer): count for writer, count in found}


def lost_skips(
    database: ISqlExecutor, follower: str, stream: StreamName, positions: Mapping[InstanceName, Token]
) -> dict[InstanceName, Token]:
    """Return the writers with skipped facts above the follower's position, and that position.

    A restore has undone them: a fact is skipped in the transaction that moves the position past it.  ``pg_restore``
    keeps a table that is not in the dump.
    """
    if not database.execute(EXISTS[database.dialect]):
        return {}
    which = (_follower(database, follower), stream, SkipState.SKIP_REQUESTED.value)
    newest = {InstanceName(writer): token for writer, token in database.execute(_sql(database, NEWEST), which)}
    return {
        writer: positions.get(writer, Token(0))
        for writer, token in newest.items()
        if token > positions.get(writer, Token(0))
    }


def forget_skips(
    database: ISqlExecutor, follower: str, stream: StreamName, above: Mapping[InstanceName, Token]
) -> None:
    """Delete what ``lost_skips`` has found."""
    name, requested = _follower(database, follower), SkipState.SKIP_REQUESTED.value
    database.executemany(_sql(database, FORGET), [(name, stream, *each, requested) for each in above.items()])


def store_skipped(database: ISqlExecutor, write: Write, now: float) -> None:
    """Store the skipped facts of a write, at a time in seconds; forget those that a writer has lost."""
    if write.follower is None:
        return
    follower = _follower(database, write.follower)
    exists = bool(database.execute(EXISTS[database.dialect]))
    if write.reset and exists:
        database.execute(_sql(database, UNDO), (follower, write.stream, write.writer, write.upto))
    if write.skipped and not exists:
        if database.dialect == "postgresql":
            database.execute(LOCK)
        database.execute(CREATE)
    if write.skipped:
        errors = [_storable(database, each.error) for each in write.skipped]
        rows = [_row(follower, each, error, now) for each, error in zip(write.skipped, errors, strict=True)]
        database.executemany(_sql(database, PUT), rows)


def _row(follower: str, skipped: SkippedFact, error: str, now: float) -> Sequence[object]:
    token, texts = skipped.fact
    what = (skipped.stream, skipped.writer, token, skipped.state.value)
    return (follower, *what, json.dumps([*texts]), error, skipped.decided_by, now)


def _storable(database: ISqlExecutor, error: str) -> str:
    """Return the text of an error in characters that the database has, which may have another encoding than UTF-8."""
    if error.isascii() or database.dialect == "sqlite" or database.execute(ENCODING) == [("UTF8",)]:
        return error
    return error.encode("ascii", "backslashreplace").decode()


def _follower(database: ISqlExecutor, follower: str) -> str:
    return "" if database.dialect == "sqlite" else follower


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
