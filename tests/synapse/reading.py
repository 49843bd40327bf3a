"""The user of docs/how-to/follow-a-synapse.md, who may only read, and the proof that nothing is written."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from tests.docs.pages import blocks, page
from tests.synapse.published import NAME
from tests.synapse.recorded import restore_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

READER = "replication"
READER_SQL = next(each.body for each in blocks(page("how-to/follow-a-synapse.md")) if each.file == "reader.sql")


@contextmanager
def read_only_synapse(server: PostgresServer) -> Iterator[str]:
    """Yield the URL of the recorded database, for the user who may only read it; fail if it is written."""
    with server.database() as name:
        url = restore_postgres(server, name, NAME)
        server.sql(READER_SQL, database=name)
        try:
            with nothing_written(url):
                yield server.url(name, READER)
        finally:
            server.sql(f"DROP OWNED BY {READER}; DROP ROLE {READER}", database=name)


@contextmanager
def nothing_written(url: str) -> Iterator[None]:
    """Fail if any transaction got an ID in the block, as each that writes does, or if a relation or row is another."""
    before = _state(url)
    yield
    assert _state(url) == before


def _state(url: str) -> object:
    with psycopg.connect(url, autocommit=True) as database:
        ((next_transaction, temporary_files),) = database.execute(
            "SELECT pg_snapshot_xmax(pg_current_snapshot())::text, temp_files FROM pg_stat_database "
            "WHERE datname = current_database()"
        ).fetchall()
        relations = database.execute("SELECT oid, relname, relkind, relfilenode FROM pg_class ORDER BY oid").fetchall()
        contents = {}
        for oid, name, kind, _ in relations:
            row = {"S": "last_value, is_called", "r": "md5(string_agg(each::text || xmin || ctid, '' ORDER BY ctid))"}
            if kind in row and oid >= 16384:  # the first OID of a user's relation
                statement = sql.SQL("SELECT {} FROM public.{} AS each").format(sql.SQL(row[kind]), sql.Identifier(name))
                contents[name] = database.execute(statement).fetchall()
        assert len(contents) > 100
        return next_transaction, temporary_files, relations, contents
