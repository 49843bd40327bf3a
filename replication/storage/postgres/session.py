"""One session of a PostgreSQL server, blocking: opened at first use, and again after it was lost.

Each round trip to the server delays a fact.  So statements whose rows are not needed travel with the next statement, in
one trip: BEGIN with the first statement, and COMMIT with all statements added before it.

Every error of the server or the driver is raised as StoreError here.  Its message names the database, never the
password, and, where one is known, the cure.

The module has more than 500 lines because statements, transactions and the loss of a session share the state of one
connection.
"""

from __future__ import annotations

import os
import select
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from uuid import uuid4
from weakref import WeakSet

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from replication.errors import CommitsLostError, RowRefusedError, StoreError, ValueRefusedError
from replication.storage.contract import TAKEN_CURE, ReceiptTakenError, TooLargeError
from replication.storage.forks import detach
from replication.storage.postgres.holder import HOLD, LOST_NAMES, MARK, MARKED, Holder
from replication.storage.postgres.leftovers import SCHEMAS, Leftovers
from replication.storage.postgres.options import CURES_BY_WORDS
from replication.storage.postgres.pipeline import PREPARED, Pipeline, WaitingStatements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from threading import Event

    from psycopg.pq.abc import PGresult

    from replication.storage.postgres.address import Address

_T = TypeVar("_T")
TypedRows: TypeAlias = "tuple[Sequence[int], list[tuple[Any, ...]]]"

_opened: Final[WeakSet[psycopg.Connection]] = WeakSet()

OLDEST: Final = 13  # the first version with pg_current_xact_id_if_assigned()

# These override the server's configuration: a crash must not undo an acknowledged commit, and the session that holds a
# name may be idle for long.
_OVERRIDE: Final = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off' "
    "UNION ALL SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('idle_session_timeout', true) <> '0'"
)
# A value has one text in every session, whatever its user has configured; see also ``types_of`` in mapped.py.
_FORMS: Final = " UNION ALL ".join(
    f"SELECT set_config('{name}', '{value}', false) WHERE current_setting('{name}'){differs}"
    for name, value, differs in (
        ("extra_float_digits", "1", "::int < 1"),
        ("DateStyle", "ISO", " NOT LIKE 'ISO, ___'"),  # its order of day and month is kept
        ("IntervalStyle", "postgres", " <> 'postgres'"),
        ("bytea_output", "hex", " <> 'hex'"),
        ("array_nulls", "on", " <> 'on'"),  # in a parameter, NULL is no text
    )
)
# In a session that only reads: the database may belong to a program that must not wait for this process.
_BOUND: Final = "SELECT set_config('statement_timeout', '30s', false) WHERE current_setting('statement_timeout') = '0'"
# A hot standby refuses even a SELECT in a serializable transaction, which the user may have as its default.
_READ_COMMITTED: Final = "SET default_transaction_isolation = 'read committed'"
_CONFIGURE: Final = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)"
_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '1s'"
_BACKEND: Final = (
    "SELECT pid, extract(epoch FROM backend_start)::text, extract(epoch FROM pg_postmaster_start_time())::text "
    "FROM pg_stat_activity WHERE pid = pg_backend_pid()"
)
# The lost backend may not have noticed; it would wait for hours, with its locks.
_END_BACKEND: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid = %s AND extract(epoch FROM backend_start)::text = %s"
)
_END_OWN: Final = "SELECT pg_terminate_backend(pg_backend_pid())"
# How a transaction begins that waits for a lock of another process, and then reads or changes what that has written.
AFTER_OTHERS: Final = "ISOLATION LEVEL READ COMMITTED"  # the default may be a snapshot from before the wait
_RETRY_AFTER: Final = 0.25  # seconds between two questions about an outcome

