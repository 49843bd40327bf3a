"""Sequences that several processes share, and claims of names, which they do not share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError, StoreError
from replication.storage.contract import Batch
from replication.storage.postgres import ids as postgres_ids
from replication.storage.postgres.address import Address
from replication.storage.postgres.connection import PostgresConnection
from replication.storage.postgres.generic import GenericTable
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.ids import (
    CLAIMS,
    IDS_SETTINGS,
    TAKE_OVER_SETTINGS,
    Allocations,
    PostgresIds,
    move_forward,
)
from replication.storage.postgres.pipeline import Pipeline
from replication.storage.postgres.session import PostgresSession, SessionLostError
from replication.streams.definitions import StreamDefinition
from tests.contract.stream_store import ME, OTHER, facts, write
from tests.storage.on_postgres import HasDatabase
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.wire.grammar import InstanceName

ROOT = Path(__file__).parents[3]
HOLD = """
import sys
from threading import Event
from replication.storage.postgres.ids import Allocations, PostgresIds
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.address import Address
from replication.storage.postgres.session import PostgresSession

ids = PostgresIds(PostgresSession(Address.parse(sys.argv[1]), Event(), Holder()), Allocations(print))
ids.claim("master")
print("held", flush=True)
sys.stdin.read()
"""


class UsesIds(HasDatabase):
    def setUp(self) -> None:
        self.ending = Event()
        self.connection = PostgresConnection(self.make_session(), read_only=False)
        self.connection.open()
        self.warnings: list[str] = []
        self.ids = self.make_ids()

    def make_session(self, holder: Holder | None = None, settings: Mapping[str, str] | None = None) -> PostgresSession:
        session = PostgresSession(Address.parse(self.url), self.ending, holder or Holder(), settings)
        self.addCleanup(session.close)
        return session

    def make_ids(self) -> PostgresIds:
        return PostgresIds(self.make_session(settings=IDS_SETTINGS), Allocations(self.warnings.append))

    def declare(self, name: str = "orders", *, negative: bool = False) -> list[str]:
        """Declare a stream and return the warnings."""
        return self.connection.declare([GenericTable(StreamDefinition(name, negative=negative))])

    def allocate(self, count: int = 1, *, stream: str = "orders") -> list[int]:
        return self.ids.allocate(f'"stream_{stream}_seq"', count)


class SequenceTests(UsesIds, SynchronousTestCase):
    def test_trap_39_the_first_id_is_2_and_1_counts_as_used(self) -> None:
        self.assertEqual(self.declare(), [])
        self.assertEqual(self.sql("SELECT last_value, is_called FROM stream_orders_seq"), [(1, True)])
        self.assertEqual(self.allocate(), [2])

    def test_ids_are_allocated_in_blocks_ascending_and_each_once(self) -> None:
        self.declare()
        other = self.make_ids()
        last_value = [self.allocate(3), other.allocate('"stream_orders_seq"', 2), self.allocate(), self.allocate(1000)]
        self.assertEqual(last_value, [[2, 3, 4], [5, 6], [7], [*range(8, 1008)]])

    def test_declaring_again_allocates_nothing(self) -> None:
        self.declare()
        self.allocate(5)
        self.assertEqual(self.declare(), [])
        self.assertEqual(self.allocate(), [7])

    def test_trap_38_a_sequence_behind_the_table_is_moved_forward_with_a_warning(self) -> None:
        """As after a database was moved without its sequences."""
        self.declare()
        self.sql("INSERT INTO stream_orders VALUES (500, 0, 'master', '1'), (700, 0, 'gone', '1')")
        (warning,) = self.declare()
        for word in ("'orders'", '"stream_orders_seq" was at 1', "ID 700", "moved forward"):
            self.assertIn(word, warning)
        self.assertEqual((self.allocate(), self.declare()), ([701], []))

    def test_trap_40_a_sequence_behind_a_stored_position_is_moved_forward(self) -> None:
        """The largest ID was rolled back and published: it is not allocated again."""
        for name, negative in (("orders", False), ("backfill", True)):
            self.declare(name, negative=negative)
            self.sql("INSERT INTO stream_positions VALUES (%s, 'old', %s)", name, -900 if negative else 900)
            self.assertEqual(len(self.declare(name, negative=negative)), 1)
            self.assertEqual(self.ids.allocate(f'"stream_{name}_seq"', 1), [901])

    def test_tables_that_are_declared_together_get_a_sequence_each(self) -> None:
        tables = [GenericTable(StreamDefinition(f"s{number}")) for number in range(4)]
        self.sql("INSERT INTO stream_positions VALUES ('s1', 'master', 7)")
        self.sql("CREATE SEQUENCE stream_s2_seq")
        moved, missing = self.connection.declare(tables)
        self.assertIn('sequence "stream_s1_seq" was at', moved)
        self.assertIn("stream 's1': its table was missing", missing)
        self.assertEqual([self.allocate(stream=f"s{number}") for number in range(4)], [[2], [8], [2], [2]])
        self.sql("INSERT INTO stream_s3 VALUES (700, 0, 'master', '[]')")
        (warning,) = self.connection.declare(tables)
        self.assertIn("'s3'", warning)
        self.assertEqual(self.connection.declare(tables), [])

    def test_rows_in_a_child_of_a_generic_table_count(self) -> None:
        tables = [GenericTable(StreamDefinition(name)) for name in ("orders", "others")]
        self.connection.declare(tables)
        self.sql("CREATE TABLE more () INHERITS (stream_orders)")
        self.sql("INSERT INTO more VALUES (5, 0, 'master', '[]')")
        self.assertEqual(self.connection.positions_of(tables), {"orders": {ME: 5}, "others": {}})

    def test_f15_a_sequence_that_is_ahead_is_left_alone_and_is_no_position(self) -> None:
        """A standby that became the primary is up to 32 values ahead (ES#18544)."""
        table = GenericTable(StreamDefinition("orders"))
        self.connection.declare([table])
        self.sql("INSERT INTO stream_orders VALUES (5, 0, 'master', '1')")
        self.sql("SELECT setval('stream_orders_seq', 37)")
        self.assertEqual((self.declare(), self.connection.positions(table)), ([], {ME: 5}))
        self.assertEqual(self.allocate(), [38])

    def test_ids_that_others_allocate_while_it_is_moved_are_not_allocated_again(self) -> None:
        self.declare()
        self.sql("SELECT setval('stream_orders_seq', 50)")
        self.ids._allocations._highest['"stream_orders_seq"'] = 40
        self.assertEqual((self.allocate(), self.warnings), ([51], []))

    def test_a_sequence_that_was_moved_further_is_not_set(self) -> None:
        """Setting it to the value that was read would take back what others allocate meanwhile."""
        self.declare()
        fetched = "SELECT last_value, log_cnt > 0 FROM stream_orders_seq"  # setval() resets log_cnt
        self.sql("ALTER SEQUENCE stream_orders_seq RESTART WITH 50")
        for _ in range(2):
            move_forward(self.ids.session, '"stream_orders_seq"', 40)
            self.assertEqual(self.sql(fetched), [(50, True)])
        move_forward(self.ids.session, '"stream_orders_seq"', 60)
        self.assertEqual(self.sql(fetched), [(60, False)])
        self.assertEqual(self.allocate(), [61])

    def test_f16_a_sequence_that_goes_back_is_moved_forward_with_a_warning(self) -> None:
        """It was restored from an old backup, or a crash lost values without rows."""
        self.declare()
        self.allocate(10)
        self.sql("SELECT setval('stream_orders_seq', 3)")
        self.assertEqual(self.allocate(2), [12, 13])
        (warning,) = self.warnings
        self.assertIn('"stream_orders_seq" went back to 4 after 11', warning)

    def test_a_lost_session_costs_no_id_twice(self) -> None:
        self.declare()
        self.ids.claim(ME)
        first = self.allocate(3)
        self.end_sessions()
        self.assertEqual((first, self.allocate(3)), ([2, 3, 4], [5, 6, 7]))

    def test_what_would_not_ascend_is_refused_with_its_cure(self) -> None:
        """With a cache, a session uses values later, below IDs that are settled by then."""
        for bad in ("CACHE 10", "CYCLE", "INCREMENT -1"):
            self.sql("DROP SEQUENCE IF EXISTS stream_orders_seq")
            self.sql(f"CREATE SEQUENCE stream_orders_seq {bad}")
            message = str(self.assertRaises(SchemaError, self.declare))
            self.assertIn('ALTER SEQUENCE "stream_orders_seq" INCREMENT 1', message)
        self.sql("DROP SEQUENCE stream_orders_seq")
        self.sql("CREATE SEQUENCE stream_orders_seq CACHE 10")
        self.sql(message.partition("ascending order: ")[2])
        self.declare()

    def test_another_relation_of_that_name_is_refused(self) -> None:
        self.sql("CREATE TABLE stream_orders_seq (a integer)")
        self.assertIn("is not a sequence", str(self.assertRaises(SchemaError, self.declare)))

    def test_a_sequence_that_is_gone_is_named(self) -> None:
        self.declare()
        self.sql("DROP SEQUENCE stream_orders_seq")
        self.assertIn("stream_orders_seq", str(self.assertRaises(StoreError, self.allocate)))


class ClaimTests(UsesIds, SynchronousTestCase):
    def refusal(self, ids: PostgresIds, name: InstanceName = ME) -> str:
        message = str(self.assertRaises(StoreError, ids.claim, name))
        self.assertIn(repr(ids.session.address.name), message)
        return message

    def test_f17_a_second_process_of_one_name_is_refused_with_the_holder(self) -> None:
        self.ids.claim(ME)
        other = self.make_ids()
        message = self.refusal(other)
        ((pid,),) = self.ids.session.run("SELECT pg_backend_pid()")
        for word in ("'master'", f"replication {socket.gethostname()}:{os.getpid()}"[:63], "127.0.0.1", str(pid)):
            self.assertIn(word, message)
        other.claim(OTHER)
        self.ids.close()
        other.claim(ME)

    def test_a_name_that_could_not_be_written_down_is_not_held(self) -> None:
        self.sql("ALTER TABLE writer_claims RENAME TO away")
        self.refusal(self.ids)
        self.sql("ALTER TABLE away RENAME TO writer_claims")
        other = self.make_ids()
        other.claim(ME)
        self.refusal(self.ids)

    def test_names_of_other_databases_and_schemas_are_other_names(self) -> None:
        self.ids.claim(ME)
        self.sql("CREATE SCHEMA elsewhere")
        session = self.make_session(settings={"search_path": "elsewhere"})
        PostgresConnection(session, read_only=False).open()
        PostgresIds(session, Allocations()).claim(ME)

    def test_the_name_of_a_process_that_was_killed_is_free(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, self.url], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            self.assertEqual(child.stdout.readline(), "held\n")
            self.assertIn(f":{child.pid}'", self.refusal(self.ids))
            child.kill()
        gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name LIKE %s"
        until(lambda: self.sql(gone, f"%:{child.pid}") == [(True,)], "the server has noticed")
        self.ids.claim(ME)

    def test_names_are_held_again_by_the_session_that_comes_after_a_lost_one(self) -> None:
        self.declare()
        self.ids.claim(ME)
        self.ids.claim(OTHER)
        self.end_sessions()
        self.assertEqual(self.allocate(), [2])
        for name in (ME, OTHER):
            self.refusal(self.make_ids(), name)

    def test_a_name_of_a_machine_that_has_vanished_is_free_soon(self) -> None:
        """Also if the machine has not acknowledged an answer: then TCP sends that again, and no keepalives."""
        times = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
        idle, interval, probes, unacknowledged = [int(self.ids.session.run(f"SHOW {each}")[0][0]) for each in times]
        self.assertEqual((idle + interval * probes, unacknowledged), (30, 30_000))

    def test_f17_a_name_is_claimed_again_before_an_id_is_allocated(self) -> None:
        """A restart of the server releases the claim; each allocation renews it first."""
        self.ids.claim(ME)
        self.end_sessions()
        self.ids.claim(ME)
        self.assertIn("another process writes as", str(self.assertRaises(StoreError, self.make_ids().claim, ME)))

    def test_f17_no_id_is_allocated_by_a_process_that_has_lost_its_name(self) -> None:
        self.declare()
        self.ids.claim(ME)
        self.end_sessions()
        other = self.make_ids()
        other.claim(ME)
        for _ in range(2):
            self.assertIn("taken over the name 'master'", str(self.assertRaises(StoreError, self.allocate)))
        self.assertEqual(other.allocate('"stream_orders_seq"', 1), [2])

    def test_f17_nor_by_one_whose_name_was_used_meanwhile(self) -> None:
        """It has not read what the other process wrote, so its followers would not receive that."""
        self.declare()
        self.ids.claim(ME)
        self.end_sessions()
        other = self.make_ids()
        other.claim(ME)
        other.close()
        for _ in range(2):
            self.assertIn("restart this process", str(self.assertRaises(StoreError, self.allocate)))
        self.make_ids().claim(ME)

    def writer(self, ids: PostgresIds) -> tuple[PostgresConnection, Batch]:
        """Return another connection of the process that ``ids`` is of, and something to commit."""
        table = GenericTable(StreamDefinition("orders"))
        connection = PostgresConnection(self.make_session(ids.session.holder), read_only=False)
        connection.declare([table])
        return connection, Batch([(table, write(2, facts(2)))], None, 0.0, 0.0)

    def end_session_of(self, ids: PostgresIds) -> None:
        """End the session that holds a process's claims."""
        ((pid,),) = ids.session.run("SELECT pg_backend_pid()")
        self.server.end_sessions("FROM pg_stat_activity WHERE pid = %s", pid)

    def test_f17_nothing_is_committed_by_a_process_that_has_lost_its_name(self) -> None:
        """It has allocated IDs before, and its writing session is another than the one with the claim."""
        self.ids.claim(ME)
        connection, batch = self.writer(self.ids)
        self.end_session_of(self.ids)
        self.make_ids().claim(ME)
        for _ in range(2):
            (error,) = connection.commit_together([batch])
            self.assertIn("restart this process", str(error))
        self.assertEqual(self.sql("SELECT * FROM stream_orders"), [])

    def commit_in_thread(self, connection: PostgresConnection, batch: Batch) -> tuple[Thread, list[Exception | None]]:
        """Return a thread that commits, and where its outcome will be."""
        outcomes: list[Exception | None] = []
        committing = Thread(target=lambda: outcomes.extend(connection.commit_together([batch])))
        self.addCleanup(committing.join)
        self.addCleanup(self.ending.set)
        return committing, outcomes

    def test_f9_no_commit_of_the_last_holder_is_in_progress_when_a_name_is_claimed(self) -> None:
        """The new holder reads the positions once, after the claim; the last one reads that its commit was undone."""
        self.ids.claim(ME)
        connection, batch = self.writer(self.ids)
        self.at_each("stream_orders", "PERFORM pg_sleep(60);", deferred=True)
        committing, outcomes = self.commit_in_thread(connection, batch)
        self.end_session_of(self.ids)
        with self.when_waiting_for("PgSleep", lambda: self.make_ids().claim(ME)):
            committing.start()
        self.assertEqual(self.sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"), [(0,)])
        until(lambda: outcomes, "the commit has an outcome", 20)  # otherwise later appends would wait, too
        self.assertIn("taken over the name 'master'", str(outcomes[0]))
        self.assertEqual(self.sql("SELECT * FROM stream_orders"), [])

    def test_f10_a_process_that_has_lost_its_name_reads_that_its_last_commit_is_durable(self) -> None:
        """The session is lost after COMMIT has taken effect; then the name is."""
        self.ids.claim(ME)
        connection, batch = self.writer(self.ids)
        run = Pipeline.run

        def run_and_lose(pipeline: Pipeline, statements: Any) -> Any:
            results = run(pipeline, statements)
            if any(sql == "COMMIT" for sql, _ in statements):
                self.patch(Pipeline, "run", run)
                self.end_session_of(self.ids)
                self.make_ids().claim(ME)
                raise psycopg.OperationalError("the connection is lost")
            return results

        self.patch(Pipeline, "run", run_and_lose)
        committing, outcomes = self.commit_in_thread(connection, batch)
        committing.start()
        until(lambda: outcomes, "the commit has an outcome", 20)
        self.assertEqual(outcomes, [None])
        self.assertIn("taken over the name 'master'", str(connection.commit_together([batch])[0]))
        self.assertEqual(self.sql("SELECT stream_id FROM stream_orders"), [(2,)])

    def test_f17_a_takeover_that_fails_half_way_is_finished_by_the_next_one(self) -> None:
        self.ids.claim(ME)
        connection, _ = self.writer(self.ids)
        self.end_session_of(self.ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgres_ids, "END_SESSIONS", "SELECT nothing(%s)")
            self.refusal(self.make_ids())
        self.assertEqual(connection.session.run("SELECT 1"), [(1,)], "it lives on")
        self.make_ids().claim(ME)
        self.assertRaises(SessionLostError, connection.session.run, "SELECT 1")
        self.assertEqual(self.sql("SELECT count(*) FROM writer_claims"), [(1,)])

    def test_f17_a_takeover_that_may_not_end_a_session_leaves_the_claim(self) -> None:
        """The process has connected again just before, as another user; its later sessions are refused."""
        self.ids.claim(ME)
        connection, _ = self.writer(self.ids)
        self.end_session_of(self.ids)
        self.sql("CREATE ROLE limited LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO limited")
        self.addCleanup(self.sql, "DROP OWNED BY limited; DROP ROLE limited")
        taking = PostgresIds(self.make_session(settings=TAKE_OVER_SETTINGS), Allocations())
        taking.session.run("SET SESSION AUTHORIZATION limited")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgres_ids, "CLAIMS", "SELECT unnest(%s::text[]), false")  # as it was before
            message = str(self.assertRaises(StoreError, taking.take_over, ME))
        self.assertIn("GRANT it to this user", message)
        self.assertEqual(connection.claims([ME]), {ME: True})
        self.assertEqual(connection.session.run("SELECT 1"), [(1,)], "it lives on")
        self.assertIn("taken over the name", str(self.assertRaises(StoreError, self.ids.claim, ME)))
        connection.session.close()
        until(lambda: taking.session.run(CLAIMS, ([ME],)) == [(ME, False)], "its sessions have ended")
        self.assertTrue(taking.take_over(ME))
        taking.close()

    def test_f9_a_crash_of_the_server_takes_no_claim_back(self) -> None:
        """An allocation does not wait for the disk; a claim does."""
        self.assertEqual(self.ids.session.run("SHOW synchronous_commit"), [("off",)])
        self.declare()
        self.ids.claim(ME)
        self.server.restart("immediate")
        self.assertGreaterEqual(self.allocate()[0], 2)
