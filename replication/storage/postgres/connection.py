"""The package's own tables in PostgreSQL, and commits.  Everything here blocks."""

# ruff: noqa: S608 - the names of tables and columns in SQL are constants

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from psycopg import errors

from replication.errors import CommitsLostError, SchemaError, StoreError
from replication.storage.connection import POSITIONS, SqlConnection
from replication.storage.contract import Batch, moved, refuse_another_writer
from replication.storage.generic import newest_of
from replication.storage.migrations import LOCK, check_version, hint_at_synapse, installed, upgrade
from replication.storage.names import quoted
from replication.storage.postgres.generic import GenericTable, Table
from replication.storage.postgres.holder import DELETE_MARKS, MARKS
from replication.storage.postgres.ids import (
    CLAIMS,
    STATES,
    Allocations,
    create_sequence,
    move_forward,
    prepare_sequence,
    read_last_value,
)
from replication.storage.postgres.sequence_locks import BLOCKERS
from replication.storage.postgres.session import AFTER_OTHERS, OutcomeUnknownError, PostgresSession, SessionLostError
from replication.storage.receipts import DELETED_AT_ONCE
from replication.storage.tables.kept_facts import CREATE as CREATE_GONE
from replication.storage.tables.kept_facts import lower_gone, put_gone
from replication.storage.tables.skipped_facts import store_skipped
from replication.streams.interfaces import Page
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.storage.contract import WrittenFact
    from replication.storage.interactions import Interaction
    from replication.streams.definitions import StreamDefinition
    from replication.streams.interfaces import IAllocation, Write

STEPS: Final = (
    (
        """
        CREATE TABLE IF NOT EXISTS stream_positions (
            stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL,
            PRIMARY KEY (stream_name, instance_name)
        )
        """,
        # A Synapse has this table, and both use it.  A table of this name with other columns is refused here.
        """
        INSERT INTO stream_positions (stream_name, instance_name, stream_id) SELECT '', '', 0 WHERE 1 = 0
        ON CONFLICT (stream_name, instance_name) DO NOTHING
        """,
        """
        CREATE TABLE append_receipts (
            key text NOT NULL PRIMARY KEY, tokens text NOT NULL, written_at double precision NOT NULL
        )
        """,
        "CREATE INDEX append_receipts_written_at ON append_receipts (written_at)",
        """
        CREATE TABLE writer_claims (
            instance_name text NOT NULL, holder text NOT NULL, number bigint NOT NULL,
            PRIMARY KEY (instance_name, holder)
        )
        """,
        MARKS,
        """
        CREATE TABLE follower_positions (
            follower_name text NOT NULL, stream_name text NOT NULL, instance_name text NOT NULL,
            stream_id bigint NOT NULL, PRIMARY KEY (follower_name, stream_name, instance_name)
        )
        """,
        "CREATE TABLE stream_copies (stream_name text NOT NULL PRIMARY KEY, follower_name text NOT NULL)",
    ),
    (CREATE_GONE,),  # taken by the first deletion: until then, older programs can use the database
)
ON_DEMAND: Final = 1  # steps

# Off in a session that reads pages.  Before the server has counted a growing table, it would scan and sort the rest of
# the table for each page, instead of using the index.  And a page must not lack rows that a policy hides.
PAGING: Final = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "row_security")
PAGING_OFF: Final = "SELECT set_config(name, 'on', true) FROM unnest(%s::text[]) AS setting (name)"

HAS_SCHEMA: Final = "SELECT to_regclass('replication_schema') IS NOT NULL"
FSYNC: Final = "SELECT current_setting('fsync')"
TOUCH: Final = "UPDATE replication_schema SET version = version"

