"""A worker: its options, its start and stop, and facts of real masters that arrive once and in order."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.python import threadable
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import (
    ConfigError,
    LocalProtocolError,
    NotAWriterError,
    PositionTimeoutError,
    ReplicationError,
    SchemaError,
    StoreError,
    StreamError,
    UnknownStreamError,
)
from replication.follower import worker as worker_module
from replication.follower.catch_up import CatchUpSources
from replication.follower.worker import Worker
from replication.net.protocol import Limits
from replication.presence.last_seen import LastSeen
from replication.storage import open_store
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.interfaces import Write
from replication.web.site import make_site
from replication.wire.commands import FederationAck, Position, RemoteServerUp, Server
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.master import Master
from tests.doubles import FragileStore, Net, SharedStore, begin, connect, error_of, lines_of, logged, now
from tests.follower.cases import HELLO, HTTP, MASTER, ORDERS, WIRE, WorkerCase, contents, position, rdata
from tests.net.test_client import FakeWriter
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.net.protocol import ReplicationProtocol
    from replication.streams.facts import Fact


class RegistrationTests(WorkerCase):
    def test_a_function_registered_after_the_start_is_refused(self) -> None:
        self.serve(HELLO + position(1, 1))
        self.start()
        with self.assertRaisesRegex(StreamError, "before start"):
            self.apply()

    def test_a_string_is_refused_as_a_list(self) -> None:
        for option in ("connect", "streams", "catch_up"):
            with self.assertRaisesRegex(ConfigError, rf"{option} is a list, not a string: write {option}=\['x'\]"):
                self.make_worker(**{option: "x"})

    def test_a_decorator_without_parentheses_names_what_to_write(self) -> None:
        worker: Any = self.worker

        def show(*arguments: object) -> None:
            """Do nothing."""

        for decorator, use in (
            (worker.cached, r"@worker\.cached\(\)"),
            (worker.on_command, r"@worker\.on_command\(RemoteServerUp\)"),
            (worker.on_synapse_request, r"@master\.on_synapse_request\('send_event'\)"),
        ):
            with self.assertRaisesRegex(ConfigError, f"write {use} above show"):
                decorator(show)
        with self.assertRaises(ConfigError) as caught:
            worker.cached(show)
        self.assertEqual(str(caught.exception), "cached() takes options only: write @worker.cached() above show")

    def test_a_second_function_for_a_stream_is_refused(self) -> None:
        self.apply()
        with self.assertRaisesRegex(ConfigError, "'orders' has a function already"):
            self.apply()

    def test_a_function_for_a_stream_that_is_not_followed_is_refused(self) -> None:
        self.worker = self.make_worker(streams=["stock"])
        with self.assertRaises(ConfigError) as caught:
            self.apply()
        why = "on('orders'): it is not among the streams to follow; add it to streams, or to a daemon's key stream "
        self.assertEqual(str(caught.exception), f"{why}(option --stream)")

    def test_a_wait_for_a_stream_that_is_not_followed_fails_at_once(self) -> None:
        worker = self.make_worker(streams=["stock"])
        with self.assertRaisesRegex(ConfigError, "^wait_for.'orders'.: it is not among the streams to follow; add it"):
            worker.wait_for("orders", "master", 2)

    def test_a_cached_function_has_the_name_and_the_size_that_were_given(self) -> None:
        cached = self.worker.cached(max_entries=2, name="get_order")(lambda key: key)
        for key in "abc":
            cached(key)
        self.assertEqual(([*self.worker.caches.stats()], cached.cache_info().currsize), (["get_order"], 2))

    def test_an_invalid_stream_name_is_refused(self) -> None:
        for name in ("two words", ""):
            with self.assertRaises(ReplicationError):
                self.apply(name)
            with self.assertRaises(ReplicationError):
                self.make_worker(streams=[name])


class CommandTests(WorkerCase):
    def received_by(self, writer: FakeWriter) -> list[str]:
        return lines_of(writer.connections[-1].received)

    def test_user_sync_is_sent_at_each_connection_after_replicate(self) -> None:
        """A writer takes long to process many users: it answers REPLICATE first (docs/protocol/connection.md B1)."""
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        me = self.worker._reporter.instance_id
        with self.worker.user_syncing("@u:h"):
            self.net.run()
            self.assertRegex(self.received_by(writer)[-1], rf"^USER_SYNC {me} @u:h start \d+$")
            self.net.cut()
            self.net.run(1)
            self.assertEqual(
                [line.split()[0] for line in self.received_by(writer)], ["NAME", "PING", "REPLICATE", "USER_SYNC"]
            )
            begin(self.worker.stop())
        self.net.run()
        self.assertEqual(self.received_by(writer)[-2:], [f"CLEAR_USER_SYNC {me}", "ERROR server stopping"])

    def test_a_worker_shows_its_syncing_users_and_stores_no_places(self) -> None:
        self.assertEqual(self.worker.served.users_syncing(), {})
        with self.worker.user_syncing("@u:h"):
            self.assertEqual([*self.worker.served.users_syncing()[self.worker._reporter.instance_id]], ["@u:h"])
        with self.assertRaisesRegex(NotAWriterError, f"does not store where '{'u' * 100}' was seen: send") as caught:
            now(self.worker.served.places_of("u" * 200))
        self.assertEqual(caught.exception.instance, "worker1")

    def test_a_command_is_sent_to_all_writers(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9192"])
        writers = [self.serve(HELLO + position(1, 1)), self.serve(HELLO + position(1, 1), port=9192)]
        self.assertEqual(self.worker.remote_server_up("example.org"), 0)
        self.start()
        self.worker.federation_ack(Token(5))
        self.worker.user_ip("@u:h", "tok", "1.2.3.4")
        self.net.run()
        for writer in writers:
            ack, seen = self.received_by(writer)[-2:]
            self.assertEqual(ack, "FEDERATION_ACK worker1 5")
            self.assertTrue(seen.startswith('USER_IP @u:h ["tok","1.2.3.4","",null,'), seen)

    def test_commands_of_followers_are_received_only_where_there_are_followers(self) -> None:
        with self.assertRaises(ConfigError):
            self.worker.on_command(FederationAck)
        for options in ({"writes": ["mine"]}, {"relay": True}):
            worker = self.make_worker(database=FragileStore(), **options)
            for command in (FederationAck, Server):
                worker.on_command(command)(lambda command, peer: None)
            self.assertIsNone(now(worker.stop()))

    def test_functions_receive_commands_of_writers(self) -> None:
        received: list[object] = []

        @self.worker.on_command(RemoteServerUp)
        @self.worker.on_command(Server)
        def note(command: object, peer: ReplicationProtocol) -> None:
            received.append((command, peer.name))

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, rdata(2), b"REMOTE_SERVER_UP example.org\n")
        self.assertEqual(
            received, [(Server("example.com"), "example.com"), (RemoteServerUp("example.org"), "example.com")]
        )
        self.assertEqual(self.at(), 2)


class OptionTests(WorkerCase):
    """Each option reaches the connections, the sources of missed facts and the commands."""

    def test_the_clock_of_the_wall_is_in_ping_and_in_commands(self) -> None:
        self.worker = self.make_worker(wall=lambda: 7.0)
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        with self.worker.user_syncing("@u:h"):
            self.worker.user_ip("@u:h", "tok", "1.2.3.4", "agent", "device")
            self.net.run()
        me = self.worker._reporter.instance_id
        self.assertEqual(
            lines_of(writer.connections[0].received),
            [
                "NAME worker1",
                "PING 7000",
                "REPLICATE ",
                f"USER_SYNC {me} @u:h start 7000",
                'USER_IP @u:h ["tok","1.2.3.4","agent","device",7000]',
            ],
        )

    def test_the_limits_are_those_of_commands_and_of_connections(self) -> None:
        for relay in (False, True):
            self.worker = self.make_worker(limits=Limits(line_limit=60), relay=relay)
            writer = self.serve(HELLO + position(1, 1))
            self.start()
            with self.assertRaisesRegex(LocalProtocolError, "60"):
                self.worker.remote_server_up("x" * 60)
            with logged():
                self.send(writer, rdata(2, f'"{"x" * 60}"'))
            self.assertEqual(self.worker.faults, {"line too long": 1})
            begin(self.worker.stop())
            self.net.run()
            now(self.store.open())

    def test_the_secret_is_sent_to_the_sources_of_missed_facts(self) -> None:
        self.worker = self.make_worker(secret="s3cret")
        source = self.net.serving[HTTP] = FakeWriter(b"")
        self.serve(HELLO + position(9, 9))
        self.start()
        self.net.run(1.0)
        self.assertIn(b"\r\nAuthorization: Bearer s3cret\r\n", source.connections[0].received)

    def test_the_functions_for_requests_of_a_synapse_are_those_of_its_http(self) -> None:
        @self.worker.on_synapse_request("send_event")
        def answer(words: object, body: object) -> dict[str, object]:
            return {"words": words, "body": body}

        answered = self.worker.served.synapse_requests.answer("send_event", ["a"], {})
        self.assertEqual(now(answered), {"words": ["a"], "body": {}})

    def test_a_former_writer_is_fetched_from_its_configured_address(self) -> None:
        self.worker = self.make_worker(writers={"old": {"http": "http://127.0.0.1:9999"}})
        self.serve(HELLO + position(9, 9, writer="old"))
        with logged():
            self.start()
            self.net.run(1.0)
        self.assertIn(9999, self.net.attempted)


class StartTests(WorkerCase):
    def test_start_waits_for_the_first_positions_of_every_writer(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9094"])
        self.serve(HELLO + position(1, 1))
        second = self.serve(HELLO, port=9094)
        started = begin(self.worker.start())
        self.net.run()
        self.assertEqual(started, [])
        self.send(second, position(1, 1, writer="other"))
        self.assertEqual(started, [None])

    def test_a_first_position_that_comes_late_ends_the_start(self) -> None:
        writer = self.serve(HELLO)
        started = begin(self.worker.start())
        with logged() as messages:
            self.net.run(10.0)
            self.assertEqual(started, [])
            self.send(writer, position(1, 1))
        self.assertEqual((started, messages, len(writer.connections)), ([None], [], 1))

    def test_start_waits_for_a_writer_that_is_not_running_yet(self) -> None:
        with logged() as messages:
            started = begin(self.worker.start())
            self.net.run(30.0)
        self.assertEqual((started, len(messages)), ([], 1))
        self.serve(HELLO + position(1, 1))
        self.net.run(3.0)
        self.assertEqual(started, [None])

    def test_two_calls_of_start_start_once(self) -> None:
        self.serve(HELLO + position(1, 1))
        started = [begin(self.worker.start()) for _ in range(2)]
        self.net.run()
        self.assertEqual((started, self.net.attempted.count(WIRE)), ([[None], [None]], 1))
        self.start()

    def test_cancelling_one_wait_does_not_cancel_the_other(self) -> None:
        start = self.worker.start()
        one, two = begin(start), begin(self.worker.start())
        start.cancel()
        self.assertIsInstance(error_of(one), CancelledError)
        self.serve(HELLO + position(1, 1))
        with logged():
            self.net.run(1.0)
        self.assertEqual(two, [None])

    def test_every_caller_receives_the_error_of_the_database_and_no_connection_is_made(self) -> None:
        for operation in ("open", "declare"):
            self.worker = self.make_worker(streams=["orders"])
            self.store.errors = {operation: SchemaError("made by a newer version")}
            for _ in range(2):
                self.assertIsInstance(error_of(begin(self.worker.start())), SchemaError)
            self.net.run(10.0)
            self.assertEqual(self.net.attempts, 0)
            begin(self.worker.stop())

    def test_after_a_temporary_error_the_next_call_of_start_tries_again(self) -> None:
        self.serve(HELLO + position(1, 1))
        self.store.errors["open"] = StoreError("the database is locked", temporary=True)
        for _ in range(2):
            self.assertIs(error_of(begin(self.worker.start())), self.store.errors["open"])
        del self.store.errors["open"]
        started = begin(self.worker.start())
        self.net.run()
        self.assertEqual(started, [None])

    def test_the_probes_of_a_worker_show_why_its_start_waits(self) -> None:
        for writes in (), ["own"]:
            self.store.errors["open"] = StoreError("the disk is full", temporary=True)
            worker = self.make_worker(streams=["orders"], writes=writes)
            error_of(begin(worker.start()))
            for _ in range(2):  # each probe raises its own error, with a short traceback
                error = error_of(begin(worker.served.check()))
                self.assertEqual((type(error), str(error)), (StoreError, "the disk is full"))
            del self.store.errors["open"]
            begin(worker.start())
            self.net.run()
            now(worker.served.check())
            begin(worker.stop())

    def test_a_start_in_asyncio_without_the_reactor_is_refused_with_the_cure(self) -> None:
        async def main() -> None:
            worker = Worker(database="sqlite://")  # on the global reactor, which does not run
            await asyncio.wait_for(worker.start().asFuture(asyncio.get_running_loop()), 10)

        with self.assertRaisesRegex(ConfigError, "Twisted's reactor does not run, .* call installReactor"):
            asyncio.run(main())

    def test_the_deferred_of_start_names_the_way_of_asyncio(self) -> None:
        starting = self.worker.start()
        self.assertIn("worker.start().asFuture(loop)", repr(starting))
        starting.cancel()
        self.assertIsInstance(error_of(begin(starting)), CancelledError)

    def test_stop_before_the_first_positions_ends_the_start(self) -> None:
        self.serve(b"")
        started = begin(self.worker.start())
        self.net.run()
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertIn("'worker1' is stopping", str(error_of(started)))

    def test_stop_while_the_database_opens_makes_no_connection(self) -> None:
        self.store.close_gate("open")
        started, stopped = begin(self.worker.start()), begin(self.worker.stop())
        self.assertEqual((started, stopped), ([], []))
        self.store.open_gate("open")
        self.net.run(10.0)
        self.assertEqual((stopped, self.net.attempts), ([None], 0))
        self.assertIsInstance(error_of(started), StreamError)

    def test_a_worker_that_was_stopped_does_not_start(self) -> None:
        now(self.worker.stop())
        self.assertIsInstance(error_of(begin(self.worker.start())), StreamError)
        self.assertEqual(self.store.asked, ["close"])

    def test_invalid_options_are_refused(self) -> None:
        wrongs: tuple[dict[str, Any], ...] = (
            {"connect": ["nonsense"]},
            {"catch_up": ["ftp://x"]},
            {"catch_up": ["http://user@x:1"]},
            {"instance_name": "two words"},
        )
        for wrong in wrongs:
            with self.assertRaises(ReplicationError):
                self.make_worker(**wrong)
        with self.assertRaises(ConfigError) as caught:
            self.make_worker(connect=[])
        self.assertEqual(str(caught.exception), "a worker needs at least one writer to connect to: give connect")

    def test_the_state_of_each_connection_is_shown_by_endpoint(self) -> None:
        endpoint = f"tcp:127.0.0.1:{WIRE}"
        self.assertEqual(self.worker.connections, {endpoint: "not connected"})
        self.serve(HELLO + position(1, 1))
        self.start()
        self.assertEqual(self.worker.connections, {endpoint: "following"})
        begin(self.worker.stop())
        self.assertEqual(self.worker.connections, {endpoint: "not connected"})

    def test_the_worker_connects_once_to_each_writer(self) -> None:
        writers = {"a": {"connect": "tcp:127.0.0.1:9092"}, "b": {"connect": "tcp:127.0.0.1:9094"}, "c": {"http": "x"}}
        self.worker = self.make_worker(writers=writers)
        self.assertEqual([link.endpoint for link in self.worker._clients], ["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9094"])


class FaultTests(WorkerCase):
    """The connection of a faulty writer is closed and made again; other writers are followed without a pause."""

    WRONG = (
        b"FOO bar\n",
        b"REPLICATE\n",
        b"NAME x\n",
        b"RDATA orders\n",
        b"RDATA orders master x []\n",
        b"RDATA orders master 2 [\n",
        b"RDATA orders master 2 " + b"[" * 8_000 + b"\n",
        b"POSITION orders master 1\n",
        b"POSITION orders master one two\n",
        b"PING " + b"x" * 17_000,
        b"SERVER \xff\n",
        b"SERVER other.example\n",
        b"HTTP/1.1 400 Bad Request\r\n",
    )

    def test_each_fault_of_a_writer_is_answered_counted_and_survived(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9094"])
        good = self.serve(HELLO + position(1, 1, "stock", "good"), port=9094)
        bad = self.serve(HELLO + position(1, 1) + rdata(2, "[1]"), HELLO + position(2, 2))
        self.start()
        for number, wrong in enumerate(self.WRONG, 1):
            with logged() as messages:
                self.send(bad, rdata(2, "[1]"), wrong, rdata(3, '"never"'))
                self.net.run(3.0)
            received = lines_of(bad.connections[-2].received)
            self.assertTrue(received[-1].startswith("ERROR "), wrong)
            self.assertEqual(len(messages), 1, wrong)
            self.assertEqual(len(bad.connections), number + 1)
            self.assertEqual(sum(self.worker.faults.values()), number)
            self.send(good, rdata(number + 1, "[]", "stock", "good"))
            self.assertEqual(self.at("stock", "good"), number + 1)
        self.assertEqual(len(good.connections), 1)
        self.send(bad, rdata(3, "[2]"))
        self.assertEqual([self.at(), contents(self.store)["orders"][2]], [3, ("[1]",)])
        kinds = {"unknown command", "wrong direction", "bad line", "line too long", "not UTF-8", "wrong server name"}
        self.assertEqual(set(self.worker.faults), kinds)

    def test_lines_before_a_wrong_line_are_applied_and_lines_after_it_are_not(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        with logged():
            self.send(writer, rdata(2), b"FOO\n", rdata(3))
        self.assertEqual(self.stored(), 2)

    def test_an_incomplete_line_is_not_applied(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, rdata(2), rdata(3)[:-1])
        writer.connections[0].transport.loseConnection()
        self.net.run()
        self.assertEqual(self.stored(), 2)


class FollowingTests(WorkerCase):
    """With a real master and its HTTP, over a network in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.source = FragileStore()
        self.begin_master()

    def begin_master(self) -> None:
        self.master = Master(server_name="example.com", database=self.source, streams=["orders"], reactor=self.net)
        self.net.serving[WIRE] = self.master.factory()
        self.net.serving[HTTP] = make_site(self.master.served, secret=None, reactor=self.net)

    def tearDown(self) -> None:
        stopped = begin(self.worker.stop()), begin(self.master.stop())
        self.net.run()
        self.assertEqual(stopped, ([None], [None]))
        super().tearDown()

    def append(self, *rows: object) -> Sequence[Token]:
        return now(self.master.stream("orders").append([[row] for row in rows]))

    def check(self) -> None:
        self.assertEqual(contents(self.store), contents(self.source))

    def test_facts_are_copied(self) -> None:
        self.start()
        self.append("a", "b")
        self.net.run()
        self.check()
        self.assertEqual(self.at(), 3)
        now(self.worker.wait_for("orders", "master", 3))

    def test_a_wait_for_a_token_of_another_history_does_not_fire(self) -> None:
        """It fired at once: the fact that was applied is a lost one with the same token."""
        self.apply()
        self.start()
        self.append("lost", "lost, too")
        self.net.run()
        now(self.worker.wait_for("orders", "master", 3))
        for is_restored in (False, True):
            self.net.cut()
            now(self.master.stop())
            if is_restored:
                self.source = FragileStore()
            with logged():
                self.begin_master()
                self.net.run(10.0)
                (token,) = self.append("new")
                self.net.run()
                waiting = begin(self.worker.wait_for("orders", "master", token, timeout=5.0))
                self.net.run(5.0)
            if not is_restored:
                self.assertEqual((waiting, token), ([None], 4))
        error = error_of(waiting)
        assert isinstance(error, PositionTimeoutError)
        self.assertEqual((error.token, error.position), (2, 4))
        self.assertIn("it is at 4, stopped (", str(error))
        self.assertIn("master has another history of orders", str(error))

    def test_a_new_worker_of_a_new_writer_needs_no_http(self) -> None:
        del self.net.serving[HTTP]
        self.start()
        self.append("a")
        self.net.run()
        self.check()

    def test_missed_facts_are_fetched(self) -> None:
        self.append("a", "b")
        self.start()
        self.net.run(1.0)
        self.check()
        with logged():
            self.net.cut()
            self.append("c")
            self.net.run(1.0)
        self.append("d")
        self.net.run()
        self.check()
        self.assertEqual(self.at(), 5)

    def test_a_row_beyond_the_line_limit_is_fetched(self) -> None:
        self.start()
        self.append("a", "x" * 20_000, "b")
        self.net.run(1.0)
        self.check()

    def test_a_restarted_writer_is_followed(self) -> None:
        self.start()
        self.append("a")
        self.net.run()
        stopped = begin(self.master.stop())
        with logged():
            self.net.run()
            self.assertEqual(stopped, [None])
            self.net.cut()  # its HTTP ends with a process
            self.begin_master()
            self.append("b")
            self.net.run(3.0)
        self.check()

    def test_the_copy_of_a_restored_writer_equals_the_restored_database(self) -> None:
        self.start()
        self.append("a", "b", "c")
        self.net.run()
        begin(self.master.stop())
        with logged() as messages:
            self.net.run()
            now(self.source.open())
            now(self.source.transaction().commit([Write(ORDERS, MASTER, Token(2), reset=True)]))
            self.net.cut()
            self.begin_master()
            self.net.run(3.0)
            self.append("other")
            self.net.run()
        self.check()
        self.assertEqual(len([line for line in messages if "went back from 4 to 2" in line]), 1)

    def restore(self, *rows: object) -> None:
        """Restore a backup that ends at 2, and write these facts, before the worker connects."""
        begin(self.master.stop())
        self.net.run()
        now(self.source.open())
        now(self.source.transaction().commit([Write(ORDERS, MASTER, Token(2), reset=True)]))
        self.net.cut()
        self.begin_master()
        started = begin(self.master.start())
        self.assertEqual(started, [None])
        self.append(*rows)
        self.net.run(5.0)

    def test_the_copy_of_a_restored_writer_that_has_passed_it_equals_the_restored_database(self) -> None:
        self.start()
        self.append("a", "b", "c")
        self.net.run()
        with logged() as messages:
            self.restore(*"other")
        self.check()
        self.assertEqual(len([line for line in messages if "went back from 4 to 2" in line]), 1)
        samples = {
            each.name: each.value for each in self.worker.served.samples() if each.labels.get("stream") == ORDERS
        }
        self.assertEqual((samples["history_checks_total"], samples["history_mismatches_total"]), (2, 1))

    def test_no_cached_value_is_of_what_a_restored_writer_has_lost(self) -> None:
        """The writer has passed the position that the worker has of its invalidations."""
        values = ["lost"]

        @self.worker.cached()
        def get_value(_key: str) -> str:
            return values[-1]

        self.start()
        self.invalidate("a", "b")
        self.assertEqual(get_value("a"), "lost")
        values.append("restored")
        begin(self.master.stop())
        self.net.run()
        now(self.source.open())
        now(self.source.transaction().commit([Write(CACHES, MASTER, Token(2), reset=True)]))
        self.net.cut()
        self.begin_master()
        begin(self.master.start())
        self.invalidate("b", "c", "d")
        self.net.run(10.0)
        self.assertEqual(get_value("a"), "restored")

    def test_no_cached_value_is_of_a_lost_fact_that_the_worker_had_not_received(self) -> None:
        """The value was read from the database while the connection was lost."""
        values = ["restored"]

        @self.worker.cached()
        def get_value(_key: str) -> str:
            return values[-1]

        self.start()
        self.invalidate("a")
        self.net.cut()
        values.append("lost")
        self.assertEqual(get_value("a"), "lost")
        values.append("restored")
        begin(self.master.stop())
        self.begin_master()
        begin(self.master.start())
        self.net.run(10.0)
        self.assertEqual(get_value("a"), "restored")
        values.append("not read: the connection was lost, but the writer was not started again")
        self.net.cut()
        self.net.run(10.0)
        self.assertEqual(get_value("a"), "restored")

    def invalidate(self, *keys: str) -> None:
        for each in keys:
            begin(self.master.stream(CACHES).append([[["get_value", [each], 1]]]))
            self.net.run()

    def test_another_history_is_followed_from_its_beginning_if_that_is_accepted(self) -> None:
        for accepted in (False, True):
            self.worker = self.make_worker(accept_new_history=accepted)
            self.start()
            self.append("a", "b", "c")
            self.net.run(1.0)
            with logged():
                begin(self.master.stop())
                self.net.run()
                self.net.cut()
                self.source = FragileStore()
                self.begin_master()
                self.append("other")
                self.net.run(5.0)
            self.assertEqual(
                (contents(self.store) == contents(self.source), self.stored()), (accepted, 2 if accepted else 4)
            )
            begin(self.worker.stop())
            self.net.run()
            now(self.store.open())

    def test_a_function_that_undoes_is_called_with_the_end_of_the_backup(self) -> None:
        self.apply()
        undone: list[tuple[str, int]] = []

        @self.worker.on_reset("orders")
        def undo(writer: str, to: int, txn: ApplyTransaction) -> None:
            undone.append((writer, to))

        self.start()
        self.append("a", "b", "c")
        self.net.run()
        with logged():
            self.restore(*"other")
        self.assertEqual((undone, self.seen[-1], self.stored()), ([("master", 2)], [3, 4, 5, 6, 7], 7))

    def test_a_function_that_undoes_needs_a_function_and_comes_before_the_start(self) -> None:
        self.worker.on_reset("stock")(lambda writer, to, txn: None)
        failed = begin(self.worker.start())
        self.net.run()
        self.assertEqual(str(error_of(failed)), "on_reset('stock'): no function is registered with on('stock')")
        with self.assertRaisesRegex(StreamError, "register functions before start"):
            self.worker.on_reset("orders")(lambda writer, to, txn: None)

    def test_the_copy_equals_the_source_for_any_order_of_commits_and_any_lost_connections(self) -> None:
        chance = random.Random(11)
        self.start()
        held: list[Any] = []
        with logged():
            for number in range(300):
                match chance.randrange(6):
                    case 0 | 1:
                        reservation = self.master.stream("orders").reserve()
                        fact = now(reservation.__aenter__())
                        for _ in range(chance.randrange(3)):
                            now(fact.write(number))
                        if chance.random() < 0.3:
                            fact.invalidate("get", [number])
                        held.append(reservation)
                    case 2 | 3 if held:
                        error = (ValueError, ValueError(), None) if chance.random() < 0.3 else (None, None, None)
                        now(held.pop(chance.randrange(len(held))).__aexit__(*error))
                    case 4:
                        self.append(number, number)
                    case 5 if chance.random() < 0.3:
                        self.net.cut()
                self.net.run(chance.choice([0.0, 0.0, 0.3]))
            for each in held:
                now(each.__aexit__(None, None, None))
            self.net.run(5.0)
        self.check()
        self.assertEqual(self.at(), self.master.stream("orders").published)
        self.assertEqual(now(self.store.positions(ORDERS))[MASTER], self.at())
        self.assertEqual(len(contents(self.store)["orders"]), len(contents(self.source)["orders"]))


class StopTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.gate: Deferred[None] = Deferred()

        @self.worker.on("orders")
        async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            await txn.execute("INSERT …")
            await self.gate
            self.seen.append([fact.token for fact in facts])

        self.writer = self.serve(HELLO + position(1, 1))
        self.start()

    def test_stop_sends_server_stopping(self) -> None:
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertEqual(lines_of(self.writer.connections[0].received)[-1], "ERROR server stopping")

    def test_stop_waits_for_a_running_function(self) -> None:
        self.send(self.writer, rdata(2))
        stopped = begin(self.worker.stop())
        self.net.run(9.0)
        self.assertEqual(stopped, [])
        self.gate.callback(None)
        self.assertEqual((stopped, self.seen), ([None], [[2]]))
        now(self.store.open())
        self.assertEqual(self.stored(), 2)

    def test_a_function_that_runs_too_long_is_cancelled_and_rolled_back(self) -> None:
        self.send(self.writer, rdata(2))
        stopped = begin(self.worker.stop())
        self.net.run(10.0)
        self.assertEqual((stopped, self.seen, self.store.ends[-1]), ([None], [], "rolled back"))
        now(self.store.open())
        self.assertEqual(self.stored(), 1)

    def test_a_function_that_waits_for_another_stream_does_not_delay_the_stop(self) -> None:
        begin(self.worker.stop())
        self.net.run()
        self.worker = self.make_worker()

        @self.worker.on("orders")
        async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            await self.worker.wait_for("stock", "master", 5, timeout=600)

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, rdata(2))
        with logged():
            stopped = begin(self.worker.stop())
            self.net.run()
        self.flushLoggedErrors()
        self.assertEqual(stopped, [None])

    def test_two_calls_of_stop_stop_once(self) -> None:
        self.send(self.writer, rdata(2))
        stopped = [begin(self.worker.stop()) for _ in range(2)]
        self.net.run()
        self.assertEqual(stopped, [[], []])
        self.gate.callback(None)
        self.assertEqual((stopped, self.store.asked.count("close")), ([[None], [None]], 1))

    def test_a_stop_that_fails_closes_the_store(self) -> None:
        with patch.object(CatchUpSources, "close", side_effect=OSError("too many open files")):
            stopped = begin(self.worker.stop())
            self.net.run()
        self.assertIsInstance(error_of(stopped), OSError)
        self.assertEqual(self.store.asked[-1], "close")

    def test_stop_ends_a_fetch(self) -> None:
        self.net.serving[HTTP] = FakeWriter(b"")
        self.send(self.writer, position(9, 9))
        self.net.run(1.0)
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual((stopped, self.net.getDelayedCalls()), ([None], []))

    def test_stop_ends_the_connection_attempts(self) -> None:
        del self.net.serving[WIRE]
        self.net.cut()
        with logged():
            self.net.run(1.0)
        now(self.worker.stop())
        attempts = self.net.attempts
        self.net.run(10.0)
        self.assertEqual(self.net.attempts, attempts)


