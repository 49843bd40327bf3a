"""Checks of mapped streams, and the installation of the trigger, in a program without a reactor."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import msgspec

from replication.errors import ConfigError, SchemaError
from replication.storage import needs_psycopg, path_of
from replication.storage.sqlite.joined import table_of
from replication.storage.sqlite.session import MEMORY, SqliteSession
from replication.urls import Url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from replication.storage.postgres.session import PostgresSession
    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import StreamName


class Finding(msgspec.Struct, frozen=True):
    """What was found about one stream: why it cannot work, if so, and warnings."""

    stream: StreamName
    error: str | None
    warnings: Sequence[str]


def check(
    url: str | Url, definitions: Sequence[StreamDefinition], beside: Sequence[StreamDefinition] = ()
) -> list[Finding]:
    """Check the tables that streams are mapped onto or joined from; StoreError if the database does not answer.

    ``beside`` are streams that may share their IDs.
    """
    path = path_of(url)
    if path is None:
        return _check_postgres(url, definitions, beside)
    if path == MEMORY:
        raise ConfigError(f"database {Url(url)!r} is in memory and has no table: name a file")
    session = SqliteSession(str(Path(path)), read_only=True)
    session.connect()
    try:
        mapped = [each for each in definitions if each.maps("sqlite") or each.sources("sqlite")]

        def declare(definition: StreamDefinition) -> Sequence[str]:
            table = table_of(definition)
            warnings = table.declare(session, may_create=False)
            table.check_ids(session, [*definitions, *beside])
            return warnings

        return [_find(each, declare) for each in mapped]
    finally:
        session.close()


def install_trigger(url: str | Url, definitions: Sequence[StreamDefinition], *, remove: bool = False) -> list[str]:
    """Install, or remove, the transaction ID trigger on the streams' tables; returns their names.

    All tables are changed, or none and StoreError is raised.  ConfigError on SQLite, which needs no trigger.
    """
    if path_of(url) is not None:
        raise ConfigError("on SQLite there is nothing to install or remove: mapped streams work as they are")
    with _postgres_session(url) as session:
        from replication.storage.names import quoted  # noqa: PLC0415
        from replication.storage.postgres import transaction_id_trigger as trigger  # noqa: PLC0415 - imports psycopg

        tables = sorted({each.table for each in definitions if each.table is not None})
        (trigger.remove if remove else trigger.install)(session, [quoted(each) for each in tables])
    return tables


def _check_postgres(
    url: str | Url, definitions: Sequence[StreamDefinition], beside: Sequence[StreamDefinition]
) -> list[Finding]:
    with _postgres_session(url) as session:
        from replication.storage.postgres.checks import refuse_shared, rows_above_sequence  # noqa: PLC0415
        from replication.storage.postgres.ids import check_sequence, read_last_value  # noqa: PLC0415 - imports psycopg
        from replication.storage.postgres.joined import table_of  # noqa: PLC0415

        def declare(definition: StreamDefinition) -> Sequence[str]:
            table = table_of(definition)
            warnings = table.declare(session, may_create=False)
            table.check_ids(session, [*definitions, *beside])
            check_sequence(session, table)
            refuse_shared(table, [*definitions, *beside])
            last_value = {} if definition.shares else {table: read_last_value(session, table.sequence)}
            return [*warnings, *rows_above_sequence(session, last_value).values()]

        return [_find(each, declare) for each in definitions if each.maps("postgresql") or each.sources("postgresql")]


def _find(definition: StreamDefinition, declare: Callable[[StreamDefinition], Sequence[str]]) -> Finding:
    try:
        return Finding(definition.name, None, declare(definition))
    except SchemaError as error:
        return Finding(definition.name, str(error), ())


@contextmanager
def _postgres_session(url: str | Url) -> Iterator[PostgresSession]:
    try:
        from replication.storage.postgres.address import Address  # noqa: PLC0415
        from replication.storage.postgres.holder import Holder  # noqa: PLC0415
        from replication.storage.postgres.session import PostgresSession  # noqa: PLC0415
    except ImportError as error:
        raise needs_psycopg(error) from error
    session = PostgresSession(Address.parse(url), Event(), Holder(), {"row_security": "off"})
    try:
        yield session
    finally:
        session.close()
