"""The tables ``gone_facts`` and ``fact_slices``, in SQLite and PostgreSQL: which facts a retention has deleted.

``gone_facts`` has, for each stream and writer, the token up to which facts may be gone.  The first deletion creates
it, and takes the last step of the schema: a program that does not know the table then refuses the database, instead of
skipping what is gone.  ``fact_slices`` has the slices that are counted, and deleted next
(docs/operations.md, Retention).  Everything here blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.storage.migrations import LOCK
from replication.streams.interfaces import FactSlice
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.interfaces import ISqlExecutor, Write

CREATE: Final = """
    CREATE TABLE IF NOT EXISTS gone_facts (
        stream_name TEXT NOT NULL, instance_name TEXT NOT NULL, stream_id BIGINT NOT NULL,
        PRIMARY KEY (stream_name, instance_name)
    )
"""
CREATE_SLICES: Final = """
    CREATE TABLE IF NOT EXISTS fact_slices (
        stream_name TEXT NOT NULL, instance_name TEXT NOT NULL, stream_id BIGINT NOT NULL, fact_rows BIGINT NOT NULL,
        fact_bytes BIGINT NOT NULL, seconds DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (stream_name, instance_name, stream_id)
    )
"""
EXISTS: Final[Mapping[str, str]] = {
    "sqlite": "SELECT count(*) > 0 FROM sqlite_master WHERE type = 'table' AND name = 'gone_facts'",
    "postgresql": "SELECT to_regclass('gone_facts') IS NOT NULL",
}
SLICES_EXIST: Final = {dialect: sql.replace("gone_facts", "fact_slices") for dialect, sql in EXISTS.items()}
ALL: Final = "SELECT stream_name, instance_name, stream_id FROM gone_facts"
OF: Final = "SELECT instance_name, stream_id FROM gone_facts WHERE stream_name = ?"
PUT: Final = (
    "INSERT INTO gone_facts (stream_name, instance_name, stream_id) VALUES (?, ?, ?) "
    "ON CONFLICT (stream_name, instance_name) DO UPDATE SET stream_id = excluded.stream_id "
    "WHERE excluded.stream_id > gone_facts.stream_id"
)
LOWER: Final = "UPDATE gone_facts SET stream_id = ? WHERE stream_name = ? AND instance_name = ? AND stream_id > ?"
MARKED: Final = "SELECT stream_name FROM gone_facts WHERE instance_name = ?"
SLICED: Final = "SELECT DISTINCT stream_name FROM fact_slices WHERE instance_name = ?"
DELETE_ALL_SLICES: Final = "DELETE FROM fact_slices WHERE stream_name = ? AND instance_name = ?"
SLICES: Final = (
    "SELECT stream_id, fact_rows, fact_bytes, seconds FROM fact_slices WHERE stream_name = ? AND instance_name = ? "
    "ORDER BY stream_id"
)
PUT_SLICE: Final = (
    "INSERT INTO fact_slices (stream_name, instance_name, stream_id, fact_rows, fact_bytes, seconds) "
    "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (stream_name, instance_name, stream_id) DO UPDATE "
    "SET fact_rows = excluded.fact_rows, fact_bytes = excluded.fact_bytes, seconds = excluded.seconds"
)
# What ends at 0 has no facts: only its time counts.
DELETE_SLICES: Final = (
    "DELETE FROM fact_slices WHERE stream_name = ? AND instance_name = ? AND stream_id <= ? AND stream_id > 0"
)


def get_gone(database: ISqlExecutor, stream: StreamName) -> dict[InstanceName, Token]:
    """Return, per writer, up to where facts may be gone; nothing without the table."""
    if not _exists(database, EXISTS):
        return {}
    found = database.execute(_sql(database, OF), (stream,))
    return {InstanceName(writer): Token(upto) for writer, upto in found}


def marked_streams(database: ISqlExecutor, writer: InstanceName) -> set[StreamName]:
    """Return the streams with a mark, or with slices, of a writer."""
    found: set[StreamName] = set()
    for exists, sql in ((EXISTS, MARKED), (SLICES_EXIST, SLICED)):
        if _exists(database, exists):
            found.update(StreamName(name) for (name,) in database.execute(_sql(database, sql), (writer,)))
    return found


def forget_marks(database: ISqlExecutor, stream: StreamName, writer: InstanceName, *, keep_upto: Token) -> None:
    """Lower a mark to ``keep_upto``, where 0 deletes it, and delete the slices."""
    if _exists(database, EXISTS):
        database.execute(_sql(database, LOWER), (keep_upto, stream, writer, keep_upto))
        database.execute("DELETE FROM gone_facts WHERE stream_id = 0")
    if _exists(database, SLICES_EXIST):
        database.execute(_sql(database, DELETE_ALL_SLICES), (stream, writer))


def put_gone(database: ISqlExecutor, stream: StreamName, writer: InstanceName, upto: Token, version: int) -> None:
    """Note that facts up to ``upto`` are gone; ``version`` is that of a schema with the table."""
    if not _exists(database, EXISTS):
        _create(database, CREATE)
        database.execute(
            _sql(database, "UPDATE replication_schema SET version = ? WHERE version < ?"), (version, version)
        )
    database.execute(_sql(database, PUT), (stream, writer, upto))


def lower_gone(database: ISqlExecutor, write: Write) -> None:
    """Let a copy that goes back have what comes next: what was gone above the position is of the lost history."""
    if write.reset and write.follower is None and _exists(database, EXISTS):
        database.execute(_sql(database, LOWER), (write.upto, write.stream, write.writer, write.upto))


def get_slices(database: ISqlExecutor, stream: StreamName, writer: InstanceName) -> list[FactSlice]:
    """Return the stored slices, ascending."""
    if not _exists(database, SLICES_EXIST):
        return []
    found = database.execute(_sql(database, SLICES), (stream, writer))
    return [FactSlice(Token(upto), rows, size, seconds) for upto, rows, size, seconds in found]


def put_slice(database: ISqlExecutor, stream: StreamName, writer: InstanceName, new: FactSlice) -> None:
    """Store a slice, or replace that with the same end."""
    if not _exists(database, SLICES_EXIST):
        _create(database, CREATE_SLICES)
    database.execute(_sql(database, PUT_SLICE), (stream, writer, new.upto, new.rows, new.size, new.seconds))


def delete_slices(database: ISqlExecutor, stream: StreamName, writer: InstanceName, upto: Token) -> None:
    """Delete the slices with facts up to ``upto``."""
    if _exists(database, SLICES_EXIST):
        database.execute(_sql(database, DELETE_SLICES), (stream, writer, upto))


def _exists(database: ISqlExecutor, sql: Mapping[str, str]) -> bool:
    return any(exists for (exists,) in database.execute(sql[database.dialect]))


def _create(database: ISqlExecutor, sql: str) -> None:
    if database.dialect == "postgresql":
        database.execute(LOCK)
    database.execute(sql)


def _sql(database: ISqlExecutor, sql: str) -> str:
    return sql if database.dialect == "sqlite" else sql.replace("?", "%s")