_SEQUENCE_ENDS: Final = "2200H"
CURES: Final = {  # by the beginning of an SQLSTATE
    _SEQUENCE_ENDS: "ALTER SEQUENCE … NO MAXVALUE",
    "25006": "the server, its role or this database takes no writes: name the primary, if this is a standby",
    "25P03": "raise idle_in_transaction_session_timeout, or wait less inside the transaction",
    "3F000": "CREATE SCHEMA, or set search_path for this user",
    "40": "try again",
    "42501": "GRANT it to this user, or name another user",
    "53100": "make room on the disk of the server",
    "53300": "raise max_connections, or let fewer processes connect",
    "428C9": "let the column be GENERATED BY DEFAULT or, if it has an expression, write this table with plain SQL only",
    "55P03": "another session holds the lock",
    "57014": "statement_timeout, or pg_cancel_backend(), ended it: raise the timeout for this user, or try again",
}
_TAKEN_CURES: Final = {"(stream_id, ord)=(": TAKEN_CURE}  # the key of a generic table
_RAISE: Final = "exec_stmt_raise"  # the function of the server that executes RAISE of PL/pgSQL
# With such an error no later attempt can work: data exceptions, NOT NULL, CHECK, another type.
_OF_VALUES: Final = ("22", "23502", "23514", "42804")
_SYNTAX: Final = "42601"  # also of a value: tsquery, tsvector, jsonpath, ltree
_HSTORE: Final = "hstore_io.c"  # before PostgreSQL 16, it reports a wrong text as an internal error
_OPEN_FILES_CURE: Final = "close what this process has open, or raise its limit of open files (ulimit -n)"
_TOO_LARGE: Final = "54000"  # a value has at most a gigabyte
_TOO_LARGE_WORDS: Final = "invalid memory alloc request size"  # the same in PostgreSQL 13 and 14, an internal error
_IS_DEFERRABLE: Final = (  # no constraint of this package's tables is
    "SELECT true FROM pg_constraint WHERE conrelid = to_regclass(%s) AND conname = %s AND condeferrable"
)
_RECEIPTS_KEY: Final = "append_receipts_pkey"
_READY_SOON: Final = ("starting up", "in recovery mode", "not yet accepting connections")
_CONNECT_CURES: Final = {  # by words of the server's message; there is no SQLSTATE here
    "password authentication failed": "give the right one in the URL, in PGPASSWORD or in ~/.pgpass",
    "no password supplied": "give one in the URL, in PGPASSWORD or in ~/.pgpass",
    "no pg_hba.conf entry": "add this machine and user to the server's pg_hba.conf",
    "root certificate file": "let sslrootcert in the URL name the file of the authority",
    "certificate verify failed": "let sslrootcert in the URL name the authority of the server's certificate",
    "does not match host name": "let the URL name the server as its certificate does",
    "valid client certificate": "name it with sslcert and sslkey in the URL",
    "unknown ca": "the server does not trust the authority of sslcert: name another one, or correct its ssl_ca_file",
    "does not exist": "create it with createdb, a role with createuser, or name another one",
    "too many clients": CURES["53300"],
    "remaining connection slots": CURES["53300"],
    **dict.fromkeys(_READY_SOON, "it will be ready soon: try again"),
    "shutting down": "start it again",
    "refused": "start the server, or name another host and port",
    "No such file": "start the server, or name another host and port",
}
# By SQLSTATE: conflicts, no resources, locks, timeouts, a server that stops or starts; and by words while it connects.
_TEMPORARY: Final = ("40", "53", "55P03", "57014", "57P01", "57P02", "57P03")
# Errors because of default_transaction_read_only and statement_timeout.  A session keeps their values from its start,
# so a new session is opened after such an error: the server may have other values by then.
_OF_SETTINGS: Final = ("25006", "57014")
# The prepared statement of this session is missing, or a statement of another session has its name.  A pooler pools by
# transaction now, or did so meanwhile.  A new session checks the pooler, and prepares its own statements.
_STATEMENT_ERRORS: Final = ("26000", "42P05", "08P01")
_TEMPORARY_WORDS: Final = (
    *_READY_SOON,
    "too many",
    "remaining connection slots",
    "shutting down",
    "out of shared memory",  # sessions hold as many locks as the server has
)


class SessionLostError(StoreError):
    """The session has ended, or could not be opened.  Except at COMMIT, its transaction was undone."""


