"""What is asked of a PostgreSQL session, blocking; ``postgres.py`` says who asks which session, and when."""

# ruff: noqa: S608 - the names of tables and columns in SQL are our own

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from psycopg import errors

from replication.errors import SchemaError, StoreError
from replication.storage.mapped import refuse_another
from replication.storage.memory import RECEIPT_LIFE, moved
from replication.storage.migrate import check_version, installed, upgrade
from replication.storage.pages import check_limit, gather_positions
from replication.storage.postgres_ids import PRESENT, prepare_sequence
from replication.storage.postgres_session import FORGET_MARKS, MARKS, OutcomeUnknownError, SessionLostError
from replication.streams.seams import Page
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table, Written
    from replication.storage.tables import Batch
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, Write

_T = TypeVar("_T")

STEPS: Final = (
    (
        """
        CREATE TABLE IF NOT EXISTS stream_positions (
            stream_name text NOT NULL, instance_name text NOT NULL, stream_id bigint NOT NULL,
            PRIMARY KEY (stream_name, instance_name)
        )
        """,
        # Synapse has a table of that name, and it is one and the same; another one is refused here.
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
)

# What a session that reads pages must not do: the server may not have counted yet how a table has grown, and would sort
# all that is left for each page, instead of going along an index; and rows that a policy hides would be missed.
PAGING: Final = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "row_security")
AS_USUAL: Final = "SELECT set_config(name, 'on', true) FROM unnest(%s::text[]) AS setting (name)"

HAS_SCHEMA: Final = "SELECT to_regclass('replication_schema') IS NOT NULL"
# Two processes that make tables at once would fail, even with IF NOT EXISTS.
ALONE: Final = "SELECT pg_advisory_xact_lock(hashtextextended('replication tables', 0))"
FSYNC: Final = "SELECT current_setting('fsync')"
TOUCH: Final = "UPDATE replication_schema SET version = version"

POSITIONS: Final = "SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = %s"
STORED: Final = "SELECT stream_name, instance_name, abs(stream_id) FROM stream_positions"
RAISE_POSITIONS: Final = (  # those of negative streams go down: what is further from 0 is further
    "INSERT INTO stream_positions AS stored (stream_name, instance_name, stream_id) "
    "SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[]) ON CONFLICT (stream_name, instance_name) "
    "DO UPDATE SET stream_id = excluded.stream_id WHERE abs(excluded.stream_id) > abs(stored.stream_id)"
)
APPLIED: Final = "SELECT instance_name, stream_id FROM follower_positions WHERE stream_name = %s AND follower_name = %s"
COPIED_BY: Final = "SELECT follower_name FROM stream_copies WHERE stream_name = %s"
COPY: Final = "INSERT INTO stream_copies (stream_name, follower_name) VALUES (%s, %s)"
FORGET_RECEIPTS: Final = "DELETE FROM append_receipts WHERE written_at <= %s"
ADD_RECEIPTS: Final = (
    "INSERT INTO append_receipts (key, tokens, written_at) SELECT * FROM unnest(%s::text[], %s::text[], %s::float8[])"
)
RECEIPT: Final = "SELECT tokens FROM append_receipts WHERE key = %s AND written_at > %s"

_NOT_OURS: Final = (
    errors.DuplicateTable,
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.InvalidColumnReference,
)
_CONFLICTS: Final = (errors.SerializationFailure, errors.DeadlockDetected)
_CONFLICT_TRIES: Final = 10


class _Places:
    """How one position of a table of positions is read and moved."""

    def __init__(self, table: str, *key: str) -> None:
        columns, values = ", ".join(key), ", ".join("%s" for _ in key)
        where = " AND ".join(f"{column} = %s" for column in key)
        put = f"INSERT INTO {table} ({columns}, stream_id) VALUES ({values}, %s) ON CONFLICT ({columns}) DO "
        self.get = f"SELECT stream_id FROM {table} WHERE {where}"
        self.set = f"{put}UPDATE SET stream_id = excluded.stream_id"
        self.begin = f"{put}NOTHING RETURNING true"
        self.move = f"UPDATE {table} SET stream_id = %s WHERE {where} AND stream_id = %s RETURNING true"


