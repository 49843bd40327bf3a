"""One session of a PostgreSQL server, blocking: made when it is first needed, and made again after it was lost.

Each trip to the server and back makes a fact later.  So what need not be waited for is said with what comes next, in
one trip: BEGIN with the first statement, and COMMIT with all that was added before it.

Whatever the server or its driver refuses is raised as StoreError and names the database, never its password, and, where
we know one, the cure.
"""

from __future__ import annotations

import os
import re
import select
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from uuid import uuid4

import attrs
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from replication.errors import ConfigError, StoreError, ValueRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from threading import Event

    from replication.wire.grammar import InstanceName

_T = TypeVar("_T")

OLDEST: Final = 13  # the first server that has pg_current_xact_id_if_assigned()
PREPARED: Final = 500  # statements of a session: a few for each stream

_DEFAULTS: Final[Mapping[str, str | int]] = {
    "connect_timeout": 10,  # seconds for each host
    "client_encoding": "UTF8",
    # A server that vanished without a word is noticed within 45 s, not within hours.
    "keepalives_idle": 30,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 45_000,  # ms; keepalives rest while a question is under way
}
# Whatever is configured there: once a commit is acknowledged, a crash of the server must not take it back, and the
# session that holds a name may be idle for long.
_OF_OURS: Final = (
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off' "
    "UNION ALL SELECT set_config('idle_session_timeout', '0', false) "
    "WHERE current_setting('idle_session_timeout', true) <> '0'"
)
_CONFIGURE: Final = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS setting (name, value)"

# Every transaction leaves a mark, the next number of its session, by which is found out whether it was committed if the
# session is lost over that.  pg_xact_status() would not do: after a crash, numbers of transactions are given again.
MARKS: Final = """
    CREATE TABLE commit_marks (
        session text NOT NULL PRIMARY KEY, mark bigint NOT NULL, marked_at timestamptz NOT NULL DEFAULT now()
    )
"""
FORGET_MARKS: Final = "DELETE FROM commit_marks WHERE marked_at < now() - interval '30 days'"
_MARK: Final = (
    "INSERT INTO commit_marks (session, mark) SELECT %s::text, %s::bigint "
    "WHERE pg_current_xact_id_if_assigned() IS NOT NULL "  # else there is nothing to lose
    "ON CONFLICT (session) DO UPDATE SET mark = excluded.mark, marked_at = now() RETURNING true"
)
# Waits until the transaction that is in doubt has ended.
_MARKED: Final = (
    "INSERT INTO commit_marks AS kept (session, mark) VALUES (%s, 0) "
    "ON CONFLICT (session) DO UPDATE SET mark = kept.mark RETURNING mark"
)
_PATIENTLY: Final = "SET LOCAL lock_timeout = '1s'"
_BACKEND: Final = (
    "SELECT pid, extract(epoch FROM backend_start)::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"
)
# The one that we lost may not have noticed, and wait for us for hours, with our locks.
_END_BACKEND: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid = %s AND extract(epoch FROM backend_start)::text = %s"
)
HOLDER_KEY: Final = "hashtextextended('replication holder ' || %s, 0)"
_HOLD: Final = f"SELECT pg_advisory_lock_shared({HOLDER_KEY})"
_LOST: Final = (
    "SELECT name FROM unnest(%s::text[]) AS name WHERE %s IS DISTINCT FROM "
    "(SELECT holder FROM writer_claims WHERE instance_name = name ORDER BY number DESC LIMIT 1)"
)

_ASK_AGAIN: Final = 0.25  # seconds between two questions about an outcome

CURES: Final = {  # by the beginning of an SQLSTATE
    "25006": "the server, its role or this database takes no writes: name the primary, if this is a standby",
    "25P03": "raise idle_in_transaction_session_timeout, or wait less inside the transaction",
    "3F000": "CREATE SCHEMA, or set search_path for this user",
    "40": "try again",
    "42501": "GRANT it to this user, or name another user",
    "53100": "make room on the disk of the server",
    "53300": "raise max_connections, or let fewer processes connect",
    "55P03": "another session holds the lock",
    "57014": "statement_timeout, or somebody, ended it: raise the timeout for this user, or try again",
}
# What no later attempt can mend: data exceptions, NOT NULL, CHECK, another type.  A key may be free then.
_OF_VALUES: Final = ("22", "23502", "23514", "42804")
_CONNECT_CURES: Final = {  # by the server's words, because the driver has no SQLSTATE then
    "password authentication failed": "give the right one in the URL, in PGPASSWORD or in ~/.pgpass",
    "no password supplied": "give one in the URL, in PGPASSWORD or in ~/.pgpass",
    "no pg_hba.conf entry": "let this machine and user in, in the server's pg_hba.conf",
    "does not exist": "make it with createdb or createuser, or name another one",
    "too many clients": CURES["53300"],
    "remaining connection slots": CURES["53300"],
    "starting up": "it will be there soon: try again",
    "shutting down": "start it again",
    "refused": "start the server, or name another host and port",
    "No such file": "start the server, or name another host and port",
}
_SPELL: Final = "in a user and a password, each of / : @ ? # % is spelt as %XX"