RAISE_POSITIONS: Final = (  # in a negative stream they go down: what is further from 0 is further
    "INSERT INTO stream_positions AS stored (stream_name, instance_name, stream_id) "
    "SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[]) ON CONFLICT (stream_name, instance_name) "
    "DO UPDATE SET stream_id = excluded.stream_id WHERE abs(excluded.stream_id) > abs(stored.stream_id)"
)
APPLIED: Final = "SELECT instance_name, stream_id FROM follower_positions WHERE stream_name = %s AND follower_name = %s"
COPIED_BY: Final = "SELECT stream_name, follower_name FROM stream_copies WHERE stream_name = ANY(%s::text[])"
COPY: Final = "INSERT INTO stream_copies (stream_name, follower_name) VALUES (%s, %s)"
# Those without a block on the disk: no row was ever written to them, nor to partitions or children.
EMPTY: Final = (
    "SELECT name FROM unnest(%s::text[]) AS name JOIN pg_class ON pg_class.oid = to_regclass(name) "
    "WHERE relkind = 'r' AND NOT relhassubclass AND pg_relation_size(pg_class.oid) = 0"
)
DELETE_RECEIPTS: Final = (
    "DELETE FROM append_receipts WHERE ctid = ANY(ARRAY(SELECT ctid FROM append_receipts WHERE written_at <= %s "
    f"LIMIT {DELETED_AT_ONCE} FOR UPDATE SKIP LOCKED))"
)
DELETE_KEYS: Final = "DELETE FROM append_receipts WHERE key = ANY(%s) AND written_at <= %s"
ADD_RECEIPTS: Final = (
    "INSERT INTO append_receipts (key, tokens, written_at) SELECT * FROM unnest(%s::text[], %s::text[], %s::float8[])"
)

_NOT_OURS: Final = (
    errors.DuplicateTable,
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.InvalidColumnReference,
)
_CONFLICTS: Final = (errors.SerializationFailure, errors.DeadlockDetected)
_CONFLICT_TRIES: Final = 10


class _PositionSql:
    """The statements for one position in a table of positions."""

    def __init__(self, table: str, *key: str) -> None:
        columns, values = ", ".join(key), ", ".join("%s" for _ in key)
        where = " AND ".join(f"{column} = %s" for column in key)
        put = f"INSERT INTO {table} ({columns}, stream_id) VALUES ({values}, %s) ON CONFLICT ({columns}) DO "
        self.get = f"SELECT stream_id FROM {table} WHERE {where}"
        self.set = f"{put}UPDATE SET stream_id = excluded.stream_id"
        self.begin = f"{put}NOTHING RETURNING true"
        self.move = f"UPDATE {table} SET stream_id = %s WHERE {where} AND stream_id = %s RETURNING true"


WRITER_POSITIONS: Final = _PositionSql("stream_positions", "stream_name", "instance_name")
FOLLOWER_POSITIONS: Final = _PositionSql("follower_positions", "stream_name", "instance_name", "follower_name")