WRITERS: Final = _Places("stream_positions", "stream_name", "instance_name")
FOLLOWERS: Final = _Places("follower_positions", "stream_name", "instance_name", "follower_name")


class PostgresStatements:
    """A session to a function that runs on its thread."""

    dialect = "postgresql"

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        return self._session.run_foreign(sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        self._session.run_many(sql, parameters)


class PostgresConnection:
    """Our tables, and the application's statements, over one session."""

    def __init__(self, session: PostgresSession, *, read_only: bool) -> None:
        self.session = session
        self.commits = 0  # batches that became durable
        self.transactions = 0  # that took them
        self._read_only = read_only
        self._recovers = False  # as it was asked in the session of that number
        self._asked_in = -1

    def open(self) -> list[str]:
        """Connect, and if this connection may write, bring our own tables up to date; returns warnings."""
        with self._naming():
            try:
                self._set_up()
            except StoreError as error:
                if isinstance(error.__cause__, _NOT_OURS):
                    raise SchemaError(f"its tables are not ours: {error.__cause__.diag.message_primary}") from error
                raise
        ((fsync,),) = self.session.ask(FSYNC)
        name = self.session.address.name
        warning = f"database {name!r}: fsync is off, so a crash of its machine may lose what was committed: set it on"
        return [warning] if fsync == "off" else []

    def close(self) -> None:
        """End the session."""
        self.session.close()

    # ---- reading

    def positions(self, table: Table) -> dict[InstanceName, Token]:
        """Return, per writer, the largest token that was committed or stored as a position."""
        sign = table.direction.sign
        rows = self.session.ask(POSITIONS, (table.definition.name,))
        stored = {InstanceName(writer): Token(sign * stream_id) for writer, stream_id in rows}
        if self._is_standby():
            return stored
        newest = table.newest(self.session, stored)
        return {
            writer: max(stored.get(writer, Token(0)), newest.get(writer, Token(0))) for writer in {**stored, **newest}
        }

    def applied(self, stream: StreamName, follower: InstanceName) -> dict[InstanceName, Token]:
        """Return the positions that a follower has stored."""
        rows = self.session.ask(APPLIED, (stream, follower))
        return {InstanceName(writer): Token(token) for writer, token in rows}

    def fill(self, definition: StreamDefinition, instance: InstanceName, *, copy: bool) -> None:
        """Note who fills a stream's table where that is one, and refuse whoever does not go with that."""
        stream = definition.name
        with self._alone():
            what = f"database {self.session.address.name!r}: stream {stream!r}"
            for (follower,) in self.session.run(COPIED_BY, (stream,)):
                if copy and follower == instance:
                    return
                raise StoreError(
                    f"{what} is a copy here, which worker {follower!r} keeps: name another database; or, if the copy "
                    f"shall go on as yours, DELETE FROM stream_copies WHERE stream_name = '{stream}'"
                )
            writers = sorted(writer for writer, _ in self.session.run(POSITIONS, (stream,)) if writer)
            if not copy:
                if definition.maps("postgresql") and definition.has_one_writer(instance):
                    refuse_another(definition, instance, writers, "follower_positions")
                    self.session.run(WRITERS.begin, (stream, instance, 0))  # for the next one to see
                return
            if writers:
                raise StoreError(
                    f"{what} is written here, by {', '.join(writers)}: give the worker a database of its own for its "
                    "copy, or copy = false"
                )
            self.session.run(COPY, (stream, instance))

    def present(self, names: Collection[InstanceName]) -> list[InstanceName]:
        """Return which of these names were claimed by those who have any session here."""
        return [InstanceName(name) for (name,) in self.session.ask(PRESENT, ([*names],))]

    def stored(self) -> dict[StreamName, dict[InstanceName, Token]]:
        """Return all positions that were stored."""
        return gather_positions(self.session.ask(STORED))

    def page(self, table: Table, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page as ``IStreamStore.facts`` does; from a standby, what it certainly has."""
        check_limit(limit)
        if self._is_standby():
            upto = min(upto, self.positions(table).get(writer, Token(0)))
            if upto <= after:
                return Page([], after, limited=True)
        return table.rows(self.session, writer, after=after, upto=upto, limit=limit).page()

    def _is_standby(self) -> bool:
        """Whether a fact may be there before one that has a smaller ID, as it was committed first.

        Whoever stores a position does so after all of that.
        """
        if self._read_only and self._asked_in != self.session.number:
            ((self._recovers,),) = self.session.ask("SELECT pg_is_in_recovery()")
            self._asked_in = self.session.number
        return self._recovers

    def recall(self, key: str, now: float) -> list[Token] | None:
        """Return the tokens of a receipt of the day before ``now``."""
        for (tokens,) in self.session.ask(RECEIPT, (key, now - RECEIPT_LIFE)):
            return [Token(each) for each in json.loads(tokens)]
        return None

    def read(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` on one snapshot."""
        self.session.begin("ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            self.session.run(AS_USUAL, ([*PAGING],))
            return function(PostgresStatements(self.session))
        finally:
            self.session.rollback()

    # ---- writing

    def declare(self, table: Table) -> list[str]:
        """Make sure that the stream's table is there, and that its sequence is past every ID; returns warnings."""
        with self._naming():
            if self._read_only:
                return list(table.declare(self.session, may_create=False))
            with self._alone():
                warnings = table.declare(self.session, may_create=True)
                used = max(self.positions(table).values(), default=Token(0))
                return [*warnings, *prepare_sequence(self.session, table, used)]

    def execute(self, sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        """Run a statement of the application, the first one of a transaction after BEGIN."""
        self._begin()
        return self.session.run_foreign(sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run a statement once per item."""
        self._begin()
        self.session.run_many(sql, parameters)

    def run(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` inside the transaction."""
        self._begin()
        return function(PostgresStatements(self.session))

    def commit(self, batch: Batch[Table]) -> None:
        """Store a batch with what was executed before; if that fails, or did, all of it is undone."""
        try:
            if self.session.begun:  # else not even BEGIN could be executed
                self._store([batch])
            self.session.commit()
        except BaseException:
            self.rollback()
            raise
        self._count(1)

    def commit_together(self, batches: Sequence[Batch[Table]]) -> list[Exception | None]:
        """Store batches in one transaction if they all can be, and return what became of each, None for good.

        What fails for no reason of its own is tried again.  If some of them cannot be stored, halves of them are tried
        in turn, so that who fails fails alone.
        """
        failures = 0
        while True:
            try:
                self.session.begin()
                self._store(batches)
                self.session.commit()
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one batch, it is told, and only it
                self.rollback()
                failures += 1
                if failures < _tries(error):
                    continue
                if len(batches) == 1 or isinstance(error, (SessionLostError, OutcomeUnknownError)):
                    return [error] * len(batches)
                half = len(batches) // 2
                return self.commit_together(batches[:half]) + self.commit_together(batches[half:])
            self._count(len(batches))
            return [None] * len(batches)

    def rollback(self) -> None:
        """Undo what was executed since the last commit."""
        self.session.rollback()

    def check(self) -> None:
        """Raise StoreError unless the database answers and can be written."""
        if self._read_only:
            installed(self.session.ask)
            return
        self.session.begin()
        try:
            self.session.run(TOUCH)
        finally:
            self.rollback()

    # ---- inside

    def _set_up(self) -> None:
        ((there,),) = self.session.ask(HAS_SCHEMA)
        version = installed(self.session.ask) if there or self._read_only else 0
        if self._read_only or version >= len(STEPS):  # who may not make tables can use those that are there
            check_version(version, len(STEPS))
        else:
            upgrade(self.session.run, self._alone, STEPS)
        if not self._read_only:
            self.session.ask(FORGET_MARKS)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.session.begin()
        try:
            self.session.run(ALONE)
            yield
            self.session.commit()
        except BaseException:
            self.rollback()
            raise

    def _begin(self) -> None:
        if not self.session.begun:
            self.session.begin()

    def _count(self, batches: int) -> None:
        self.commits += batches
        self.transactions += 1

    def _store(self, batches: Sequence[Batch[Table]]) -> None:
        """Store all, in a statement per table what only adds: others of the group, in the order of the batches."""
        plain: list[tuple[Table, Write]] = []
        for batch in batches:
            for table, write in batch.writes:
                if write.expected is None and not write.reset and write.follower is None:
                    plain.append((table, write))
                else:
                    self._add(plain)
                    plain = []
                    self._write(table, write)
        self._add(plain)
        receipts = [(batch.receipt, batch.now) for batch in batches if batch.receipt is not None]
        if receipts:
            now = max(now for _, now in receipts)
            self.session.add(FORGET_RECEIPTS, (now - RECEIPT_LIFE,))
            rows = [(receipt.key, json.dumps([*receipt.tokens]), now) for receipt, now in receipts]
            self.session.add(ADD_RECEIPTS, [list(column) for column in zip(*rows, strict=True)])

    def _add(self, writes: Sequence[tuple[Table, Write]]) -> None:
        """Store facts, and raise positions, always in one order, so that two processes do not wait for each other."""
        written: dict[Table, list[Written]] = {}
        positions: dict[tuple[str, str], int] = {}
        for table, write in writes:
            if write.facts:
                written.setdefault(table, []).append((write.writer, write.facts))
            place = (write.stream, write.writer)
            if (upto := _upto(write)) or not write.facts:  # else it is left alone, and its row is not locked
                positions[place] = table.direction.sign * max(upto, abs(positions.get(place, 0)))
        for table, facts in written.items():
            table.insert(self.session, facts)
        if positions:
            rows = [(*place, stream_id) for place, stream_id in sorted(positions.items())]
            self.session.add(RAISE_POSITIONS, [list(column) for column in zip(*rows, strict=True)])

    def _write(self, table: Table, write: Write) -> None:
        """Store what depends on the position before it, or lowers that."""
        session, sign, upto = self.session, table.direction.sign, _upto(write)
        places, place = WRITERS, [write.stream, write.writer]
        if write.follower is not None:
            places, place = FOLLOWERS, [*place, write.follower]
        if write.expected is None:
            session.add(places.set, (*place, sign * upto))
        else:
            upto = upto if write.reset else max(upto, write.expected)
            done = session.run(places.move, (sign * upto, *place, sign * write.expected))
            if not done and write.expected == 0:
                done = session.run(places.begin, (*place, sign * upto))
            if not done:
                stored = next((sign * stream_id for (stream_id,) in session.run(places.get, place)), 0)
                raise moved(write, Token(stored))
        if write.reset:
            table.delete(session, write.writer, write.upto)
        if write.facts:
            table.insert(session, [(write.writer, write.facts)])

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except SchemaError as error:
            raise SchemaError(f"database {self.session.address.name!r}: {error}") from error


def _upto(write: Write) -> Token:
    """Return the position that a write stores: a fact without rows is remembered by nothing else."""
    return max([write.upto, *[token for token, texts in write.facts if not texts]])


def _tries(error: Exception) -> int:
    """Return how often a commit is tried that fails like this."""
    if isinstance(error, SessionLostError):
        return 2
    return _CONFLICT_TRIES if isinstance(error.__cause__, _CONFLICTS) else 1