class DatabaseTests(SynchronousTestCase):
    """On SQLite: the function's statements and the position share one transaction, over restarts too."""

    def setUp(self) -> None:
        folder = TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{Path(folder.name, 'worker.db')}"
        self.pump, self.net = Pump(), Net()

    def run_worker(self, script: bytes, *, fails: bool = False, until: int = 0) -> list[list[int]]:
        seen: list[list[int]] = []
        store = open_store(self.url, self.pump)
        worker = Worker(server_name="example.com", database=store, reactor=self.net, audit_interval=0)
        self.net.serving[WIRE] = FakeWriter(HELLO + script)

        @worker.on("orders")
        async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            await txn.execute("CREATE TABLE IF NOT EXISTS mine (token INTEGER PRIMARY KEY)")
            await txn.executemany("INSERT INTO mine VALUES (?)", [[fact.token] for fact in facts])
            seen.append([fact.token for fact in facts])
            if fails:
                raise ZeroDivisionError

        with logged():
            started = worker.start()
            self.pump.wait(worker.store.open())
            while not started.called:
                self.net.run()
                self.pump.wait(worker.store.find_receipt("nothing"))
            self.pump.wait(started)
            while worker._followed.position(ORDERS, MASTER) < until or (fails and not seen):
                self.net.run()
                self.pump.wait(worker.store.find_receipt("nothing"))
            stopped = worker.stop()
            self.net.run()
            self.pump.wait(stopped)
        self.assertEqual(self.net.getDelayedCalls(), [])
        return seen

    def mine(self) -> list[tuple[Any, ...]]:
        async def ask() -> list[tuple[Any, ...]]:
            store = open_store(self.url, self.pump)
            await store.open()
            transaction = store.transaction()
            rows = await transaction.execute("SELECT token FROM mine")
            await transaction.rollback()
            await store.close()
            return rows

        return self.pump.wait(ask())

    def test_each_fact_is_applied_once_over_a_restart(self) -> None:
        self.assertEqual(self.run_worker(position(1, 1) + rdata(2), until=2), [[2]])
        self.run_worker(position(2, 2) + rdata(2) + rdata(3), fails=True)
        self.assertEqual(self.mine(), [(2,)])
        self.flushLoggedErrors(ZeroDivisionError)
        self.assertEqual(self.run_worker(position(2, 2) + rdata(2) + rdata(3), until=3), [[3]])
        self.assertEqual(self.mine(), [(2,), (3,)])

    def test_a_stream_is_declared_at_its_first_position(self) -> None:
        definition = StreamDefinition("orders")
        self.run_worker(position(1, 1), until=1)

        async def ask() -> Any:
            store = open_store(self.url, self.pump)
            await store.open()
            await store.declare(definition)
            positions = await store.positions(ORDERS)
            await store.close()
            return positions

        self.assertEqual(self.pump.wait(ask()), {MASTER: 1})


