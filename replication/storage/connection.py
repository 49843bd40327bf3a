"""One SQLite connection: everything that blocks.  It lives on one thread; ``sqlite.py`` says who uses it when.

Whatever the database refuses is raised as StoreError and names the file and, where we know one, the cure.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from replication.errors import SchemaError, StoreError, ValueRefusedError
from replication.storage.mapped import refuse_another
from replication.storage.memory import RECEIPT_LIFE, moved
from replication.storage.migrate import check_version, installed, upgrade
from replication.storage.pages import check_limit, gather_positions
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from replication.storage.tables import Batch, Table
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, Page, Write

_T = TypeVar("_T")

MEMORY: Final = ":memory:"

STEPS: Final = (
    (
        """
        CREATE TABLE IF NOT EXISTS stream_positions (
            stream_name TEXT NOT NULL, instance_name TEXT NOT NULL, stream_id INTEGER NOT NULL,
            PRIMARY KEY (stream_name, instance_name)
        ) WITHOUT ROWID
        """,
        # Synapse has a table of that name, and it is one and the same; another one is refused here.
        """
        INSERT INTO stream_positions (stream_name, instance_name, stream_id) SELECT '', '', 0 WHERE 1 = 0
        ON CONFLICT (stream_name, instance_name) DO NOTHING
        """,
        """
        CREATE TABLE append_receipts (
            key TEXT NOT NULL PRIMARY KEY, tokens TEXT NOT NULL, written_at REAL NOT NULL
        ) WITHOUT ROWID
        """,
        "CREATE INDEX append_receipts_written_at ON append_receipts (written_at)",
    ),
)

POSITION: Final = "SELECT stream_id FROM stream_positions WHERE stream_name = ? AND instance_name = ?"
VERSION: Final = "PRAGMA data_version"  # another one after each commit of another connection
POSITIONS: Final = "SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = ?"
STORED: Final = "SELECT stream_name, instance_name, abs(stream_id) FROM stream_positions"
PUT_POSITION: Final = (
    "INSERT INTO stream_positions (stream_name, instance_name, stream_id) VALUES (?, ?, ?) "
    "ON CONFLICT (stream_name, instance_name) DO UPDATE SET stream_id = "
)
RAISE_POSITION: Final = {
    1: PUT_POSITION + "max(stream_id, excluded.stream_id)",
    -1: PUT_POSITION + "min(stream_id, excluded.stream_id)",
}
LOWER_POSITION: Final = PUT_POSITION + "excluded.stream_id"
FORGET_RECEIPTS: Final = "DELETE FROM append_receipts WHERE written_at <= ?"
ADD_RECEIPT: Final = "INSERT INTO append_receipts (key, tokens, written_at) VALUES (?, ?, ?)"
RECEIPT: Final = "SELECT tokens FROM append_receipts WHERE key = ? AND written_at > ?"

# What else the driver raises about a value that it cannot store.
REFUSALS: Final = (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeEncodeError)

# What no later attempt can mend.  A key may be free then.
_OF_VALUES: Final = ("SQLITE_CONSTRAINT_CHECK", "SQLITE_CONSTRAINT_NOTNULL", "SQLITE_MISMATCH")

CURES: Final = {
    "SQLITE_BUSY": "another process holds its lock: stop that, or wait for it",
    "SQLITE_CANTOPEN": "does its folder exist, and may this process write there?",
    "SQLITE_CORRUPT": "restore it from a backup",
    "SQLITE_FULL": "make room on the disk",
    "SQLITE_IOERR": "the disk fails: see the system's log",
    "SQLITE_NOTADB": "give the path of another file, or move this one away",
    "SQLITE_READONLY": "make the file and its folder writable for this process",
}


class SqliteStatements:
    """A connection to a function that runs on its thread; what the driver raises is for the caller to say better."""

    dialect = "sqlite"

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        return self._database.execute(sql, parameters).fetchall()

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        self._database.executemany(sql, parameters)


class SqliteConnection:
    """One connection to the file ``path``, or to a memory database of its own."""

    def __init__(self, path: str, *, read_only: bool, busy_timeout: float) -> None:
        self.path = path
        self.commits = 0  # batches that became durable
        self.transactions = 0  # that took them
        self._read_only = read_only
        self._busy_timeout = busy_timeout
        self._begun = False
        self._file: tuple[int, int] | None = None  # device and inode
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Connect; a connection that writes brings our own tables up to date."""
        with self._refusals():
            self._connect()
            self._set_up()

    def close(self) -> None:
        """Let go of the file."""
        if self._database is not None:
            self._database.close()
            self._database = None

    # ---- reading

    def positions(self, table: Table) -> dict[InstanceName, Token]:
        """Return, per writer, the largest token that was committed or stored as a position."""
        with self._refusals():
            sign = table.direction.sign
            stored = {
                InstanceName(writer): Token(sign * stream_id)
                for writer, stream_id in self._run(POSITIONS, (table.definition.name,))
            }
            newest = table.newest(self._opened, stored)
        return {
            writer: max(stored.get(writer, Token(0)), newest.get(writer, Token(0))) for writer in {**stored, **newest}
        }

    def applied(self, stream: StreamName) -> dict[InstanceName, Token]:
        """Return the positions of one stream as they were stored."""
        with self._refusals():
            return {InstanceName(writer): Token(token) for writer, token in self._run(POSITIONS, (stream,))}

    def stored(self) -> dict[StreamName, dict[InstanceName, Token]]:
        """Return all positions that were stored."""
        with self._refusals():
            return gather_positions(self._run(STORED))

    def look(self, tables: Sequence[Table], known: int | None) -> tuple[int, dict[StreamName, Token]]:
        """Return the version of what others have made of the file, and if it is not ``known``, all last IDs."""
        with self._refusals():
            ((version,),) = self._run(VERSION)
            if version == known:
                return version, {}
            last = {each.definition.name: each.last_id(self._opened) for each in tables}
        return version, {stream: token for stream, token in last.items() if token is not None}

    def page(self, table: Table, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page as ``IStreamStore.facts`` does."""
        check_limit(limit)
        with self._refusals():
            return table.rows(self._opened, writer, after=after, upto=upto, limit=limit).page()

    def recall(self, key: str, now: float) -> list[Token] | None:
        """Return the tokens of a receipt of the day before ``now``."""
        with self._refusals():
            for (tokens,) in self._run(RECEIPT, (key, now - RECEIPT_LIFE)):
                return [Token(each) for each in json.loads(tokens)]
        return None

    def read(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` on one snapshot."""
        with self._refusals():
            self._run("BEGIN")
            try:
                return function(SqliteStatements(self._opened))
            finally:
                self._run("ROLLBACK")

    # ---- writing

    def begin_as(self, definition: StreamDefinition, instance: InstanceName) -> None:
        """Note who tells of the rows of a table, or refuse another one; those beside it are followed here."""
        with self._refusals():
            writers = [writer for writer, _ in self._run(POSITIONS, (definition.name,))]
            if instance not in writers:
                refuse_another(definition, instance, writers)
                self._run(LOWER_POSITION, (definition.name, instance, 0))

    def declare(self, table: Table) -> list[str]:
        """Make sure that the stream's table is there; returns warnings."""
        with self._refusals():
            return list(table.declare(self._opened, may_create=not self._read_only))

    def execute(self, sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        """Run a statement of the application, the first one of a transaction after BEGIN."""
        with self._refusals():
            self._begin()
            return self._run(sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run a statement once per item."""
        with self._refusals():
            self._begin()
            self._opened.executemany(sql, parameters)

    def run(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` inside the transaction."""
        with self._refusals():
            self._begin()
            return function(SqliteStatements(self._opened))

    def commit(self, batch: Batch[Table]) -> None:
        """Store a batch with what was executed; if that fails, all of it is undone."""
        try:
            with self._refusals():
                self._begin()
                self._store(batch)
                self._commit()
            self._count(1)
        except BaseException:
            self.rollback()
            raise

    def commit_together(self, batches: Sequence[Batch[Table]]) -> list[Exception | None]:
        """Store batches in one transaction if they all can be, and return what became of each, None for good.

        If some cannot, halves of them are tried in turn, so that who fails fails alone.  Nothing is tried again after a
        COMMIT that failed: then nobody knows what is on the disk.
        """
        try:
            with self._refusals():
                self._begin()
        except StoreError as error:
            return [error] * len(batches)
        try:
            with self._refusals():
                for batch in batches:
                    self._store(batch)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one batch, it is told, and only it
            self.rollback()
            if len(batches) == 1:
                return [error]
            half = len(batches) // 2
            return self.commit_together(batches[:half]) + self.commit_together(batches[half:])
        try:
            with self._refusals():
                self._commit()
        except StoreError as error:
            self.rollback()
            return [error] * len(batches)
        self._count(len(batches))
        return [None] * len(batches)

    def rollback(self) -> None:
        """Undo what was executed since the last commit."""
        self._begun = False
        with self._refusals():
            if self._opened.in_transaction:
                self._run("ROLLBACK")

    def check(self) -> None:
        """Raise StoreError unless the file is where it was and can be written."""
        with self._refusals():
            if self._file != self._identity():
                raise StoreError(f"database {self.path!r} was moved or deleted: restart with the file in its place")
            if self._read_only:
                installed(self._run)
                return
            try:
                self._begin()
                self._run("UPDATE replication_schema SET version = version")
            finally:
                self.rollback()

    # ---- inside

    @property
    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreError(f"database {self.path!r} is not open")
        return self._database

    def _run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return self._opened.execute(sql, parameters).fetchall()  # all, or the statement would hold its snapshot

    def _connect(self) -> None:
        target = f"{Path(self.path).absolute().as_uri()}?mode=ro" if self._read_only else self.path
        self._database = sqlite3.connect(
            target,
            uri=self._read_only,
            timeout=self._busy_timeout,
            isolation_level=None,  # we say BEGIN and COMMIT
            check_same_thread=False,
            cached_statements=512,  # a few for each stream
        )

    def _set_up(self) -> None:
        try:
            if self._read_only:
                check_version(installed(self._run), len(STEPS))
            else:
                upgrade(self._run, self._transaction, STEPS)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_ERROR":
                raise
            raise SchemaError(f"its tables are not ours: {error}") from error
        if not self._read_only:  # only now: a file that we refuse stays as it is
            ((mode,),) = self._run("PRAGMA journal_mode = WAL")
            if mode not in ("wal", "memory"):
                raise StoreError(f"database {self.path!r} cannot have a WAL: keep it on a local disk")
            self._run("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        self._file = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = Path(self.path).stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        except BaseException:
            self.rollback()
            raise
        self._commit()

    def _begin(self) -> None:
        database = self._opened
        if not self._begun:
            database.execute("BEGIN IMMEDIATE")
            self._begun = True
        elif not database.in_transaction:
            raise StoreError(f"database {self.path!r} has undone this transaction after an error: begin another one")

    def _commit(self) -> None:
        self._opened.execute("COMMIT")
        self._begun = False

    def _count(self, batches: int) -> None:
        self.commits += batches
        self.transactions += 1

    def _store(self, batch: Batch[Table]) -> None:
        for table, write in batch.writes:
            self._write(table, write)
        if batch.receipt is not None:
            self._run(FORGET_RECEIPTS, (batch.now - RECEIPT_LIFE,))
            self._run(ADD_RECEIPT, (batch.receipt.key, json.dumps([*batch.receipt.tokens]), batch.now))

    def _write(self, table: Table, write: Write) -> None:
        database, sign, upto = self._opened, table.direction.sign, write.upto
        if write.expected is not None:
            stored = next((sign * place for (place,) in self._run(POSITION, (write.stream, write.writer))), 0)
            if stored != write.expected:
                raise moved(write, Token(stored))
        if write.reset:
            table.delete(database, write.writer, upto)
            database.execute(LOWER_POSITION, (write.stream, write.writer, sign * upto))
        if write.facts:
            table.insert(database, write.writer, write.facts)
            upto = max([upto, *[token for token, texts in write.facts if not texts]])  # no row to remember it by
        database.execute(RAISE_POSITION[sign], (write.stream, write.writer, sign * upto))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except SchemaError as error:
            raise SchemaError(f"database {self.path!r}: {error}") from error
        except REFUSALS as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> StoreError:
        name = getattr(error, "sqlite_errorname", "")
        cure = next((f"; {cure}" for start, cure in CURES.items() if name.startswith(start)), "")
        of_values = isinstance(error, (OverflowError, UnicodeEncodeError)) or name in _OF_VALUES
        return (ValueRefusedError if of_values else StoreError)(f"database {self.path!r}: {error}{cure}")
