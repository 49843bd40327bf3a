"""Shared by tests of the PostgreSQL store: a fresh database for each test, other connections, and faults."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from replication.storage.postgres.store import PostgresStore
from replication.streams.definitions import StreamDefinition
from tests.contract.stream_store import ORDERS, UsesStore
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twisted.trial.unittest import SynchronousTestCase as _Case

    from replication.storage.postgres.store import PostgresSequence
    from replication.storage.receipts import ReceiptClock
    from tests.postgres import PostgresServer
else:
    _Case = object

OTHERS = "datname = current_database() AND pid <> pg_backend_pid()"


class HasDatabase(_Case):
    """A database of its own for each test, on the server of this run."""

    server: PostgresServer
    database: str

    @pytest.fixture(autouse=True)
    def _fresh_database(self, postgres: PostgresServer) -> Iterator[None]:
        self.server = postgres
        with postgres.database() as self.database:
            yield

    @property
    def url(self) -> str:
        """Where the database of this test is."""
        return self.server.url(self.database)

    def sql(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run SQL on another program's connection."""
        return self.server.sql(sql, *parameters, database=self.database)

    def configure(self, setting: str, value: str) -> None:
        """Set a default for new sessions of this database."""
        self.server.sql(f"ALTER DATABASE {self.database} SET {setting} = '{value}'")

    def end_sessions(self) -> None:
        """End all present sessions of this database."""
        self.server.end_sessions(f"FROM pg_stat_activity WHERE {OTHERS}", database=self.database)

    def at_each(self, table: str, statement: str, *, deferred: bool = False) -> None:
        """Run PL/pgSQL for each row inserted into a table; with ``deferred``, at COMMIT."""
        self.sql("CREATE SEQUENCE times")
        self.sql(f"CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {statement} RETURN NULL; END $$")
        kind, when = ("CONSTRAINT TRIGGER", "DEFERRABLE INITIALLY DEFERRED") if deferred else ("TRIGGER", "")
        self.sql(f'CREATE {kind} act AFTER INSERT ON "{table}" {when} FOR EACH ROW EXECUTE FUNCTION act()')

    def times(self) -> int:
        """Return how often ``nextval('times')`` was asked for, in transactions that were undone too."""
        ((last, called),) = self.sql("SELECT last_value, is_called FROM times")
        return int(last) if called else 0

    @contextmanager
    def when_waiting_for(self, event: str, act: Callable[[], object]) -> Iterator[None]:
        """Call ``act`` on a thread as soon as a session of this database waits for ``event``."""
        waiting = f"SELECT pid FROM pg_stat_activity WHERE wait_event = '{event}' AND {OTHERS}"

        def watch() -> None:
            until(lambda: self.sql(waiting), f"a session waits for {event}")
            act()

        watcher = Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            watcher.join()

    @contextmanager
    def standby_missing(self) -> Iterator[None]:
        """Let every COMMIT wait, when it is on disk already, for a missing standby (``SyncRep``)."""
        self.sql("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
        self.sql("SELECT pg_reload_conf()")
        until(self._commits_wait, "the server has read it")
        try:
            yield
        finally:
            self.sql("ALTER SYSTEM RESET synchronous_standby_names")
            self.sql("SELECT pg_reload_conf()")
            until(lambda: self.sql("SHOW synchronous_standby_names") == [("",)], "the server has read it")

    def _commits_wait(self) -> bool:
        """Whether a COMMIT waits for a standby.  The checkpointer must have read the setting, not only sessions."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as probe:
            pid = probe.info.backend_pid
            committing = Thread(target=probe.execute, args=("SELECT pg_logical_emit_message(true, 'probe', '')",))
            committing.start()

            def waits() -> bool:
                found = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid = %s"
                return bool(self.sql(found, pid))

            until(lambda: not committing.is_alive() or waits(), "the commit has ended, or waits")
            found = waits()
            self.sql("SELECT pg_cancel_backend(%s)", pid)
            committing.join()
        return found


class OnPostgres(HasDatabase, UsesStore):
    """A store on a database of its own."""

    store: PostgresStore

    def make_store(self, clock: ReceiptClock) -> PostgresStore:
        return PostgresStore(self.url, self.pump, clock=clock)

    def sequence(self, store: PostgresStore | None = None) -> PostgresSequence:
        """Return where the IDs of ``orders`` come from."""
        sequence = (store or self.store).sequence(ORDERS)
        assert sequence is not None
        return sequence

    def another_store(self, **options: Any) -> PostgresStore:
        """Open a second store, as another process would, with the stream ``orders``."""
        store = PostgresStore(self.url, self.pump, **options)
        self.wait(store.open())
        self.addCleanup(lambda: self.wait(store.close()))
        self.wait(store.declare(StreamDefinition(ORDERS)))
        return store