class WritingWithOwnDatabaseTests(SynchronousTestCase):
    """A worker that writes a stream into a database of its own, and follows a writer of a stream of that name."""

    def test_facts_of_other_writers_are_applied_and_not_served(self) -> None:
        """An empty page would mean that the other writer has written nothing."""
        net, store = Net(), FragileStore()
        worker = Worker(instance_name="w", database=store, writes=["orders"], connect=["tcp:127.0.0.1:1"], reactor=net)
        worker.on("orders")(lambda _facts, _txn: None)
        starting = begin(worker.start())
        self.assertEqual(now(worker.served.append_texts("orders", [[1]], None)), [2])
        page = now(worker.served.page("orders", None, after=0, upto=None, limit=10))
        self.assertEqual([fact.token for fact in page.facts], [2])
        now(worker.served.append_texts("orders", [[[2]], [[3]]], None))
        since, token = now(worker.served.since("orders", "2", 1))
        self.assertEqual(([each.token for each in since.written], token), ([3], "3"))
        for ask in (
            worker.served.page("orders", "master", after=0, upto=9, limit=10),
            worker.served.history("orders", "master"),
        ):
            error = error_of(begin(ask))
            assert isinstance(error, UnknownStreamError)
            self.assertEqual(str(error), "stream 'orders': only facts of 'w' are kept here")
            self.assertEqual(error.stream, "orders")
        own = [[*now(worker.served.history("orders", "w"))], [*now(worker.store.history(ORDERS, InstanceName("w")))]]
        self.assertEqual((own[0], len(own[0])), (own[1], 1))
        self.assertEqual(now(worker.stop()), None)
        self.assertEqual(len(starting), 1)
        error_of(starting)

    def test_facts_of_its_former_name_are_served(self) -> None:
        """It published the position of that name, and answered 404 to each follower that requested these facts."""
        net, store = Net(), FragileStore()
        tokens = {}
        for name in ("a", "c"):
            worker = Worker(instance_name=name, database=store, writes=["orders"], connect=["tcp:x:1"], reactor=net)
            starting = begin(worker.start())
            tokens[name] = [*now(worker.served.append_texts("orders", [[[name]]], None))]
            if name == "c":
                wire = connect(worker.factory())
                wire.protocol.dataReceived(b"REPLICATE orders\n")
                lines = lines_of(wire.read())
                pages = {each: now(worker.served.page("orders", each, after=0, upto=None, limit=9)) for each in tokens}
                history = now(worker.served.history("orders", "a"))
                wire.lose()
            now(worker.stop())
            error_of(starting)
        self.assertEqual(lines[-2:], ["POSITION orders a 2 2", "POSITION orders c 3 3"])
        self.assertEqual({name: [each.token for each in page.facts] for name, page in pages.items()}, tokens)
        self.assertEqual(len(history), 1)


