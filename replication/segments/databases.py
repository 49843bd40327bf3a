"""The databases that the replay reads, SQLite and PostgreSQL, opened read-only; all calls block."""

from __future__ import annotations

from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from replication.errors import ConfigError, StoreError, install_command
from replication.storage.names import quoted, relation_name
from replication.storage.postgres.options import (
    CURES_BY_WORDS,
    ESCAPE,
    may_quote_password,
    missing_options,
    splits_password,
)
from replication.storage.sqlite.joined import table_of
from replication.storage.sqlite.session import SqliteSession
from replication.urls import Url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from replication.storage.pages import Rows
    from replication.storage.postgres.session import PostgresSession
    from replication.streams.definitions import Dialect, StreamDefinition
    from replication.wire.grammar import InstanceName, StreamName, Token

FORMS: Final = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host:port/database"
LOCK_TIMEOUT: Final = 30  # seconds that SQLite waits for a lock of another process
BATCH_ROWS: Final = 16_384  # of a batch from SQLite, 2 MiB of usual rows; fewer if a range has rows of many KiB
MAX_BATCH_BYTES: Final = 256 * 2**20  # about, of such a batch; a smaller file is not measured
JOINED_BYTES: Final = 4 * 2**20  # smaller batches are joined
BATCH_BYTES: Final = 4 * 2**20  # of a batch from PostgreSQL
HAS_POSITIONS: Final[Mapping[Dialect, str]] = {
    "sqlite": "SELECT 1 FROM sqlite_master WHERE name = 'stream_positions'",
    "postgresql": "SELECT 1 WHERE to_regclass('stream_positions') IS NOT NULL",
}
# Rows come in the order of the index: to sort a million rows takes longer and needs memory of the server.
# jit is off because the compiler takes longer than it saves in a session with a single statement.
SETTINGS: Final = ("default_transaction_read_only = on", "enable_sort = off", "enable_bitmapscan = off", "jit = off")

NOTHING_HIDDEN: Final = "row_security"  # if off, a query that a policy hides rows from fails, and does not lack them