class OutcomeUnknownError(StoreError):
    """The session was lost at COMMIT, and the process ended before the server answered what became of it."""


class PostgresSession:
    """A session of the database at ``address``, for ``holder``, with ``settings`` of its own.

    One without settings writes facts: there, ``Pipeline`` prepares statements, and the driver does not.
    ``number`` counts the sessions so far; it differs after a session was lost and opened again.  ``ending`` is set when
    the process ends, and ends the wait for the outcome of a COMMIT.
    """

    dialect = "postgresql"

    def __init__(
        self, address: Address, ending: Event, holder: Holder, settings: Mapping[str, str] | None = None
    ) -> None:
        self.address, self.name = address, address.name
        self.holder, self._ending = holder, ending
        self.number = 0
        self._settings = dict(settings or {})
        self._reads_only = self._settings.get("default_transaction_read_only") == "on"
        self._name = f"{holder.id} {uuid4().hex}"
        self._mark = 0  # the number of the last transaction
        self._rollbacks = 0
        self._backend: Sequence[object] = ()  # the server process
        self._server = ""  # the run of the server
        self._connection: psycopg.Connection | None = None
        self._socket: psycopg.Connection | None = None  # the newest connection, also while it is configured
        self._interrupted = False
        self._begun = self._bounded = self._in_doubt = False  # in doubt: the outcome of a COMMIT is to be read
        self._waiting = WaitingStatements()
        self.leftovers = Leftovers()
        self._pipeline: Pipeline | None = None  # of the driver's connection

    def connect(self) -> psycopg.Connection:
        """Return the driver's connection; open it if there is none, or if a later one has reached another server.

        CommitsLostError: the database has lost commits of this process, or another process has taken over its name.
        """
        if self.holder.lost is not None:
            raise self.holder.lost
        if self._interrupted:
            raise SessionLostError(f"database {self.name!r} did not answer before this process had to end")
        if self._is_stale():
            self._drop()
        if self._connection is None:
            with self.refusals():
                connection = self._socket = psycopg.connect(self.address.conninfo, autocommit=True)
                _opened.add(connection)
                self.holder.connected = True
                connection.prepared_max = PREPARED
                if not self._settings:
                    connection.prepare_threshold = None
                try:
                    self._configure(connection)
                except BaseException:
                    connection.close()
                    raise
            self._connection, self._pipeline = connection, Pipeline(connection)
            self.number += 1
        return self._connection

    @property
    def backend_pid(self) -> object:
        """The process ID of the server's end; None before the session is open."""
        return next(iter(self._backend), None)

    def close(self, last: str = "") -> None:
        """End the session, if there is one, after a ``last`` statement; an open transaction is undone."""
        if last and self._connection is not None:
            with suppress(StoreError):
                self.run(last)
        self._begun = False
        self._waiting.clear()
        self._drop()

    def interrupt(self) -> None:
        """Let a statement that the server has not answered fail, on any thread; the session is not opened again.

        What becomes of its transaction is not known: the server may still execute the statement.
        """
        connection = self._socket
        with suppress(psycopg.Error, OSError):
            if connection is not None and connection.info.transaction_status == TransactionStatus.ACTIVE:
                self._interrupted = True
                with socket(fileno=os.dup(connection.fileno())) as end:
                    end.shutdown(SHUT_RDWR)

    # ---- statements

    def run(self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows: in the open transaction, or by itself if there is none.

        A frequent statement is prepared.  Not so with ``prepare=False``, for tables whose columns may change type.
        """
        return self.typed(sql, parameters, prepare=prepare)[1]

    def typed(
        self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True, again: bool = False
    ) -> TypedRows:
        """Return the types of a statement's columns, as OIDs, and its rows; with ``again`` it is run as by ``ask``."""

        def run() -> TypedRows:
            with self.refusals():
                with self._sending() as connection:
                    cursor = connection.execute(sql, parameters or None, prepare=None if prepare else False)
                result = cursor.pgresult
                if result is None or not result.nfields:
                    return (), []
                return [result.ftype(column) for column in range(result.nfields)], cursor.fetchall()

        def ask() -> TypedRows:
            try:
                return run()
            except StoreError as error:
                if isinstance(error.__cause__, errors.CharacterNotInRepertoire):
                    raise type(error)(f"{error}{_find_not_utf8(self.connect(), sql, parameters)}") from error
                if not isinstance(error.__cause__, errors.FeatureNotSupported):
                    raise
                self._drop()
                raise SessionLostError(str(error), temporary=True) from error

        return self._twice(ask) if again else run()

    def add(self, sql: str, parameters: Sequence[object]) -> None:
        """Run a statement, whose rows are not needed, before the next one of the transaction, which may be COMMIT.

        If it fails, the next statement raises its error.  Outside a transaction it runs at once.
        """
        if self._begun:
            self._waiting.added.append((sql, parameters))
        else:
            self.run(sql, parameters)

    def run_in_turn(self, *statements: tuple[str, Sequence[object]]) -> list[list[tuple[Any, ...]]]:
        """Run statements, which may run twice, in one round trip, and return the rows of each.

        Each has a snapshot of its own, taken after the statement before it has ended.
        """

        def run() -> list[list[tuple[Any, ...]]]:
            with self.refusals():
                connection = self.connect()
                try:
                    with connection.pipeline():
                        cursors = [connection.execute(sql, parameters) for sql, parameters in statements]
                except psycopg.Error as error:
                    self._drop(whole=error.sqlstate in _OF_SETTINGS)  # for the reason in rollback()
                    raise
                return [cursor.fetchall() for cursor in cursors]

        return self._twice(run)

    def ask(self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:
        """Run a statement that only reads, outside a transaction; run it again if the session was lost before.

        Also run it again, in a new session, if a column of a prepared statement's result now has another type.
        StoreError names the ID, which comes first, and the column of a text that is not UTF-8.
        """
        return self.typed(sql, parameters, prepare=prepare, again=True)[1]

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement of the application in a transaction; a text with two statements is refused."""
        self.leftovers.note(sql)
        with self.refusals():
            # Without parameters, and outside a pipeline, the protocol allows several.
            with self._sending(in_pipeline=not parameters) as connection:
                cursor = connection.execute(sql, parameters or None, prepare=False)
            return cursor.fetchall() if cursor.description else []

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement of the application once per item."""
        self.leftovers.note(sql)
        with self.refusals(), self._sending() as connection:
            usual, connection.prepare_threshold = connection.prepare_threshold, None  # executemany() lacks an option
            try:
                connection.cursor().executemany(sql, parameters)
            except (errors.ProgramLimitExceeded, errors.FeatureNotSupported) as error:
                # an array that is too deep, or in JSON a character that the database cannot have
                raise ValueRefusedError(_message(error, self.address)) from error
            finally:
                connection.prepare_threshold = usual

    def returns(self, sql: str, parameters: Sequence[object]) -> bool:
        """Run one statement, and return whether it returns a row."""
        return self._run_together((sql, parameters))[-1].ntuples > 0

    def refresh(self) -> None:
        """Connect, or connect again if the session was lost while it was idle."""
        poll = select.poll()
        with self.refusals():
            poll.register(self.connect().fileno(), select.POLLIN)
        if poll.poll(0):  # an idle server sends nothing, unless it ends the session
            self.ask("SELECT")

    def verify(self) -> None:
        """Raise CommitsLostError if the database has lost commits of this process; outside a transaction."""
        with self.refusals():
            self.holder.verify(self.connect(), self.name)

    # ---- transactions

    def begin(self, how: str = "", *, bounded: bool = False) -> None:
        """Begin a transaction; later statements run in it until ``commit`` or ``rollback``.

        ``bounded``: the transaction sets timeouts of its own.  If one ends it, the session keeps its settings.
        """
        self.refresh()
        self._begun, self._bounded, self._waiting.opening = True, bounded, f"BEGIN {how}"

    def begin_with_id(self, sequence: str) -> int:
        """Begin a transaction, and return an ID that it has allocated from a sequence, in one round trip.

        Unlike ``begin``, it does not connect again if the session was lost while it was idle: SessionLostError.
        """
        try:
            with self.refusals():
                self.connect()
                self._begun, self._bounded = True, False
                assert self._pipeline is not None  # noqa: S101 (there is a connection)
                return self._pipeline.begin_with_id(sequence)
        except StoreError:
            self.rollback()
            raise

    @property
    def begun(self) -> bool:
        """Whether a transaction was begun and not ended, even if the session was lost meanwhile."""
        return self._begun

    def commit(self) -> None:
        """Make the transaction durable; after StoreError nothing of it is stored.

        If the session is lost at COMMIT, the server is asked for the outcome until it answers.  OutcomeUnknownError if
        ``ending`` is set before that.  CommitsLostError: earlier commits are lost.
        """
        status = TransactionStatus.INTRANS if self._waiting.opening is None else TransactionStatus.IDLE
        if not self._begun or self._current().info.transaction_status != status:
            raise _undone(self.name, temporary=self._connection is None)
        backend = self._backend
        self._mark += 1
        mark = MARK, (self._name, self.holder.table, self.holder.table, self._mark)
        try:
            resets = self.leftovers.resets()
            marked = self._run_together(mark, ("COMMIT", ()), *resets)[-2 - len(resets)]
        except SessionLostError as lost:
            self._begun = False
            if not self._was_committed(backend):
                raise SessionLostError(f"{lost}; nothing was committed", temporary=lost.temporary) from lost
            self.holder.marks[self._name] = self._mark
        except StoreError as error:
            if not is_refusal(error.__cause__):
                raise
            self.rollback()
            if not _is_of_marks(error.__cause__):
                raise _refused_at_commit(self, error) from error.__cause__
            self.verify()
            raise StoreError(f"database {self.name!r}: its tables were made anew: try again", temporary=True) from error
        else:
            self._begun = False
            if self.leftovers.end():
                self._drop()
            if marked.ntuples:  # otherwise nothing was written
                self.holder.marks[self._name], self.holder.table = self._mark, int(marked.get_value(0, 0) or 0)
                if self._is_stale():  # another session has not seen this mark at the server that it has reached
                    self._was_committed(backend)

    def rollback(self) -> None:
        """Undo the transaction.  If ROLLBACK fails, the session is closed, and the server undoes the transaction."""
        self._begun = False
        self._waiting.clear()
        # After an error in a pipeline the server skips the rest.  The driver counts skipped statements as prepared,
        # until it sends a ROLLBACK with a text that it has not sent before.
        self._rollbacks += 1
        if not self._is_idle():
            with suppress(StoreError):
                self.run(f"ROLLBACK -- {self._rollbacks}")
        if self.leftovers.end() or not self._is_idle():
            self._drop(whole=True)

    # ---- inside

    def _configure(self, connection: psycopg.Connection) -> None:
        version = connection.info.server_version // 10_000
        if version < OLDEST:
            raise StoreError(f"database {self.name!r} has PostgreSQL {version}: use {OLDEST} or newer")
        if self._reads_only:
            connection.execute(_READ_COMMITTED)
        ((*self._backend, server),) = connection.execute(_BACKEND).fetchall()
        self.holder.refuse_transaction_pooling(connection, self.address)
        settings = f"{_BOUND if self._reads_only else _OVERRIDE} UNION ALL {_FORMS}"
        found = connection.execute(settings).fetchall()
        self.leftovers.after_reset = [(settings, ())] if found else []
        connection.execute(_CONFIGURE, ([*self._settings], [*self._settings.values()]))
        ((self.leftovers.schemas,),) = connection.execute(SCHEMAS).fetchall()
        if self._reads_only:
            return  # it holds no name
        self._server = self.holder.server = server  # before it is verified: see ``commit``
        self.holder.verify(connection, self.name)
        connection.execute(HOLD, (self.holder.id,))
        if self.holder.names and not self._in_doubt:
            lost = connection.execute(LOST_NAMES, (self.holder.names, self.holder.id)).fetchall()
            if lost:
                raise self.holder.lose(
                    f"database {self.name!r}: another process has taken over the name {lost[0][0]!r} since sessions of "
                    "this one were lost: restart this process, so that it reads what was written meanwhile"
                )

    def _is_stale(self) -> bool:
        """Whether a later session of this process has reached another server, or another run of it."""
        return self._connection is not None and not self._reads_only and self._server != self.holder.server

    def _drop(self, *, whole: bool = False) -> None:
        """End the session.  ``whole``: also its process, which a pooler would give to the next one, as it began."""
        if self._connection is not None:
            if whole:
                with suppress(psycopg.Error, OSError):
                    self._connection.execute(_END_OWN, prepare=False)
            self._connection.close()
            self._connection = None

    def _twice(self, work: Callable[[], _T]) -> _T:
        known = self._connection is not None
        try:
            return work()
        except SessionLostError:
            if not known:
                raise
        return work()

    @contextmanager
    def _sending(self, *, in_pipeline: bool = False) -> Iterator[psycopg.Connection]:
        """Send the statements that wait together with the one of the caller."""
        connection, waiting = self._current(), self._waiting.take()
        if not waiting and not in_pipeline:
            yield connection
            return
        with connection.pipeline():
            for sql, parameters in waiting:
                connection.execute(sql, parameters or None)
            yield connection

    def _run_together(self, *statements: tuple[str, Sequence[object]]) -> list[PGresult]:
        """Send the statements that wait together with these, and return the results of all."""
        with self.refusals():
            self._current()
            assert self._pipeline is not None  # noqa: S101 (there is a connection)
            return self._pipeline.run([*self._waiting.take(), *statements])

    def _current(self) -> psycopg.Connection:
        if self._begun and (self._connection is None or self._is_stale()):
            raise _undone(self.name, temporary=self._connection is None)
        return self.connect()

    def _is_idle(self) -> bool:
        connection = self._connection
        return connection is None or connection.info.transaction_status == TransactionStatus.IDLE

    def _was_committed(self, backend: Sequence[object]) -> bool:
        """Ask until the server answers.  A process that has lost its name may ask, too, in a session for that alone."""
        if self._interrupted:
            raise OutcomeUnknownError("the outcome of this commit is unknown: the server did not answer in time")
        self._in_doubt = True
        try:
            while True:
                try:
                    self.ask(_END_BACKEND, backend)
                    self.begin()
                    self.run(_LOCK_TIMEOUT)
                    ((mark,),) = self.run(MARKED, (self._name,))
                except CommitsLostError:
                    raise
                except StoreError as error:
                    why = f"this process ends before the server has answered: {error}"
                else:
                    return bool(mark == self._mark)
                finally:
                    self.rollback()
                if self._ending.wait(_RETRY_AFTER):
                    raise OutcomeUnknownError(f"the outcome of this commit is unknown: {why}")
        finally:
            self._in_doubt = False
            if self.holder.names:
                self._drop()  # the names were not checked

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Raise errors of the driver as StoreError."""
        try:
            yield
        except psycopg.Error as error:
            lost = self._connection is None or self._connection.closed or _is_fatal(error)
            doubted = not lost and error.sqlstate in _STATEMENT_ERRORS
            if doubted:
                self.holder.doubt_pooler()
            if lost or ((doubted or error.sqlstate in _OF_SETTINGS) and not self._begun):
                self._drop(whole=not lost)
            elif doubted or (error.sqlstate in _OF_SETTINGS and not self._bounded):
                self.leftovers.outdate()
            if error.diag.constraint_name == _RECEIPTS_KEY:
                raise ReceiptTakenError(self.name) from error
            kind = SessionLostError if lost else _kind_of(error)
            temporary = (lost and self.holder.connected) or _is_temporary(error)
            raise kind(_message(error, self.address), temporary=temporary) from error
        except OSError as error:  # the driver waits with a file descriptor, and this process has none left
            self._drop()
            why = f"database {self.name!r}: {error.strerror}: {_OPEN_FILES_CURE}"
            raise SessionLostError(why, temporary=self.holder.connected) from error
        except (UnicodeEncodeError, OverflowError) as error:  # for a value that cannot be sent
            raise ValueRefusedError(f"database {self.name!r}: {error}") from error


def _find_not_utf8(connection: psycopg.Connection, sql: str, parameters: Sequence[object]) -> str:
    """Return where a query has a text that is not UTF-8, as a database with SQL_ASCII may have, and the cure."""
    with suppress(psycopg.Error):
        connection.execute("SET client_encoding = 'SQL_ASCII'")  # the driver then returns texts as bytes
        try:
            cursor = connection.execute(sql, parameters or None, prepare=False)
            for row in cursor:
                for column, value in zip(cursor.description or (), row, strict=True):
                    if not _is_utf8(value):
                        where = f" at ID {row[0]}" if isinstance(row[0], int) else ""
                        return f": column {column.name!r} has it{where}: UPDATE that text to one in UTF-8"
        finally:
            connection.execute("RESET client_encoding")
    return ""


def _is_utf8(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_utf8, value))
    if not isinstance(value, bytes):
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _undone(name: str, *, temporary: bool) -> StoreError:
    why = f"database {name!r} has undone this transaction after an error: begin another one"
    return StoreError(why, temporary=temporary)


def _message(error: psycopg.Error, address: Address) -> str:
    parts = [error.diag.message_primary, error.diag.message_detail]
    message = "; ".join(part for part in parts if part) or " ".join(str(error).split())
    for secret in address.secrets:
        message = message.replace(secret, "…")
    state = error.sqlstate or ""
    by_words = {**CURES_BY_WORDS, **(_TAKEN_CURES if state else _CONNECT_CURES)}
    cures = [cure for words, cure in by_words.items() if words in message]
    cures += [cure for start, cure in CURES.items() if state.startswith(start)]
    return "; ".join([f"database {address.name!r}: {message}", *cures[:1]])


def _kind_of(error: psycopg.Error) -> type[StoreError]:
    if error.sqlstate == _TOO_LARGE or _TOO_LARGE_WORDS in str(error):
        return TooLargeError
    return ValueRefusedError if _is_of_values(error) else StoreError


def is_refusal(error: BaseException | None) -> bool:
    """Whether a constraint, a generated column or RAISE in a trigger refuses a row; RAISE may have any SQLSTATE."""
    if isinstance(error, (errors.IntegrityError, errors.RaiseException, errors.GeneratedAlways)):
        return True
    return isinstance(error, psycopg.Error) and error.diag.source_function == _RAISE and not _is_temporary(error)


def _refused_at_commit(session: PostgresSession, error: StoreError) -> StoreError:
    """Return the error of a deferred constraint, or of a trigger of the application, which COMMIT has called."""
    cause = error.__cause__
    if isinstance(cause, errors.IntegrityError):
        table = f'"{cause.diag.schema_name}"."{cause.diag.table_name}"'
        if not session.run(_IS_DEFERRABLE, (table, cause.diag.constraint_name)):
            return error
    return RowRefusedError(str(error))


def _is_of_values(error: psycopg.Error) -> bool:
    if error.sqlstate is None:
        return isinstance(error, (psycopg.DataError, psycopg.ProgrammingError))  # the driver cannot convert it
    where = error.diag
    if error.sqlstate == _SYNTAX and where.statement_position is where.internal_position is None:
        return True  # in SQL, a syntax error has a position
    if where.source_file == _HSTORE:
        return True
    return error.sqlstate.startswith(_OF_VALUES) and error.sqlstate != _SEQUENCE_ENDS


def _is_temporary(error: psycopg.Error) -> bool:
    if error.sqlstate is None:
        return any(words in str(error) for words in _TEMPORARY_WORDS)
    return error.sqlstate.startswith(_TEMPORARY)


def _is_of_marks(error: BaseException | None) -> bool:
    return isinstance(error, errors.NotNullViolation) and error.diag.table_name == "commit_marks"


def _is_fatal(error: psycopg.Error) -> bool:
    if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:  # the driver's: COMMIT may have worked
        return not isinstance(error, errors.PipelineAborted)
    return error.diag.severity_nonlocalized in ("FATAL", "PANIC")


os.register_at_fork(after_in_child=lambda: detach([each.fileno() for each in _opened if not each.closed]))