class SessionLostError(StoreError):
    """The session has ended, or could not be made; unless a COMMIT was under way, its transaction was undone."""


class OutcomeUnknownError(StoreError):
    """The session was lost at COMMIT, and the server could not say what became of the transaction before we end."""


@attrs.frozen
class Address:
    """Where a database is: ``name`` is for people to read, and has no password in it."""

    name: str
    conninfo: str = attrs.field(repr=False)
    secrets: Sequence[str] = attrs.field(repr=False)

    @classmethod
    def parse(cls, url: str, *, read_only: bool = False) -> Self:
        """Read ``postgresql://user:password@host:port/database?option=…``; ConfigError does not quote the password.

        Of several hosts it is the primary, unless we are only to read.
        """
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            # What the driver says may be the password; without an @ there is none.
            why = " ".join(str(error).split()) if "@" not in url else _SPELL
            raise ConfigError(f"database {_hide(url)!r} is no URL of PostgreSQL: {why}") from None
        host, ports, user = str(given.get("host", "")), str(given.get("port", "")), given.get("user")
        if "@" in host[1:] or not re.fullmatch(r"[0-9,]*", ports):  # the driver takes half a password for them
            raise ConfigError(f"database {_hide(url)!r} is no URL of PostgreSQL: {_SPELL}")
        where = f"{user}@{host}" if user else host
        name = f"postgresql://{where}{ports and ':'}{ports}/{given.get('dbname', '')}"
        application = f"replication {socket.gethostname()}:{os.getpid()}"
        defaults = {**_DEFAULTS, **({"target_session_attrs": "primary"} if "," in host and not read_only else {})}
        known = {key: value for key, value in defaults.items() if key not in given}
        conninfo = make_conninfo(url, fallback_application_name=application, **known)
        return cls(name, conninfo, [str(given[key]) for key in ("password", "sslpassword") if given.get(key)])


class Holder:
    """One process, to the others that write the same database: who it is, and the ``names`` that it writes under.

    All its sessions hold a shared lock on ``id``.  Who takes over one of its names ends all that have the lock, and a
    session that begins later finds that the name has another holder.
    """

    def __init__(self) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()} {uuid4().hex}"
        self.names: list[InstanceName] = []


