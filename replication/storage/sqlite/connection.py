"""The package's own tables in an SQLite file, and commits.  Everything here blocks."""

from __future__ import annotations

import json
import sqlite3
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from replication.errors import SchemaError, StoreError
from replication.storage.connection import POSITIONS, SqlConnection
from replication.storage.contract import Batch, CopiedError, ReceiptTakenError, moved, refuse_another_writer
from replication.storage.migrations import check_version, installed, upgrade
from replication.storage.receipts import DELETED_AT_ONCE
from replication.storage.sqlite.claim import claimed
from replication.storage.sqlite.commits import VERSION, KnownCommits
from replication.storage.sqlite.files import MOVED, DatabaseFiles, watched
from replication.storage.sqlite.session import MEMORY, SqliteSession
from replication.storage.tables.kept_facts import CREATE as CREATE_GONE
from replication.storage.tables.kept_facts import lower_gone, put_gone
from replication.storage.tables.skipped_facts import store_skipped
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from replication.errors import CommitsLostError
    from replication.storage.interactions import Interaction
    from replication.storage.sqlite.generic import Table
    from replication.storage.sqlite.mapped import MappedTable
    from replication.streams.definitions import StreamDefinition
    from replication.streams.interfaces import Write

    Positions = dict[tuple[StreamName, InstanceName], tuple[int, Token]]  # the table's sign, and the token