class IPages(Protocol):
    """A function that reads pages of a mapped or joined stream."""

    def __call__(self, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page as ``IStreamStore.facts`` does, but as columns."""
        ...


def resolve_url(url: str | Url) -> Url:
    """Return ``url`` with an absolute path, valid in every process; ConfigError if it is not a database's URL."""
    url = Url(url)
    scheme, _, rest = url.reveal().partition("://")
    if scheme == "postgresql" and rest:
        if splits_password(url.reveal()):
            raise ConfigError(f"database {url!r} is not a URL of PostgreSQL: {ESCAPE}")
        return url
    if scheme == "sqlite" and rest.startswith("/") and rest != "/" and "?" not in rest:
        return Url(f"sqlite:///{Path(rest[1:]).absolute()}")
    raise ConfigError(f"database {url!r}: give {FORMS}")


def open_database(url: str | Url) -> Database:
    """Open the database at a resolved URL; StoreError if that fails."""
    url = Url(url)
    return SqliteDatabase(url) if url.startswith("sqlite:") else PostgresDatabase(url)


def read_positions(database: Database) -> list[tuple[StreamName, InstanceName, int]] | None:
    """Return stream, writer and stored position of all writers; the position is negative if the table counts downwards.

    A writer stores with its facts a position up to which every ID of its own is complete.  None if there is no table of
    positions, because no writer has used the database.
    """
    if not database.rows(HAS_POSITIONS[database.dialect]):
        return None
    return database.rows(
        "SELECT stream_name, instance_name, stream_id FROM stream_positions WHERE instance_name <> '' ORDER BY 1, 2"
    )


class SqliteDatabase:
    """An SQLite file, read with the standard library's driver and with ADBC; each StoreError names it."""

    dialect: Dialect = "sqlite"

    def __init__(self, url: Url) -> None:
        self.url = url
        path = Path(url.reveal().removeprefix("sqlite:///"))
        try:
            found = path.is_file()
        except OSError as error:  # of a folder above it
            raise StoreError(f"database {url!r}: {error.strerror}") from error
        if not found:
            raise StoreError(f"database {url!r}: there is no such file")
        self._target = f"{path.as_uri()}?mode=ro"
        self._session = SqliteSession(str(path), read_only=True, busy_timeout=LOCK_TIMEOUT)
        self._session.connect()

    def generic_table(self, definition: StreamDefinition) -> str:
        """Return the quoted name of a stream's generic table."""
        return f'"stream_{definition.name}"'

    def pages(self, definition: StreamDefinition) -> IPages:
        """Return the function that reads a mapped or joined stream; SchemaError if its tables do not fit."""
        table = table_of(definition)
        table.declare(self._session, may_create=False)
        return partial(table.rows, self._session)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._session.run(sql)

    def batches(self, sql: str, longest: str = "") -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query as Arrow batches, none of them empty.

        ADBC takes a column's type from the first batch, so no column may be NULL there.  It counts the rows of a batch,
        not the bytes: ``longest`` is the query for the bytes of a row that is as long as most.
        """
        from adbc_driver_sqlite import dbapi  # noqa: PLC0415 (an extra)

        rows = self._batch_rows(longest) if longest else BATCH_ROWS
        with _errors_of(self.url), closing(dbapi.connect(self._target)) as connection:
            batches = _batches(
                connection,
                [f"PRAGMA busy_timeout = {LOCK_TIMEOUT * 1000}"],
                {"adbc.sqlite.query.batch_rows": str(rows)},
                sql,
            )
            yield from batches if rows == BATCH_ROWS else _join(batches)

    def _batch_rows(self, longest: str) -> int:
        """Return how many rows a batch may have, if ``longest`` is the query for the bytes of a long row."""
        ((size,),) = self.rows("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        if size <= MAX_BATCH_BYTES:
            return BATCH_ROWS
        ((most,),) = self.rows(longest)
        return max(min(BATCH_ROWS, MAX_BATCH_BYTES // max(most or 0, 1)), 1)

    def close(self) -> None:
        """Close the file."""
        self._session.close()


class PostgresDatabase:
    """A PostgreSQL database, read with ADBC; mapped and joined streams are read with psycopg."""

    dialect: Dialect = "postgresql"

    def __init__(self, url: Url) -> None:
        self.url = url
        self._session: PostgresSession | None = None
        try:
            from adbc_driver_manager import AdbcConnection, dbapi  # noqa: PLC0415 (an extra)

            with _errors_of(self.url):
                server = _server_at(url)
                self._connection = dbapi.Connection(server, AdbcConnection(server.database), autocommit=True)
                with closing(self._connection.cursor()) as cursor:
                    cursor.execute(f"SET {NOTHING_HIDDEN} = off")
        except ImportError as error:
            raise ConfigError(f"history in PostgreSQL needs {error.name}: {install_command('segments')}") from error

    def generic_table(self, definition: StreamDefinition) -> str:
        """Return the quoted name, cut to PostgreSQL's limit."""
        return quoted(relation_name(definition.name))

    def pages(self, definition: StreamDefinition) -> IPages:
        """Return the function as SqliteDatabase does; it reads on a session of its own."""
        try:
            from replication.storage.postgres import address, holder, joined, session  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise ConfigError(
                f"mapped tables in PostgreSQL need {error.name}: {install_command('postgres')}"
            ) from error
        if self._session is None:
            where = address.Address.parse(self.url)
            settings = {"default_transaction_read_only": "on", NOTHING_HIDDEN: "off"}
            self._session = session.PostgresSession(where, Event(), holder.Holder(), settings)
        table = joined.table_of(definition)
        table.declare(self._session, may_create=False)
        return partial(table.rows, self._session)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with _errors_of(self.url), closing(self._connection.cursor()) as cursor:
            cursor.execute(sql)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def batches(self, sql: str, longest: str = "") -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield batches as SqliteDatabase does; ADBC uses COPY in binary format, and counts bytes, not rows."""
        with _errors_of(self.url):
            settings = [f"SET {each}" for each in SETTINGS]
            yield from _batches(
                self._connection, settings, {"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)}, sql
            )

    def close(self) -> None:
        """Close both sessions."""
        self._connection.close()
        if self._session is not None:
            self._session.close()


class _Server(msgspec.Struct, frozen=True):
    """ADBC's handle of one server, which keeps no session, so it survives a restart of the server."""

    database: Any

    def close(self) -> None:
        """Keep the handle when a connection closes."""


@cache
def _server_at(url: Url) -> _Server:
    """Return the handle for ``url``, made once per process: making it reads the server's types, which is slow."""
    from adbc_driver_postgresql import connect  # noqa: PLC0415 (an extra)

    return _Server(connect(_with_options(url.reveal())))


def _with_options(url: str) -> str:
    """Return a URL with the ``missing_options``: a call of ADBC that waits ignores Ctrl-C."""
    before, _, query = url.partition("?")
    given = dict(parse_qsl(query))
    hosts = given.get("host") or before.rpartition("@")[2].removeprefix("postgresql://").partition("/")[0]
    added = [f"{name}={value}" for name, value in missing_options(given, hosts).items()]
    return f"{before}?{'&'.join([*filter(None, [query]), *added])}"


def _batches(connection: Any, settings: list[str], options: dict[str, str], sql: str) -> Iterator[pa.RecordBatch]:
    for statement in settings:
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement)
    with closing(connection.cursor()) as cursor:
        cursor.adbc_statement.set_options(**options)
        cursor.execute(sql)
        yield from (batch for batch in cursor.fetch_record_batch() if batch.num_rows)


def _join(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches that are large enough to be processed fast."""
    import pyarrow as pa  # noqa: PLC0415 (an extra)

    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in chain(batches, [None]):
        if batch is not None:
            waiting.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
        if waiting and (batch is None or rows >= BATCH_ROWS or size >= JOINED_BYTES):
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, rows, size = [], 0, 0


@contextmanager
def _errors_of(url: Url) -> Iterator[None]:
    """Raise a driver's error as StoreError; DB-API calls the common class of a driver's errors Error."""
    try:
        yield
    except Exception as error:
        if not any(each.__name__ == "Error" for each in type(error).__mro__):
            raise
        why = str(error).partition("\n")[0]
        wrong_form = "URI query parameter" in why and may_quote_password(url.reveal())
        why = ESCAPE if wrong_form else url.hide_in(why)
        cures = [cure for words, cure in CURES_BY_WORDS.items() if words in why]
        raise StoreError("; ".join([f"database {url!r}: {why}", *cures])) from error


Database: TypeAlias = SqliteDatabase | PostgresDatabase