class WritingTests(SynchronousTestCase):
    """Two workers that write, and follow each other."""

    def setUp(self) -> None:
        self.net, self.store = Net(), SharedStore()
        self.one, self.two = self.make_worker("one", 9101, 9111), self.make_worker("two", 9111, 9101)
        self.received: list[tuple[str, str, int]] = []
        for worker in (self.one, self.two):
            worker.on("orders")(partial(self.receive, worker.instance_name))

    def receive(self, where: str, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.received += [(where, txn.writer, fact.token) for fact in facts]

    def make_worker(self, name: str, port: int, other: int, **options: Any) -> Worker:
        writes = [StreamDefinition("orders", writers=("one", "two"))]
        worker = Worker(
            instance_name=name,
            database=self.store,
            writes=writes,
            writers={
                "one": {"connect": f"tcp:127.0.0.1:{port if name == 'one' else other}"},
                "two": {"connect": f"tcp:127.0.0.1:{port if name == 'two' else other}"},
            },
            reactor=self.net,
            audit_interval=0,
            **options,
        )
        self.net.serving[port] = worker.factory()
        return worker

    def start(self) -> None:
        started = [begin(worker.start()) for worker in (self.one, self.two)]
        self.net.run()
        self.assertEqual(started, [[None], [None]])

    def tearDown(self) -> None:
        stopped = [begin(worker.stop()) for worker in (self.one, self.two)]
        self.net.run(11.0)
        self.assertEqual(stopped, [[None], [None]])

    def append(self, worker: Worker, count: int = 1) -> Sequence[Token]:
        tokens = now(worker.served.append_texts("orders", [[["o"]]] * count, None))
        self.net.run()
        return tokens

    def test_the_streams_that_are_written_here_are_served_with_every_argument(self) -> None:
        self.start()
        served = self.one.served
        facts = [[["a"]], [["b"]], [["c"]]]
        tokens = now(served.append_texts("orders", facts, "key"))
        self.assertEqual((tokens, now(served.append_texts("orders", facts, "key"))), ([2, 3, 4], tokens))
        for after, upto, limit, found in ((2, 4, 9, [3, 4]), (2, 3, 9, [3]), (0, None, 1, [2])):
            page = now(served.page("orders", "one", after=after, upto=upto, limit=limit))
            self.assertEqual([fact.token for fact in page.facts], found)
        self.assertEqual([each.definition.name for each in served.stream_statuses("orders")], ["orders"])

    def test_trap_46_each_writer_publishes_its_own_facts(self) -> None:
        self.start()
        self.assertEqual((self.append(self.one), self.append(self.two)), ([2], [3]))
        self.assertEqual(self.received, [("two", "one", 2), ("one", "two", 3)])

    def test_trap_9_remote_server_up_between_two_writers_is_received_once(self) -> None:
        """Each worker follows the other, and sends commands on to its other followers only."""
        received: list[tuple[str, object]] = []
        for worker in (self.one, self.two):

            @worker.on_command(RemoteServerUp)
            def note(command: object, peer: object, name: str = worker.instance_name) -> None:
                received.append((name, command))

        self.start()
        self.assertEqual(self.one.remote_server_up("example.org"), 1)
        self.net.run(5.0)
        self.assertEqual(received, [("two", RemoteServerUp("example.org"))])

    def test_users_that_sync_at_one_worker_are_shown_at_the_other(self) -> None:
        changes: list[tuple[str, bool]] = []
        self.two.on_syncing(lambda user, syncing: changes.append((user, syncing)))
        self.start()
        with self.one.user_syncing("@u:h"), self.two.user_syncing("@v:h"):
            self.net.run()
            self.assertEqual(self.one.served.users_syncing().keys(), self.two.served.users_syncing().keys())
            self.assertEqual([[*each] for each in self.two.served.users_syncing().values()], [["@u:h"], ["@v:h"]])
        self.net.run(11.0)
        self.assertEqual(changes, [("@u:h", True), ("@u:h", False)])
        with patch.object(LastSeen, "of", return_value=[]):
            self.assertEqual(now(self.two.served.places_of("@u:h")), [])

    def test_a_worker_does_not_connect_to_itself(self) -> None:
        """Its own endpoint may be in ``writers``, which many processes share."""
        self.start()
        self.assertEqual(sorted(port for port in self.net.attempted if port in self.net.serving), [9101, 9111])

    def test_a_database_to_catch_up_from_has_the_tables_of_the_streams_that_are_written(self) -> None:
        """The worker asked it for tables of this package, unless ``definitions`` had the streams once more."""
        mapped = StreamDefinition("orders", writers=("one", "two"), table="orders", id_column="id", row=["order"])
        other = StreamDefinition("stock", table="stock", id_column="id", row=["item"])
        with patch.object(worker_module, "CatchUpSources", side_effect=ZeroDivisionError) as sources:
            cases: list[tuple[list[StreamDefinition | str], list[StreamDefinition], list[StreamDefinition]]] = [
                ([mapped], [], [mapped]),
                ([mapped, "plain"], [other], [mapped, other]),
                (["orders"], [mapped], [mapped]),
            ]
            for writes, given, found in cases:
                with self.assertRaises(ZeroDivisionError):
                    Worker(instance_name="one", writes=writes, definitions=given, reactor=self.net)
                self.assertEqual(sources.call_args.args[4], found)

    def test_the_token_of_a_worker_has_what_it_writes_itself(self) -> None:
        """A program that waits elsewhere for this token must not miss the own facts."""
        self.start()
        self.append(self.one)
        self.append(self.two)
        self.append(self.one)
        self.assertEqual(self.one.token("orders").of("one"), 4)
        self.assertEqual(self.one.token("orders").of("two"), 3)
        self.assertEqual(self.one.token("caches").of("one"), self.one.stream("caches").published)

    def test_the_position_of_an_idle_worker_follows_the_other(self) -> None:
        self.start()
        self.append(self.one, 3)
        self.net.run(2.0)
        waited = begin(self.one.wait_for("orders", "two", 4))
        self.assertEqual(waited, [None])

    def test_a_wait_in_another_thread_than_the_reactor_s_is_refused(self) -> None:
        worker = self.one
        worker._clock.running = True
        self.patch(threadable, "ioThread", get_ident() + 1)
        with self.assertRaisesRegex(ConfigError, "not the reactor's"):
            worker.wait_for("orders", "two", 4)

    def test_a_wait_for_an_own_token_fires_at_once(self) -> None:
        """See docs/protocol/following.md E6."""
        self.start()
        self.assertEqual(now(self.one.wait_for("orders", "one", self.append(self.one)[0])), None)

    def test_trap_34_the_own_name_in_an_own_stream_is_not_logged(self) -> None:
        self.start()
        with logged() as messages:
            self.two._followed.received(
                self.two._clients[0], [Position(StreamName("orders"), InstanceName("two"), Token(5), Token(5))]
            )
        self.assertEqual(messages, [])
        with logged() as messages:
            self.two._followed.received(
                self.two._clients[0], [Position(StreamName("else"), InstanceName("two"), Token(5), Token(5))]
            )
        self.assertEqual(len(messages), 1)

    def test_an_invalidation_drops_the_entry_in_the_own_process(self) -> None:
        calls: list[str] = []

        @self.one.cached()
        def get(key: str) -> str:
            calls.append(key)
            return key

        async def change() -> None:
            async with self.one.stream("orders").reserve() as fact:
                fact.invalidate("get", ["a"])

        self.start()
        get("a")
        get("a")
        self.assertEqual(calls, ["a"])
        now(change())
        get("a")
        self.assertEqual(calls, ["a", "a"])

    def test_a_stream_written_here_is_served_and_not_copied(self) -> None:
        """The table of the stream has the facts of all writers already."""
        copying = self.make_worker("three", 9103, 9101, copy=True)
        self.start()
        started = begin(copying.start())
        self.net.run()
        self.assertEqual(started, [None])
        self.append(self.one, 2)
        self.net.run(1.0)
        page = now(copying.served.page("orders", "one", after=0, upto=None, limit=10))
        self.assertEqual([fact.token for fact in page.facts], [2, 3])
        self.assertEqual(self.store.followers.get((StreamName("orders"), copying.instance_name)), None)
        stopped = begin(copying.stop())
        self.net.run(11.0)
        self.assertEqual(stopped, [None])

    def test_the_status_shows_written_and_followed_writers(self) -> None:
        self.start()
        self.append(self.two)
        self.net.run(1.0)
        (status,) = [each for each in self.one.served.stream_statuses() if each.definition.name == "orders"]
        shown = [(each.instance, each.position, each.state) for each in status.writers]
        self.assertEqual(shown, [("one", 2, "writing"), ("two", 2, "live")])
        self.assertEqual({peer.name for peer in self.one.served.peer_statuses()}, {"localhost", "two"})
        samples = [(each.name, *sorted(each.labels.items())) for each in self.one.served.samples()]
        self.assertEqual(len(samples), len(set(samples)))
        counted = {each.name: each.value for each in self.one.served.samples()}
        self.assertEqual(counted["connections_total"], 2)
        now(self.one.served.check())

    def test_a_worker_writes_before_the_writers_that_it_follows_run(self) -> None:
        """A worker that waits for its writers can be followed already."""
        starting = begin(self.one.start())
        del self.net.serving[9111]
        self.net.run(1.0)
        self.assertEqual(starting, [])
        self.assertEqual(self.append(self.one), [2])
        self.net.serving[9111] = self.two.factory()
        self.net.run(3.0)
        self.start()