STEPS: Final = (
    (
        """
        CREATE TABLE IF NOT EXISTS stream_positions (
            stream_name TEXT NOT NULL, instance_name TEXT NOT NULL, stream_id INTEGER NOT NULL,
            PRIMARY KEY (stream_name, instance_name)
        ) WITHOUT ROWID
        """,
        # A Synapse has this table, and both use it.  A table of this name with other columns is refused here.
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
    (CREATE_GONE,),  # taken by the first deletion: until then, older programs can use the database
)
ON_DEMAND: Final = 1  # steps

HAS_SCHEMA: Final = "SELECT 1 FROM sqlite_master WHERE name = 'replication_schema'"
# Temporary tables, which SQLite finds first, with the name of another table.  Usually there are none.
HIDDEN: Final = (
    "SELECT hiding.name FROM sqlite_temp_master AS hiding CROSS JOIN sqlite_master AS hidden "
    "ON hidden.name = hiding.name COLLATE NOCASE WHERE hiding.type IN ('table', 'view') LIMIT 1"
)
TOUCH: Final = "UPDATE replication_schema SET version = -version"
HAS_WRITERS: Final = "SELECT 1 FROM pragma_table_info(?) WHERE name = 'instance_name'"
OF_ANOTHER: Final = (
    "WHERE instance_name IN (SELECT instance_name FROM stream_positions WHERE stream_name = ?) "
    "AND instance_name <> ? LIMIT 1"
)
POSITION: Final = "SELECT stream_id FROM stream_positions WHERE stream_name = ? AND instance_name = ?"
PUT_POSITION: Final = (
    "INSERT INTO stream_positions (stream_name, instance_name, stream_id) VALUES (?, ?, ?) "
    "ON CONFLICT (stream_name, instance_name) DO UPDATE SET stream_id = "
)
RAISE_POSITION: Final = {
    1: PUT_POSITION + "max(stream_id, excluded.stream_id)",
    -1: PUT_POSITION + "min(stream_id, excluded.stream_id)",
}
MOVE_POSITION: Final = (
    "UPDATE stream_positions SET stream_id = ? WHERE stream_name = ? AND instance_name = ? AND stream_id = ?"
)
SET_POSITION: Final = PUT_POSITION + "excluded.stream_id"
# Deletes the receipt of a key if it is old, and a limited number of other old ones; the + lets IN choose the index.
DELETE_RECEIPTS: Final = (
    "DELETE FROM append_receipts WHERE +written_at <= ? AND key IN (SELECT ? UNION ALL SELECT * FROM "  # noqa: S608 - a number
    f"(SELECT key FROM append_receipts WHERE written_at <= ? LIMIT {DELETED_AT_ONCE}))"
)
SHARED_TIME: Final = 0.01  # seconds after which interactions that share a transaction are committed
ADD_RECEIPT: Final = "INSERT INTO append_receipts (key, tokens, written_at) VALUES (?, ?, ?)"


class SqliteConnection(SqlConnection[SqliteSession]):
    """One connection to the file ``path``, or to a database of its own in memory; ``on_lost`` is of KnownCommits."""

    MARK = "?"
    SCHEMA = len(STEPS)
    ELEMENTS = "SELECT value FROM json_each(?)"
    SNAPSHOT = "DEFERRED"
    OWN = "IMMEDIATE"

    def __init__(
        self,
        path: str,
        *,
        read_only: bool,
        busy_timeout: float,
        foreign: bool = False,
        on_lost: Callable[[CommitsLostError], object] = lambda _: None,
    ) -> None:
        super().__init__(SqliteSession(path, read_only=read_only, busy_timeout=busy_timeout), read_only=read_only)
        self.known = KnownCommits(on_lost)
        self._foreign = foreign
        self._file: tuple[int, int] | None = None  # device and inode
        self._files: DatabaseFiles | None = None  # of a file that this connection writes
        self._synchronous = True  # whether the present transaction is
        self._unsynced = True  # whether a commit may not be on the disk, perhaps one of an earlier process
        self._sync_lock = Lock()  # from an asynchronous COMMIT until it is noted
        self._syncing = Lock()  # during a sync: a second one must not return before the first
        self._held = ExitStack()

    def open(self) -> None:
        """Connect; a connection that may write claims the file before, and upgrades the tables."""
        path, descriptor = self.session.name, None
        if not self._read_only and path not in ("", MEMORY):
            descriptor = self._held.enter_context(claimed(path))
        self.session.connect()
        with self.naming():
            self._set_up()
        if descriptor is not None:
            self._files = self._held.enter_context(watched(path, descriptor))
        self._file = self._identity()

    def close(self) -> None:
        """End the session, then the claim."""
        super().close()
        self._held.close()

    # ---- reading

    def applied_positions(self, stream: StreamName, follower: InstanceName) -> dict[InstanceName, Token]:
        """Return the stored positions of one stream; StoreError if they are those of a copy, not of a function."""
        positions = {InstanceName(writer): Token(token) for writer, token in self.session.run(POSITIONS, (stream,))}
        table = f"stream_{stream}"
        copied = f'SELECT 1 FROM "{table}" {OF_ANOTHER}'  # noqa: S608 - a name of a StreamDefinition, in quotes
        if positions and self.session.run(HAS_WRITERS, (table,)) and self.session.run(copied, (stream, follower)):
            raise CopiedError(
                f"database {self.session.name!r}: stream {stream!r} was copied here, so its positions are those of the "
                f"copy, and a function would miss facts: give {follower!r} a database of its own; or, to apply only "
                f'what follows these positions, stop it and DROP TABLE "{table}"'
            )
        return positions

    def poll(self, tables: Sequence[Table], known: int | None) -> tuple[int, dict[StreamName, Token | StoreError]]:
        """Return the file's version and, if that is not ``known``, the last ID of each table, or its error."""
        ((version,),) = self.session.run(VERSION)
        if version == known:
            return version, {}
        last = {each.definition.name: self._last_id(each) for each in tables}
        return version, {stream: token for stream, token in last.items() if token is not None}

    def _last_id(self, table: Table) -> Token | StoreError | None:
        try:
            return table.last_id(self.session)
        except StoreError as error:
            if getattr(error.__cause__, "sqlite_errorname", "SQLITE_ERROR") != "SQLITE_ERROR":
                raise  # an error of the file, such as SQLITE_IOERR, concerns all tables
            return error

    # ---- writing

    def claim_tables(self, definitions: Sequence[StreamDefinition], instance: InstanceName) -> None:
        """Store a first position for the writer of mapped tables; StoreError if another writer has one."""
        with self.exclusive():
            for definition in definitions:
                writers = [writer for writer, _ in self.session.run(POSITIONS, (definition.name,))]
                if instance not in writers:
                    refuse_another_writer(definition, instance, writers)
                    self.session.run(SET_POSITION, (definition.name, instance, 0))

    def move_forward(self, table: MappedTable) -> list[str]:
        """Let the next ID of a table be above each that was published; return a warning."""
        with self.exclusive():
            self.known.check(self.session)  # a restored backup has smaller IDs, too
            return table.move_forward(self.session)

    def commit(self, batch: Batch) -> None:
        """Store a batch with all earlier statements; if that fails, undo all of it."""
        try:
            self._begin(synchronous=batch.synchronous)
            self._store(batch, changes_before=self.session.changes_before)
            self._commit()
        except BaseException:
            self.rollback()
            raise
        self.known.note([batch])
        self.commits += 1
        self.transactions += 1

    def commit_together(self, batches: Sequence[Batch]) -> list[Exception | None]:
        """Store batches in one transaction, and return the outcome of each, None for success.

        If one fails, each half of them is tried by itself, and so on: a batch fails alone.  Nothing is tried again
        after a COMMIT that failed, because its outcome on the disk is unknown.  The positions of a group of writers are
        stored at its end: each once, not with each fact.
        """
        try:
            self._begin(synchronous=any(each.synchronous for each in batches))
        except StoreError as error:
            return [error] * len(batches)
        of_writers = not any(write.expected is not None or write.reset for each in batches for _, write in each.writes)
        positions: Positions = {}
        try:
            for batch in batches:
                self._store(batch, positions if of_writers else None)
            self._raise(positions)
        except Exception as error:  # noqa: BLE001 - the caller of that batch receives it
            self.rollback()
            if len(batches) == 1:
                return [error]
            half = len(batches) // 2
            return self.commit_together(batches[:half]) + self.commit_together(batches[half:])
        try:
            self._commit()
        except StoreError as error:
            self.rollback()
            return [error] * len(batches)
        self.known.note(batches)
        self.commits += len(batches)
        self.transactions += 1
        return [None] * len(batches)

    def interact_together(self, interactions: Sequence[Interaction]) -> list[BaseException | None]:
        """Run interactions in one transaction, and return the outcome of each, None for success.

        Each is behind a savepoint, so one that fails is undone alone.  After SHARED_TIME the transaction is committed,
        and the outcomes are those of the first interactions only: the others have not begun.
        """
        failed: dict[int, BaseException] = {}  # by index
        batches: list[Batch] | None = None
        positions: Positions = {}
        try:
            while batches is None:
                positions.clear()
                self._begin()
                batches, end = self._interact(interactions, failed, positions)
            if not batches:
                self.rollback()
                return [failed[index] for index in range(end)]
            self._raise(positions)
            self._commit()
        except StoreError as error:
            self.rollback()
            return [failed.get(index, error) for index in range(len(interactions))]
        self.known.note(batches)
        self.commits += len(batches)
        self.transactions += 1
        return [failed.get(index) for index in range(end)]

    def check(self) -> None:
        """Raise StoreError unless the file is in its place and can be written: a commit proves it."""
        if self._file != self._identity():
            raise StoreError(f"database {self.session.name!r} {MOVED}")
        if self._read_only:
            installed(self.session.run)
            return
        try:
            self._begin()
            for _ in range(2):  # SQLite writes no page whose bytes stay the same
                self.session.run(TOUCH)
            self._commit()
        finally:
            self.rollback()

    def sync(self, *, foreign: bool = False) -> None:
        """Return once every commit that a reader may see is on the disk; any thread may call it.

        With ``foreign``, other processes may have committed, too.
        """
        with self._syncing:
            with self._sync_lock:
                unsynced, self._unsynced = self._unsynced or foreign, False
            if unsynced and self._files is not None:
                try:
                    self._files.sync()
                except StoreError:
                    self._unsynced = True
                    raise

    def check_places(self) -> None:
        """Raise StoreError if a file of the database was exchanged or deleted; any thread may call it."""
        if self._files is not None:
            self._files.check_places()

    def verify(self) -> None:
        """Raise CommitsLostError if the database has lost commits of this process."""
        if not self.session.begun:
            self.session.begin("DEFERRED")
            try:
                self.known.check(self.session)
            finally:
                self.rollback()

    def forget_histories(self, writer: InstanceName, streams: Collection[StreamName], follower: str) -> None:
        """Forget histories that are changed now; CommitsLostError if the database has lost commits of this process."""
        self.verify()
        self.known.forget_histories(writer, streams, follower)

    # ---- inside

    def _declare(self, tables: Sequence[Table], beside: list[StreamDefinition]) -> list[str]:
        warnings = list[str]()
        with self.exclusive():
            missing = [each for each in tables if each.is_missing(self.session)]
            for table in tables:
                warnings += table.declare(self.session, may_create=True)
                table.check_ids(self.session, beside)
                beside.append(table.definition)
            return warnings + self._mark_missing(missing)

    def _interact(
        self, interactions: Sequence[Interaction], failed: dict[int, BaseException], positions: Positions
    ) -> tuple[list[Batch] | None, int]:
        """Run those that have not failed, and return what they have stored, and the index at which the time was over.

        None: an error made SQLite undo the whole transaction, so all but those that ``failed`` must run again.
        ``positions`` are for the end.  That of an interaction that fails may be among them: its ID is complete, too.
        """
        batches: list[Batch] = []
        run, end = self.session.run, len(interactions)
        shared, since = end > 1, monotonic()
        for index, each in enumerate(interactions):
            if index in failed:
                continue
            if shared:
                run("SAVEPOINT interaction")
            try:
                before = self.session.database.total_changes
                batch = each.run(self.session)
                self._store(batch, positions, changes_before=before)
            except BaseException as error:  # noqa: BLE001 - the caller of that interaction receives it
                failed[index] = error
                if not self.session.database.in_transaction:
                    self.session.rollback()
                    return None, 0
                if shared:
                    run("ROLLBACK TO interaction")
            else:
                batches.append(batch)
            if shared:
                run("RELEASE interaction")
                if monotonic() - since > SHARED_TIME:
                    end = index + 1
                    break
        return batches, end

    def _begin(self, *, synchronous: bool = True) -> None:
        if not self.session.begun:
            self.session.begin(synchronous=synchronous)
            self._synchronous = synchronous
            if self._files is not None:
                try:
                    self._files.check_sizes()
                    self.known.check(self.session)
                except StoreError:
                    self.rollback()
                    raise

    def _commit(self) -> None:
        if self._synchronous:
            self.session.commit()
        else:
            with self._sync_lock:
                self.session.commit()
                self._unsynced = True
        if self._files is not None:
            self._files.check_commit()
        if self._synchronous:
            self.sync()  # earlier commits, too: SQLite does not report every error of the disk

    def _set_up(self) -> None:
        run = self.session.run
        try:
            if self._foreign and not run(HAS_SCHEMA):
                return
            if self._read_only:
                check_version(installed(run), len(STEPS), ON_DEMAND)
            else:
                upgrade(run, self.exclusive, STEPS, on_demand=ON_DEMAND)
        except StoreError as error:
            cause = error.__cause__
            if not isinstance(cause, sqlite3.OperationalError) or cause.sqlite_errorname != "SQLITE_ERROR":
                raise
            raise SchemaError(f"its tables are not ours: {cause}") from error
        if not self._read_only:  # not earlier: a file that is refused stays as it is
            ((mode,),) = run("PRAGMA journal_mode = WAL")
            if mode not in ("wal", "memory"):
                raise StoreError(f"database {self.session.name!r} cannot have a WAL: keep it on a local disk")
            installed(run)  # a new WAL is made by the first statement that reads
            # If the disk refused a part of the WAL, and its process was killed, only the kernel's memory has that part.
            run("PRAGMA wal_checkpoint(PASSIVE)")

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = Path(self.session.name).stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _store(self, batch: Batch, positions: Positions | None = None, *, changes_before: int | None = None) -> None:
        """Store a batch; with ``positions``, its positions are noted there, to be stored later.

        ``changes_before`` is the number of changed rows before the statements of the application, if it had any.
        """
        changes = self.session.database.total_changes
        self.session.application_wrote = changes_before not in (None, changes)
        if changes_before is not None and (hidden := self.session.run(HIDDEN)):
            raise StoreError(
                f"database {self.session.name!r}: the temporary table {hidden[0][0]!r} hides the table of this name: "
                "give it another name"
            )
        for table, write in batch.writes:
            noted = {} if positions is None or write.expected is not None or write.reset else positions
            self._write(table, write, noted)
            if noted is not positions:
                self._raise(noted)
            if write.skipped or write.reset:
                store_skipped(self.session, write, batch.now)
                lower_gone(self.session, write)
            if write.gone is not None:
                put_gone(self.session, write.stream, write.writer, write.gone, self.SCHEMA)
            if write.counts is not None:
                self._put_counts(write)
        if batch.receipt is not None:
            receipt: tuple[Any, ...] = (batch.receipt.key, json.dumps([*batch.receipt.tokens]), batch.now)
            self.session.run(DELETE_RECEIPTS, (batch.expired, batch.receipt.key, batch.expired))
            try:
                self.session.run(ADD_RECEIPT, receipt)
            except StoreError as error:
                if isinstance(error.__cause__, sqlite3.IntegrityError):
                    raise ReceiptTakenError(self.session.name) from error.__cause__
                raise

    def _raise(self, positions: Positions) -> None:
        for key, (sign, upto) in positions.items():
            self.session.run(RAISE_POSITION[sign], (*key, sign * upto))

    def _write(self, table: Table, write: Write, positions: Positions) -> None:
        session, sign, upto = self.session, table.direction.sign, write.upto
        key = (write.stream, write.writer)
        if write.expected is not None:
            moves = not (write.reset or write.facts)  # the usual write of a function: one statement does it
            if moves and session.change(MOVE_POSITION, (sign * max(upto, write.expected), *key, sign * write.expected)):
                return
            stored = next((sign * stream_id for (stream_id,) in session.run(POSITION, key)), 0)
            if stored != write.expected:
                raise moved(write, Token(stored))
        if write.reset:
            table.delete(session, write.writer, upto)
            session.run(SET_POSITION, (*key, sign * upto))
        if write.facts:
            table.insert(session, [(write.writer, write.facts)])
            upto = max([upto, *[token for token, texts in write.facts if not texts]])  # these leave no row
        _, noted = positions.get(key, (sign, upto))
        positions[key] = sign, max(upto, noted)