class PostgresConnection(SqlConnection[PostgresSession]):
    """The package's own tables, and the application's statements, over one session."""

    MARK = "%s"
    SCHEMA = len(STEPS)
    ELEMENTS = "SELECT json_array_elements_text(%s::json)"
    EXCLUSIVE, OWN = LOCK, AFTER_OTHERS
    SNAPSHOT = "ISOLATION LEVEL REPEATABLE READ READ ONLY"

    def __init__(
        self,
        session: PostgresSession,
        *,
        read_only: bool,
        foreign: bool = False,
        allocations: Allocations | None = None,
    ) -> None:
        super().__init__(session, read_only=read_only)
        self._foreign = foreign
        self._allocations = allocations or Allocations()
        self._is_standby = False  # as of the session of that number
        self._standby_asked_in = -1

    def open(self) -> list[str]:
        """Connect; a connection that may write upgrades the tables.  Returns warnings."""
        with self.naming():
            try:
                self._set_up()
            except StoreError as error:
                if isinstance(error.__cause__, _NOT_OURS):
                    why = f"{error.__cause__.diag.message_primary}{hint_at_synapse(self.session.ask)}"
                    raise SchemaError(f"its tables are not ours: {why}") from error
                raise
        ((fsync,),) = self.session.ask(FSYNC)
        name = self.session.name
        warning = f"database {name!r}: fsync is off, so a crash of its machine may lose what was committed: set it on"
        return [warning] if fsync == "off" else []

    # ---- reading

    def applied_positions(self, stream: StreamName, follower: InstanceName) -> dict[InstanceName, Token]:
        """Return the positions that a follower has stored."""
        rows = self.session.ask(APPLIED, (stream, follower))
        return {InstanceName(writer): Token(token) for writer, token in rows}

    def claims(self, names: Collection[InstanceName]) -> dict[InstanceName, bool]:
        """Return which of these names are claimed, each with whether its process has a session now."""
        return {InstanceName(name): connected for name, connected in self.session.ask(CLAIMS, ([*names],))}

    def blockers_of(self, waiting: PostgresSession) -> list[str]:
        """Return the sessions that hold the locks which another session waits for, as texts for people."""
        if waiting.backend_pid is None:
            return []
        ((pids,),) = self.session.ask("SELECT pg_blocking_pids(%s)", (waiting.backend_pid,))
        prepared = ["a prepared transaction"] if 0 in pids else []
        return [*[text for _, text in self.session.ask(BLOCKERS, (pids, []))], *prepared]

    def page(self, table: Table, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page as ``IStreamStore.facts`` does; on a standby, up to the stored position of one that writes."""
        end = upto
        if self.is_standby() and writer not in table.former:
            end = min(upto, self.positions(table).get(writer, Token(0)))
            if end <= after:
                return Page([], after, limited=True)
        page = super().page(table, writer, after=after, upto=end, limit=limit)
        if self._read_only and self._standby_asked_in != self.session.number:  # perhaps of another server, with less
            return self.page(table, writer, after=after, upto=upto, limit=limit)
        return page

    def is_standby(self) -> bool:
        """Whether the server is a standby.

        There, a fact may be visible before a fact with a smaller ID that was committed earlier.  A position is stored
        after all facts up to it.
        """
        if self._read_only and self._standby_asked_in != self.session.number:
            ((self._is_standby,),) = self.session.ask("SELECT pg_is_in_recovery()")
            self._standby_asked_in = self.session.number
        return self._is_standby

    def verify(self) -> None:
        """Raise CommitsLostError if the database has lost commits of this process."""
        self.session.verify()

    def prepare_reading(self) -> None:
        """Undo the settings of PAGING for this transaction."""
        self.session.run(PAGING_OFF, ([*PAGING],))

    def newest(
        self, tables: Mapping[Table, Mapping[InstanceName, Token]]
    ) -> Mapping[Table, Mapping[InstanceName, Token]]:
        """Return each table's ``newest``; of generic tables in few round trips."""
        generic = {quoted(each.name): each for each in tables if isinstance(each, GenericTable)}
        if len(generic) <= 1 or self.session.begun:
            return super().newest(tables)
        empty = {generic[name] for (name,) in self.session.ask(EMPTY, ([*generic],))}
        asked = [each for each in generic.values() if each not in empty]
        answers = self.session.run_in_turn(*[(each.select_newest, ()) for each in asked])
        found: dict[Table, Mapping[InstanceName, Token]] = {
            table: newest_of(rows) for table, rows in zip(asked, answers, strict=True)
        }
        others = {table: stored for table, stored in tables.items() if not isinstance(table, GenericTable)}
        return {**found, **super().newest(others)}

    # ---- writing

    def claim_tables(self, definitions: Sequence[StreamDefinition], instance: InstanceName, *, copy: bool) -> None:
        """Store which process fills the streams' tables; StoreError if another one does."""
        with self.exclusive():
            copied = dict(self.session.run(COPIED_BY, ([each.name for each in definitions],)))
            for definition in definitions:
                self._claim_table(definition, instance, copied.get(definition.name), copy=copy)

    def _declare(self, tables: Sequence[Table], beside: list[StreamDefinition]) -> list[str]:
        """Create or check the streams' tables, and move sequences past every used ID; returns warnings."""
        warnings = list[str]()
        generic = [each for each in tables if isinstance(each, GenericTable) and each.definition.shares is None]
        done = self._fitting(generic)
        if len(done) == len(tables):
            return warnings
        with self.exclusive():
            done |= self._create([each for each in generic if each not in done])
            missing = [each for each in tables if each not in done and each.is_missing(self.session)]
            for table in tables:
                if table not in done:
                    warnings += table.declare(self.session, may_create=True)
                    table.check_ids(self.session, beside)
                    used = max(self.positions(table).values(), default=Token(0))
                    warnings += prepare_sequence(self.session, table, used)
                beside.append(table.definition)
            return warnings + self._mark_missing(missing)

    def _fitting(self, tables: Sequence[GenericTable]) -> set[Table]:
        """Return the generic tables that need no change, nor do their sequences."""
        last = {table: last for table, _, fits, last in self._states(tables) if fits}
        used = self.positions_of([*last])
        return {table for table in last if last[table] >= max([1, *used[table.definition.name].values()])}

    def _create(self, tables: Sequence[GenericTable]) -> set[Table]:
        """Create the generic tables that are new, with their sequences; return those.  Takes one round trip."""
        created = set[Table]()
        for table, is_new, _, _ in self._states(tables):
            if is_new:
                table.create(self.session)
                create_sequence(self.session, table)
                created.add(table)
        return created

    def _states(self, tables: Sequence[GenericTable]) -> list[tuple[GenericTable, bool, bool, int]]:
        """Return whether each table and its sequence are new, whether both fit, and the sequence's last value."""
        if not tables:
            return []
        rows = zip(*[(quoted(each.name), each.sequence, each.definition.stored_name) for each in tables], strict=True)
        states = self.session.ask(STATES, [[*each] for each in rows])
        return [(table, *state) for table, state in zip(tables, states, strict=True)]

    def commit(self, batch: Batch) -> None:
        """Store a batch with all earlier statements; if that fails, or a statement did, undo all of it."""
        try:
            if self.session.begun:  # otherwise BEGIN itself failed
                for statement in self.session.leftovers.before_store():
                    self.session.add(*statement)
                self._store([batch])
            self.session.commit()
        except BaseException as error:
            self.rollback()
            self._pass_used_ids(error, [batch])
            raise
        self.commits += 1
        self.transactions += 1

    def interact(self, interaction: Interaction, sequence: str | None, allocation: IAllocation | None) -> None:
        """Run an interaction in a transaction of its own, and store what it returns; if that fails, undo all of it.

        With a ``sequence``, the transaction begins with an ID from there.
        """
        try:
            if sequence is None or allocation is None:
                self._begin()
            else:
                (id_,) = self._allocations.allocate(
                    self.session, sequence, lambda: [self.session.begin_with_id(sequence)]
                )
                allocation.allocated(id_)
            batch = interaction.run(self.session)
        except BaseException:
            self.rollback()
            raise
        self.commit(batch)

    def commit_together(self, batches: Sequence[Batch]) -> list[Exception | None]:
        """Store batches in one transaction, and return the outcome of each, None for success.

        A conflict or a lost session is retried.  If a batch cannot be stored, each half of them is tried by itself, and
        so on: a batch fails alone.
        """
        failures = 0
        while True:
            try:
                self.session.begin()
                self._store(batches)
                self.session.commit()
            except Exception as error:  # noqa: BLE001 - the caller of that batch receives it
                self.rollback()
                failures += 1
                if failures < _tries(error):
                    continue
                self._pass_used_ids(error, batches)
                if len(batches) == 1 or isinstance(error, (SessionLostError, OutcomeUnknownError, CommitsLostError)):
                    return [error] * len(batches)
                half = len(batches) // 2
                return self.commit_together(batches[:half]) + self.commit_together(batches[half:])
            self.commits += len(batches)
            self.transactions += 1
            return [None] * len(batches)

    def check(self) -> None:
        """Raise StoreError unless the database answers and can be written: a commit proves it."""
        if self._read_only:
            installed(self.session.ask)
            return
        self.session.begin(AFTER_OTHERS)
        try:
            self.session.run(TOUCH)
            self.session.run("COMMIT")  # without a mark: no caller waits for its outcome
        finally:
            self.rollback()

    # ---- inside

    def _pass_used_ids(self, error: BaseException, batches: Sequence[Batch]) -> None:
        """Move the sequence of a table past every used ID if ``error`` is that an ID is used there.

        A crash of the server took back IDs that another process had allocated, and that it has stored since.
        """
        if isinstance(error.__cause__, errors.UniqueViolation):
            name = error.__cause__.diag.table_name
            for table in {table for batch in batches for table, _ in batch.writes if isinstance(table, GenericTable)}:
                with suppress(StoreError):  # the next one that fails does it
                    used = max(self.positions(table).values()) if table.name == name else Token(0)
                    if read_last_value(self.session, table.sequence) < used:
                        move_forward(self.session, table.sequence, used)

    def _set_up(self) -> None:
        ((exists,),) = self.session.ask(HAS_SCHEMA)
        if self._foreign and not exists:
            return
        version = installed(self.session.ask) if exists or self._read_only else 0
        if self._read_only or version >= len(STEPS) - ON_DEMAND:  # a user without CREATE may use existing tables
            check_version(version, len(STEPS), ON_DEMAND)
        else:
            upgrade(self.session.run, self.exclusive, STEPS, on_demand=ON_DEMAND)
        if not self._read_only:
            self.session.ask(DELETE_MARKS)

    def _claim_table(
        self, definition: StreamDefinition, instance: InstanceName, follower: str | None, *, copy: bool
    ) -> None:
        stream = definition.name
        what = f"database {self.session.name!r}: stream {stream!r}"
        if follower is not None:
            if copy and follower == instance:
                return
            raise StoreError(
                f"{what} is a copy here, which worker {follower!r} keeps: name another database; or, to write the "
                f"stream here from now on, DELETE FROM stream_copies WHERE stream_name = '{stream}'"
            )
        mapped = definition.maps("postgresql") and definition.has_one_writer(instance)
        if not copy and not mapped:
            return
        writers = sorted(writer for writer, _ in self.session.run(self._sql(POSITIONS), (stream,)) if writer)
        if not copy:
            refuse_another_writer(definition, instance, writers, "follower_positions")
            self.session.run(WRITER_POSITIONS.begin, (stream, instance, 0))
            return
        if writers:
            raise StoreError(
                f"{what} is written here, by {', '.join(writers)}: give the worker a database of its own for its "
                "copy, or copy = false"
            )
        self.session.run(COPY, (stream, instance))

    def _store(self, batches: Sequence[Batch]) -> None:
        """Store batches: in one statement per table if they only add rows, else in the order of the batches."""
        adding: list[tuple[Table, Write]] = []
        for batch in batches:
            for table, write in batch.writes:
                if write.expected is None and not write.reset and write.follower is None:
                    adding.append((table, write))
                else:
                    self._add(adding)
                    adding = []
                    self._write(table, write)
                    if write.skipped or write.reset:
                        store_skipped(self.session, write, batch.now)
                        lower_gone(self.session, write)
                    if write.gone is not None:
                        put_gone(self.session, write.stream, write.writer, write.gone, self.SCHEMA)
                    if write.counts is not None:
                        self._put_counts(write)
        self._add(adding)
        receipts = [(batch.receipt, batch.now) for batch in batches if batch.receipt is not None]
        if receipts:
            expired = min(batch.expired for batch in batches)
            rows = [(receipt.key, json.dumps([*receipt.tokens]), now) for receipt, now in receipts]
            self.session.add(DELETE_RECEIPTS, (expired,))
            self.session.add(DELETE_KEYS, ([key for key, _, _ in rows], expired))
            self.session.add(ADD_RECEIPTS, [list(column) for column in zip(*rows, strict=True)])

    def _add(self, writes: Sequence[tuple[Table, Write]]) -> None:
        """Store facts and raise positions, sorted, so that two processes do not block each other."""
        written: dict[Table, list[WrittenFact]] = {}
        positions: dict[tuple[str, str], int] = {}
        for table, write in writes:
            if write.facts:
                written.setdefault(table, []).append((write.writer, write.facts))
            key = (write.stream, write.writer)
            if (upto := _upto(write)) or not write.facts:  # otherwise the row is not touched, and not locked
                positions[key] = table.direction.sign * max(upto, abs(positions.get(key, 0)))
        for table, facts in written.items():
            table.insert(self.session, facts)
        if positions:
            rows = [(*key, stream_id) for key, stream_id in sorted(positions.items())]
            self.session.add(RAISE_POSITIONS, [list(column) for column in zip(*rows, strict=True)])

    def _write(self, table: Table, write: Write) -> None:
        """Store a write that expects or lowers the position."""
        session, sign, upto = self.session, table.direction.sign, _upto(write)
        sql, key = WRITER_POSITIONS, [write.stream, write.writer]
        if write.follower is not None:
            sql, key = FOLLOWER_POSITIONS, [*key, write.follower]
        if write.expected is None:
            session.add(sql.set, (*key, sign * upto))
        else:
            upto = upto if write.reset else max(upto, write.expected)
            done = session.returns(sql.move, (sign * upto, *key, sign * write.expected))
            if not done and write.expected == 0:
                done = session.returns(sql.begin, (*key, sign * upto))
            if not done:
                stored = next((sign * stream_id for (stream_id,) in session.run(sql.get, key)), 0)
                raise moved(write, Token(stored))
        if write.reset:
            table.delete(session, write.writer, write.upto)
        if write.facts:
            table.insert(session, [(write.writer, write.facts)])


def _upto(write: Write) -> Token:
    """Return the position that a write stores; facts without rows count, because they leave no row."""
    return max([write.upto, *[token for token, texts in write.facts if not texts]])


def _tries(error: Exception) -> int:
    """Return how often a commit is tried that fails with ``error``."""
    if isinstance(error, SessionLostError):
        return 2
    return _CONFLICT_TRIES if isinstance(error.__cause__, _CONFLICTS) else 1