class PostgresSession:
    """A session of the database at ``address``, for ``holder``, with ``settings`` of its own.

    ``number`` counts the sessions that there were, so that who keeps something in a session notices that it is another
    one.  ``ending`` is set when nothing is waited for any longer.
    """

    def __init__(
        self, address: Address, ending: Event, holder: Holder, settings: Mapping[str, str] | None = None
    ) -> None:
        self.address = address
        self.holder = holder
        self.number = 0
        self._ending = ending
        self._settings = dict(settings or {})
        self._name = uuid4().hex
        self._mark = 0  # of the last transaction
        self._rollbacks = 0
        self._backend: Sequence[object] = ()  # its process at the server
        self._connection: psycopg.Connection | None = None
        self._begun = False
        self._opening: str | None = None  # BEGIN, as long as it was not said
        self._added: list[tuple[str, Sequence[object]]] = []  # likewise

    def connect(self) -> psycopg.Connection:
        """Return the driver's connection, a new one if there is none."""
        if self._connection is None:
            with self.refusals():
                connection = psycopg.connect(self.address.conninfo, autocommit=True)
                connection.prepared_max = PREPARED
                try:
                    self._configure(connection)
                except BaseException:
                    connection.close()
                    raise
            self._connection = connection
            self.number += 1
        return self._connection

    def close(self, last: str = "") -> None:
        """End the session, if there is one, after a ``last`` statement; what it had begun is undone."""
        if last and self._connection is not None:
            with suppress(SessionLostError):
                self.run(last)
        self._begun = False
        self._forget()
        self._drop()

    # ---- statements

    def run(self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows: in the transaction, if one was begun; else at once and by itself.

        One that comes again and again is prepared, unless it is about tables that may get columns of other types.
        """
        with self.refusals():
            with self._saying() as connection:
                cursor = connection.execute(sql, parameters or None, prepare=None if prepare else False)
            return cursor.fetchall() if cursor.description else []

    def add(self, sql: str, parameters: Sequence[object]) -> None:
        """Let a statement whose rows nobody needs run before the next one of the transaction, which fails as it does.

        That one may be COMMIT.  Outside a transaction it runs at once.
        """
        if self._begun:
            self._added.append((sql, parameters))
        else:
            self.run(sql, parameters)

    def run_in_turn(self, *statements: tuple[str, Sequence[object]]) -> list[list[tuple[Any, ...]]]:
        """Run statements, which may run twice, in one trip, and return the rows of each.

        Each has a snapshot of its own, which is not older than the end of the one before it.
        """

        def run() -> list[list[tuple[Any, ...]]]:
            with self.refusals():
                connection = self.connect()
                try:
                    with connection.pipeline():
                        cursors = [connection.execute(sql, parameters) for sql, parameters in statements]
                except psycopg.Error:
                    self._drop()  # because of what rollback() says
                    raise
                return [cursor.fetchall() for cursor in cursors]

        return self._twice(run)

    def ask(self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:
        """Run a statement that may run twice, outside a transaction: again, if only now we learn of a lost session."""
        return self._twice(lambda: self.run(sql, parameters, prepare=prepare))

    def run_foreign(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of somebody else, in a transaction: more than one in a text are refused."""
        with self.refusals():
            with self._saying(in_pipeline=True) as connection:  # only the simple protocol, which is none, takes several
                cursor = connection.execute(sql, parameters or None, prepare=False)
            return cursor.fetchall() if cursor.description else []

    def run_many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement of somebody else once per item."""
        with self.refusals(), self._saying() as connection:
            connection.prepare_threshold, usual = None, connection.prepare_threshold  # for this one there is no option
            try:
                connection.cursor().executemany(sql, parameters)
            finally:
                connection.prepare_threshold = usual

    def types_of(self, sql: str) -> list[int]:
        """Return the types, as OIDs, of the columns that a query has; a domain is the type behind it."""
        with self.refusals():
            with self._saying() as connection:
                cursor = connection.execute(f"{sql} LIMIT 0", prepare=False)
            columns = cursor.description
        return [column.type_code for column in columns or ()]

    def refresh(self) -> None:
        """Connect, anew if the session was lost while nothing was asked."""
        if self._has_unread():  # the server has nothing to say to us now, unless it ends the session
            self.ask("SELECT")

    # ---- transactions

    def begin(self, how: str = "") -> None:
        """Begin a transaction; what follows runs in it until ``commit`` or ``rollback``."""
        self.refresh()
        self._begun, self._opening = True, f"BEGIN {how}"

    @property
    def begun(self) -> bool:
        """Whether a transaction was begun and not ended, even if the session has been lost meanwhile."""
        return self._begun

    def commit(self) -> None:
        """Make the transaction durable; after StoreError nothing of it is, and it is undone.

        If the session is lost over that, the server is asked what became of the transaction, until it answers;
        OutcomeUnknownError if ``ending`` is set before.
        """
        status = TransactionStatus.INTRANS if self._opening is None else TransactionStatus.IDLE
        if not self._begun or self._current().info.transaction_status != status:
            raise self._undone()
        backend = self._backend
        self._mark += 1
        self.add(_MARK, (self._name, self._mark))
        try:
            self.run("COMMIT")
        except SessionLostError as lost:
            self._begun = False
            if not self._was_committed(backend):
                raise SessionLostError(f"{lost}; nothing was committed") from lost
        self._begun = False

    def rollback(self) -> None:
        """Undo the transaction; the server does if the session is lost, so one that cannot do even this is ended."""
        self._begun = False
        self._forget()
        # What was said in one trip, and passed over by the server because of an error, is taken for prepared by the
        # driver until there is a ROLLBACK that it has not seen before.
        self._rollbacks += 1
        if not self._is_idle():
            with suppress(StoreError):
                self.run(f"ROLLBACK -- {self._rollbacks}")
            if not self._is_idle():
                self._drop()

    # ---- inside

    def _configure(self, connection: psycopg.Connection) -> None:
        version = connection.info.server_version // 10_000
        if version < OLDEST:
            raise StoreError(f"database {self.address.name!r} has PostgreSQL {version}: use {OLDEST} or newer")
        connection.execute(_OF_OURS)
        connection.execute(_CONFIGURE, ([*self._settings], [*self._settings.values()]))
        self._backend = connection.execute(_BACKEND).fetchone() or ()
        connection.execute(_HOLD, (self.holder.id,))
        if self.holder.names:
            lost = connection.execute(_LOST, (self.holder.names, self.holder.id)).fetchall()
            if lost:
                raise StoreError(
                    f"database {self.address.name!r}: another process has written as {lost[0][0]!r} since sessions of "
                    "this one were lost: restart this one, so that it learns what the other wrote"
                )

    def _drop(self) -> None:
        if self._connection is not None:
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
    def _saying(self, *, in_pipeline: bool = False) -> Iterator[psycopg.Connection]:
        """Say what waits together with what is said inside."""
        connection = self._current()
        opening: list[tuple[str, Sequence[object]]] = [] if self._opening is None else [(self._opening, ())]
        waiting = opening + self._added
        self._forget()
        if not waiting and not in_pipeline:
            yield connection
            return
        with connection.pipeline():
            for sql, parameters in waiting:
                connection.execute(sql, parameters or None)
            yield connection

    def _forget(self) -> None:
        self._opening = None
        self._added.clear()

    def _has_unread(self) -> bool:
        poll = select.poll()
        with self.refusals():
            poll.register(self.connect().fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _current(self) -> psycopg.Connection:
        if self._begun and self._connection is None:
            raise self._undone()
        return self.connect()

    def _is_idle(self) -> bool:
        connection = self._connection
        return connection is None or connection.info.transaction_status == TransactionStatus.IDLE

    def _undone(self) -> StoreError:
        return StoreError(
            f"database {self.address.name!r} has undone this transaction after an error: begin another one"
        )

    def _was_committed(self, backend: Sequence[object]) -> bool:
        while True:
            try:
                self.ask(_END_BACKEND, backend)
                self.begin()
                self.run(_PATIENTLY)
                ((mark,),) = self.run(_MARKED, (self._name,))
            except StoreError as error:
                why = str(error)
            else:
                return bool(mark == self._mark)
            finally:
                self.rollback()
            if self._ending.wait(_ASK_AGAIN):
                raise OutcomeUnknownError(f"nobody knows whether this was committed: we end before we could ask: {why}")

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn what the driver raises into StoreError."""
        try:
            yield
        except psycopg.Error as error:
            lost = self._connection is None or self._connection.closed or _is_fatal(error)
            if lost:
                self._drop()
            kind = SessionLostError if lost else ValueRefusedError if _is_of_values(error) else StoreError
            raise kind(self._said(error)) from error
        except (UnicodeEncodeError, OverflowError) as error:  # of a value that cannot be sent
            raise ValueRefusedError(f"database {self.address.name!r}: {error}") from error

    def _said(self, error: psycopg.Error) -> str:
        parts = [error.diag.message_primary, error.diag.message_detail]
        said = "; ".join(part for part in parts if part) or " ".join(str(error).split())
        for secret in self.address.secrets:
            said = said.replace(secret, "…")
        state = error.sqlstate or ""
        cures = [cure for start, cure in CURES.items() if state.startswith(start)]
        if not state:
            cures = [cure for words, cure in _CONNECT_CURES.items() if words in said]
        return "; ".join([f"database {self.address.name!r}: {said}", *cures[:1]])


def _is_of_values(error: psycopg.Error) -> bool:
    if error.sqlstate is None:
        return isinstance(error, (psycopg.DataError, psycopg.ProgrammingError))  # the driver has no form for it
    return error.sqlstate.startswith(_OF_VALUES)


def _is_fatal(error: psycopg.Error) -> bool:
    return error.diag.severity_nonlocalized in ("FATAL", "PANIC")


def _hide(url: str) -> str:
    """Return a URL that could not be read, without what may be a password in it."""
    start, slashes, rest = url.partition("://")
    rest = re.sub(r"^.*@", "…@", rest, flags=re.DOTALL).partition("?")[0]
    return f"{start}{slashes}{rest}" if "@" in rest else f"{start}{slashes}…"
