"""A sequence that another session has locked, or waits to lock, delays its own stream only."""

from __future__ import annotations

import threading

from twisted.trial.unittest import SynchronousTestCase

from replication.streams.definitions import StreamDefinition
from tests.storage.postgres.test_watch import INSERT, UsesWatch
from tests.system.daemons import until


class LockedSequenceTests(UsesWatch, SynchronousTestCase):
    """Each first poll of a locked sequence waits until the server gives up."""

    def test_a_lock_on_the_sequence_itself_is_an_error_of_its_stream_only(self) -> None:
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        self.watched = self.watch(StreamDefinition("others", table="others", id_column="id", row=["name"]))
        self.assertEqual(self.poll(3), (1, 1))
        slow = self.connect("TRUNCATE events RESTART IDENTITY", application_name="nightly")
        self.sql("INSERT INTO others (name) VALUES ('a')")
        self.assertEqual(self.poll(3, "others"), (2, 2))
        error = self.error() or ""
        self.assertIn(f"is locked by session {slow.info.backend_pid} of postgres (nightly) since 20", error)
        self.assertEqual(self.poll(), (1, 1))
        slow.rollback()
        self.sql(INSERT)
        self.wait_for_lock()
        self.assertEqual(self.poll(3), (2, 2))
        self.assertIsNone(self.error())

    def test_a_session_that_waits_for_a_lock_on_the_sequence_delays_its_stream_only(self) -> None:
        """A request behind it would wait, too, although the lock is not granted."""
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        self.watched = self.watch(StreamDefinition("others", table="others", id_column="id", row=["name"]))
        self.poll(3)
        long = self.connect(INSERT)
        waiting = self.connect(autocommit=True)
        altering = threading.Thread(target=waiting.execute, args=("ALTER SEQUENCE events_id_seq NO CYCLE",))
        altering.start()
        self.addCleanup(altering.join)
        asked = "SELECT true FROM pg_locks WHERE NOT granted AND relation = 'events_id_seq'::regclass"
        until(lambda: self.sql(asked), "it waits for the lock")
        self.sql("INSERT INTO others (name) VALUES ('a')")
        self.assertEqual(self.poll(3, "others"), (2, 2))
        self.assertIn(f"is locked by session {waiting.info.backend_pid} of postgres", self.error() or "")
        long.commit()
        altering.join()
        self.wait_for_lock()
        self.assertEqual(self.poll(3), (2, 2))

    def test_a_restart_of_a_sequence_that_was_locked_is_found(self) -> None:
        self.sql(INSERT)
        self.assertEqual(self.poll(3), (2, 2))
        slow = self.connect("TRUNCATE events RESTART IDENTITY", INSERT)
        self.assertIn("is locked by session", self.error() or "")
        slow.commit()
        self.wait_for_lock()
        self.assertIn("its table was truncated with RESTART IDENTITY", self.error() or "")

    def wait_for_lock(self) -> None:
        """Wait until locked sequences are looked at again."""
        until(lambda: "is locked by" not in (self.error() or ""), "the lock is gone")
