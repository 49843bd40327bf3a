"""Mapped streams, looked at and prepared by a program that has no reactor, whether or not a daemon runs over them."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from threading import Event
from typing import TYPE_CHECKING

import attrs

from replication.errors import ConfigError, SchemaError, StoreError
from replication.storage import path_of
from replication.storage.connection import MEMORY
from replication.storage.gathered import table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from replication.storage.postgres_session import PostgresSession
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import StreamName


@attrs.frozen
class Finding:
    """What is to be said of one mapping: why it cannot work, or what should be mended; a sentence each."""

    stream: StreamName
    error: str | None
    warnings: Sequence[str]


def check(url: str, definitions: Sequence[StreamDefinition], beside: Sequence[StreamDefinition] = ()) -> list[Finding]:
    """Look at the tables that streams are mapped onto or gathered from; StoreError if the database does not answer.

    ``beside`` are streams that may share IDs with them.
    """
    path = path_of(url)
    if path is None:
        return _check_postgres(url, definitions, beside)
    if path == MEMORY:
        raise ConfigError(f"database {url!r} is in memory, where no table is: name a file")
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            mapped = [each for each in definitions if each.maps("sqlite") or each.sources("sqlite")]
            return [_find(each, lambda of: table_of(of).declare(database, may_create=False)) for each in mapped]
    except sqlite3.Error as error:
        raise StoreError(f"database {path!r}: {error}") from error


def number_first(url: str, definitions: Sequence[StreamDefinition], *, remove: bool = False) -> list[str]:
    """Install, or remove, the trigger on the streams' tables, and return their names; all of them, or none."""
    if path_of(url) is not None:
        raise ConfigError("on SQLite there is nothing to install or remove: mapped streams work as they are")
    from replication.storage import postgres_numbering  # noqa: PLC0415 - its driver is an extra
    from replication.storage.postgres_tables import quoted  # noqa: PLC0415

    tables = sorted({each.table for each in definitions if each.table is not None})
    with _session(url) as session:
        (postgres_numbering.remove if remove else postgres_numbering.install)(
            session, [quoted(each) for each in tables]
        )
    return tables


def _check_postgres(
    url: str, definitions: Sequence[StreamDefinition], beside: Sequence[StreamDefinition]
) -> list[Finding]:
    with _session(url) as session:
        from replication.storage.postgres_ahead import rows_ahead  # noqa: PLC0415 - its driver is an extra
        from replication.storage.postgres_checks import refuse_shared  # noqa: PLC0415
        from replication.storage.postgres_gathered import table_of  # noqa: PLC0415
        from replication.storage.postgres_ids import check_sequence, last_drawn  # noqa: PLC0415

        def declare(definition: StreamDefinition) -> Sequence[str]:
            table = table_of(definition)
            said = table.declare(session, may_create=False)
            check_sequence(session, table)
            refuse_shared(table, [*definitions, *beside])
            drawn = {} if definition.shares else {table: last_drawn(session, table.sequence)}
            return [*said, *rows_ahead(session, drawn).values()]

        return [_find(each, declare) for each in definitions if each.maps("postgresql") or each.sources("postgresql")]


def _find(definition: StreamDefinition, declare: Callable[[StreamDefinition], Sequence[str]]) -> Finding:
    try:
        return Finding(definition.name, None, declare(definition))
    except SchemaError as error:
        return Finding(definition.name, str(error), ())


@contextmanager
def _session(url: str) -> Iterator[PostgresSession]:
    try:
        from replication.storage.postgres_session import Address, Holder, PostgresSession  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"PostgreSQL needs psycopg 3 ({error}): pip install '.[postgres]' in the checkout") from error
    session = PostgresSession(Address.parse(url), Event(), Holder())
    try:
        yield session
    finally:
        session.close()
