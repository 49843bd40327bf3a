"""A worker: it applies what writers write, each fact once and in order, and can say how far it is and why."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import (
    ConfigError,
    NotAWriterError,
    PositionTimeoutError,
    ReplicationError,
    SchemaError,
    StoreError,
    StreamError,
    UnknownStreamError,
)
from replication.lastseen import LastSeen
from replication.master import Master
from replication.storage import open_store
from replication.streams.positions import MultiWriterToken
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Write
from replication.web.site import make_site
from replication.wire.commands import Position, RemoteServerUp, Server
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.worker import Worker
from tests.doubles import FragileStore, Net, SharedStore, begin, error_of, lines_of, logged, now
from tests.net.test_link import FakeWriter
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower import ApplyTransaction
    from replication.net.protocol import ReplicationProtocol
    from replication.streams.facts import Fact

WIRE, HTTP = 9092, 9093
ORDERS, MASTER = StreamName("orders"), InstanceName("master")
HELLO = b"SERVER example.com\n"


def position(prev: int, new: int, stream: str = "orders", writer: str = "master") -> bytes:
    return f"POSITION {stream} {writer} {prev} {new}\n".encode()


def rdata(token: int, row: str = "[]", stream: str = "orders", writer: str = "master") -> bytes:
    return f"RDATA {stream} {writer} {token} {row}\n".encode()


def contents(store: FragileStore) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return every fact in a store, by stream and token."""
    return {name: {token: texts for token, (_, texts) in shelf.facts.items()} for name, shelf in store._shelves.items()}


class WorkerCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.net, self.store = Net(), FragileStore()
        self.worker = self.make_worker()
        self.seen: list[list[int]] = []

    def tearDown(self) -> None:
        self.store.gates.clear()
        self.store.errors.clear()
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def make_worker(self, **options: Any) -> Worker:
        given: dict[str, Any] = {"server_name": "example.com", "database": self.store, **options}
        return Worker(reactor=self.net, **given)

    def serve(self, *scripts: bytes, port: int = WIRE, hangs_up: bool = False) -> FakeWriter:
        writer = self.net.serving[port] = FakeWriter(*scripts, hangs_up=hangs_up)
        return writer

    def say(self, writer: FakeWriter, *lines: bytes) -> None:
        """Be a writer: say more on the latest connection."""
        writer.connections[-1].transport.write(b"".join(lines))
        self.net.run()

    def start(self) -> None:
        started = begin(self.worker.start())
        self.net.run()
        self.assertEqual(started, [None])

    def apply(self, stream: str = "orders") -> None:
        """Register a function that takes notes."""

        @self.worker.on(stream)
        def note(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            self.seen.append([fact.token for fact in facts])

    def at(self, stream: str = "orders", writer: str = "master") -> int:
        return self.worker._position(StreamName(stream), InstanceName(writer))

    def stored(self, stream: str = "orders") -> int:
        return now(self.store.positions(StreamName(stream))).get(MASTER, 0)


class KeepingTests(WorkerCase):
    def test_without_functions_and_caches_all_is_copied(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "caches"))
        self.start()
        self.say(writer, rdata(2), rdata(2, '["f",null,1]', "caches"), position(2, 5))
        self.assertEqual(contents(self.store), {"orders": {2: ("[]",)}, "caches": {2: ('["f",null,1]',)}})
        self.assertEqual((self.stored(), self.stored("caches")), (5, 2))

    def test_protocol_f6_its_copy_of_several_writers_is_asked_by_token(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        one = self.serve(HELLO + position(1, 1, writer="one"))
        two = self.serve(HELLO + position(1, 1, writer="two"), port=9102)
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(0)))
        self.start()
        self.say(one, rdata(2, writer="one"), rdata(4, writer="one"))
        self.say(two, rdata(3, writer="two"), position(3, 4, writer="two"))
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(4)))
        since, text = now(self.worker.since("orders", "2", 10))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(3, "two"), (4, "one")])
        self.assertEqual(text, "4")
        self.assertIsInstance(error_of(begin(self.worker.since("stock", "2", 10))), UnknownStreamError)

    def test_with_a_function_other_streams_are_only_watched(self) -> None:
        self.apply()
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.say(writer, rdata(2), rdata(2, stream="stock"))
        self.assertEqual((self.seen, self.at("stock")), ([[2]], 2))
        self.assertEqual(contents(self.store), {"orders": {}})

    def test_unless_a_copy_is_wanted(self) -> None:
        self.worker = self.make_worker(copy=True)
        self.apply()
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.say(writer, rdata(2), rdata(2, stream="stock"))
        self.assertEqual(contents(self.store), {"orders": {}, "stock": {2: ("[]",)}})

    def test_with_caches_and_no_function_nothing_is_copied(self) -> None:
        @self.worker.cached()
        def get(key: str) -> str:
            return key

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.say(writer, rdata(2))
        self.assertEqual((contents(self.store), self.at()), ({}, 2))

    def test_what_is_kept_is_decided_when_it_starts(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.worker.cached()(lambda: None)
        self.say(writer, position(1, 1, "stock"), rdata(2, stream="stock"))
        self.assertEqual(contents(self.store)["stock"], {2: ("[]",)})

    def test_functions_are_registered_before_the_start(self) -> None:
        self.serve(HELLO + position(1, 1))
        self.start()
        with self.assertRaisesRegex(StreamError, "before start"):
            self.apply()

    def test_a_string_is_not_taken_for_a_list(self) -> None:
        for option in ("connect", "streams", "catch_up"):
            with self.assertRaisesRegex(ConfigError, rf"{option} is a list, not a string: write {option}=\['x'\]"):
                self.make_worker(**{option: "x"})

    def test_a_stream_has_one_function(self) -> None:
        self.apply()
        with self.assertRaisesRegex(ConfigError, "'orders' has a function already"):
            self.apply()

    def test_a_function_for_a_stream_that_is_not_followed_is_a_mistake(self) -> None:
        self.worker = self.make_worker(streams=["stock"])
        with self.assertRaisesRegex(ConfigError, "orders"):
            self.apply()

    def test_a_name_that_is_none_is_refused(self) -> None:
        for name in ("two words", ""):
            with self.assertRaises(ReplicationError):
                self.apply(name)
            with self.assertRaises(ReplicationError):
                self.make_worker(streams=[name])

    def test_chosen_streams_are_asked_for_by_name_and_others_left(self) -> None:
        self.worker = self.make_worker(streams=["orders", "caches"])
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.say(writer, rdata(2), rdata(2, stream="stock"))
        self.assertEqual(lines_of(writer.connections[0].received)[-1], "REPLICATE orders caches")
        self.assertEqual(contents(self.store), {"orders": {2: ("[]",)}, "caches": {}})
        self.assertEqual([each.definition.name for each in self.worker.stream_statuses()], ["orders", "caches"])

    def test_a_stream_of_which_no_writer_says_anything_is_named_once(self) -> None:
        self.worker = self.make_worker(streams=["orders", "odrers"])
        with logged() as said:
            begin(self.worker.start())
            self.net.run(61.0)
            writer = self.serve(HELLO)
            self.net.run(5.0)
            self.say(writer, position(1, 1))
        self.assertEqual([line for line in said if "stands" in line], [], "it has not been there for long")
        with logged() as said:
            self.net.run(60.0)
        self.assertEqual(
            said, ["no writer has said where stream odrers stands, and all are connected: is that its name?"]
        )

    def test_trap_34_a_writer_with_our_own_name_is_not_followed_and_that_is_said_once(self) -> None:
        self.worker = self.make_worker(instance_name="master")
        with logged() as said:
            started = begin(self.worker.start())
            writer = self.serve(HELLO + position(1, 1) + rdata(2))
            self.net.run(3.0)
            self.say(writer, rdata(3), position(3, 4))
            self.net.run(60.0)
        self.assertEqual((started, self.worker.stream_statuses()), ([], []))
        self.assertEqual(len([line for line in said if "our own name" in line]), 1)
        self.assertEqual([line for line in said if "is that its name" in line], [])


class CommandTests(WorkerCase):
    def heard_by(self, writer: FakeWriter) -> list[str]:
        return lines_of(writer.connections[-1].received)

    def test_each_connection_is_told_who_syncs_before_it_is_asked_for_facts(self) -> None:
        """Protocol B1."""
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        me = self.worker.voice.instance_id
        with self.worker.user_syncing("@u:h"):
            self.net.run()
            self.assertRegex(self.heard_by(writer)[-1], rf"^USER_SYNC {me} @u:h start \d+$")
            self.net.cut()
            self.net.run(1)
            self.assertEqual(
                [line.split()[0] for line in self.heard_by(writer)], ["NAME", "PING", "USER_SYNC", "REPLICATE"]
            )
            begin(self.worker.stop())
        self.net.run()
        self.assertEqual(self.heard_by(writer)[-2:], [f"CLEAR_USER_SYNC {me}", "ERROR server stopping"])

    def test_a_worker_shows_who_syncs_here_and_does_not_know_where_they_were_seen(self) -> None:
        self.assertEqual(self.worker.users_syncing(), {})
        with self.worker.user_syncing("@u:h"):
            self.assertEqual([*self.worker.users_syncing()[self.worker.voice.instance_id]], ["@u:h"])
        with self.assertRaisesRegex(NotAWriterError, "ask a writer where '@u:h' was seen"):
            now(self.worker.places_of("@u:h"))

    def test_all_writers_are_told_what_is_said(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9192"])
        writers = [self.serve(HELLO + position(1, 1)), self.serve(HELLO + position(1, 1), port=9192)]
        self.assertEqual(self.worker.remote_server_up("example.org"), 0)
        self.start()
        self.worker.federation_ack(Token(5))
        self.worker.user_ip("@u:h", "tok", "1.2.3.4")
        self.net.run()
        for writer in writers:
            ack, seen = self.heard_by(writer)[-2:]
            self.assertEqual(ack, "FEDERATION_ACK worker1 5")
            self.assertTrue(seen.startswith('USER_IP @u:h ["tok","1.2.3.4","",null,'), seen)

    def test_the_application_hears_what_writers_say_beside_facts(self) -> None:
        heard: list[object] = []

        @self.worker.on_command(RemoteServerUp)
        @self.worker.on_command(Server)
        def note(command: object, peer: ReplicationProtocol) -> None:
            heard.append((command, peer.name))

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.say(writer, rdata(2), b"REMOTE_SERVER_UP example.org\n")
        self.assertEqual(
            heard, [(Server("example.com"), "example.com"), (RemoteServerUp("example.org"), "example.com")]
        )
        self.assertEqual(self.at(), 2)


class OneAtATimeTests(WorkerCase):
    """What would let two applications of one stream run side by side, or drop it altogether."""

    def test_trap_8_facts_that_come_while_others_are_applied_wait_for_those(self) -> None:
        under_way: list[Deferred[None]] = []
        most = 0

        @self.worker.on("orders")
        async def slow(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            nonlocal most
            self.seen.append([fact.token for fact in facts])
            under_way.append(Deferred())
            most = max(most, len(under_way))
            await under_way[-1]
            under_way.pop()

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.say(writer, rdata(2))
        self.say(writer, rdata(3), position(3, 5))
        self.say(writer, rdata(6))
        while under_way:
            under_way[-1].callback(None)
            self.net.run()
        self.assertEqual((self.seen, most, self.at()), ([[2], [3, 6]], 1, 6))

    def test_trap_31_streams_that_we_do_not_know_or_want_harm_nothing(self) -> None:
        self.worker = self.make_worker(streams=["orders"])
        self.apply()
        writer = self.serve(HELLO + position(1, 1, "newest") + position(1, 1) + rdata(2, stream="newest"))
        self.start()
        self.say(writer, rdata(3, stream="never_heard_of"), position(1, 9, "newer_still"), rdata(2))
        self.assertEqual((self.at(), len(writer.connections)), (2, 1))
        self.assertEqual([status.definition.name for status in self.worker.stream_statuses()], ["orders"])

    def test_trap_44_positions_are_asked_for_again_after_each_loss(self) -> None:
        """What was written meanwhile is not told to who was away."""
        writer = self.serve(HELLO + position(1, 1), HELLO + position(1, 5), HELLO + position(5, 7))
        self.start()
        for _ in range(2):
            self.net.cut()
            self.net.run(1)
        self.assertEqual(len(writer.connections), 3)
        for each in writer.connections:
            self.assertEqual(lines_of(each.received)[-1], "REPLICATE ")
        self.assertEqual(self.at(), 7)


class StartTests(WorkerCase):
    def test_it_waits_for_the_first_positions_of_every_writer(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9094"])
        self.serve(HELLO + position(1, 1))
        second = self.serve(HELLO, port=9094)
        started = begin(self.worker.start())
        self.net.run()
        self.assertEqual(started, [])
        self.say(second, position(1, 1, writer="other"))
        self.assertEqual(started, [None])

    def test_it_waits_for_a_writer_that_is_not_there_yet(self) -> None:
        with logged() as said:
            started = begin(self.worker.start())
            self.net.run(30.0)
        self.assertEqual((started, len(said)), ([], 1))
        self.serve(HELLO + position(1, 1))
        self.net.run(3.0)
        self.assertEqual(started, [None])

    def test_starting_twice_is_starting_once(self) -> None:
        self.serve(HELLO + position(1, 1))
        started = [begin(self.worker.start()) for _ in range(2)]
        self.net.run()
        self.assertEqual((started, self.net.attempts), ([[None], [None]], 1))
        self.start()

    def test_who_gives_up_waiting_gives_up_alone(self) -> None:
        start = self.worker.start()
        one, two = begin(start), begin(self.worker.start())
        start.cancel()
        self.assertIsInstance(error_of(one), CancelledError)
        self.serve(HELLO + position(1, 1))
        with logged():
            self.net.run(1.0)
        self.assertEqual(two, [None])

    def test_a_database_that_cannot_serve_is_told_to_everybody_and_nobody_is_called(self) -> None:
        for operation in ("open", "declare"):
            self.worker = self.make_worker(streams=["orders"])
            self.store.errors = {operation: SchemaError("made by a newer version")}
            for _ in range(2):
                self.assertIsInstance(error_of(begin(self.worker.start())), SchemaError)
            self.net.run(10.0)
            self.assertEqual(self.net.attempts, 0)
            begin(self.worker.stop())

    def test_stopping_before_the_writers_are_heard_ends_the_start(self) -> None:
        self.serve(b"")
        started = begin(self.worker.start())
        self.net.run()
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertIn("'worker1' is stopping", str(error_of(started)))

    def test_stopping_while_the_database_opens_calls_nobody(self) -> None:
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

    def test_what_cannot_work_is_refused_at_once(self) -> None:
        wrongs: tuple[dict[str, Any], ...] = (
            {"connect": []},
            {"connect": ["nonsense"]},
            {"catch_up": ["ftp://x"]},
            {"catch_up": ["http://user@x:1"]},
            {"instance_name": "two words"},
        )
        for wrong in wrongs:
            with self.assertRaises(ReplicationError):
                self.make_worker(**wrong)

    def test_writers_are_called_once_each_wherever_they_are_named(self) -> None:
        writers = {"a": {"connect": "tcp:127.0.0.1:9092"}, "b": {"connect": "tcp:127.0.0.1:9094"}, "c": {"http": "x"}}
        self.worker = self.make_worker(writers=writers)
        self.assertEqual([link.endpoint for link in self.worker._links], ["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9094"])


class OpeningTests(WorkerCase):
    """A stream whose table cannot be had stands still by itself, and is taken up once it can."""

    def test_it_is_tried_again_and_the_writer_asked_again(self) -> None:
        self.store.errors["declare"] = StoreError("locked")
        writer = self.serve(HELLO + position(1, 1) + rdata(2))
        with logged() as said:
            self.start()
            self.net.run(0.2)
            self.assertEqual(self.at(), -1)
            waiting = begin(self.worker.wait_for("orders", "master", 2, timeout=0.1))
            self.net.run(0.2)
        self.assertEqual(said, ["cannot follow orders: locked"])
        self.assertIn("it cannot be followed: locked", str(error_of(waiting)))
        del self.store.errors["declare"]
        self.net.run(1.0)
        self.assertEqual(lines_of(writer.connections[0].received).count("REPLICATE "), 3)
        self.net.serving[HTTP] = self.page_of({2: "[]"}, 2)
        self.say(writer, position(2, 2))
        self.net.run(1.0)
        self.assertEqual(contents(self.store), {"orders": {2: ("[]",)}})

    def page_of(self, rows: dict[int, str], upto: int) -> FakeWriter:
        updates = ",".join(f"[{token},{row}]" for token, row in rows.items())
        body = f'{{"updates":[{updates}],"upto_token":{upto},"limited":false}}'.encode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        return FakeWriter(head % len(body) + body)

    def test_a_stream_whose_name_no_table_can_have_does_not_fill_the_memory_or_the_log(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "été"))
        with logged() as said:
            self.start()
            for number in range(2, 50):
                self.say(writer, rdata(number, stream="été"), rdata(number))
                self.net.run(1.0)
        self.assertEqual(len(said), 1)
        self.assertIn("été", said[0])
        self.assertEqual(self.at(), 49)
        self.assertIsNone(self.worker._followers[StreamName("été")]._early)

    def test_stopping_ends_the_wait(self) -> None:
        self.store.errors["declare"] = StoreError("locked")
        self.serve(HELLO + position(1, 1))
        with logged():
            self.start()
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual((stopped, self.net.getDelayedCalls()), ([None], []))


class WaitTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.writer = self.serve(HELLO + position(1, 1))
        self.start()

    def wait(self, token: int, writer: str = "master", timeout: float = 10.0) -> list[Any]:
        return begin(self.worker.wait_for("orders", writer, token, timeout))

    def test_what_is_there_already_is_not_waited_for(self) -> None:
        self.assertEqual((self.wait(1), self.wait(0)), ([None], [None]))

    def test_it_fires_with_the_position_and_not_before(self) -> None:
        waits = {token: self.wait(token) for token in (4, 2, 3, 2)}
        twice = self.wait(2)
        self.say(self.writer, rdata(2))
        self.assertEqual((waits[2], twice, waits[3], waits[4]), ([None], [None], [], []))
        self.say(self.writer, position(2, 7))
        self.assertEqual((waits[3], waits[4]), ([None], [None]))
        self.assertEqual(self.worker._waiters, {})

    def test_trap_33_only_the_named_writers_position_counts(self) -> None:
        other, mine = self.wait(5, "other"), self.wait(5)
        self.say(self.writer, position(1, 9, writer="other"))
        self.assertEqual((other, mine), ([None], []))
        self.say(self.writer, position(1, 9))
        self.assertEqual(mine, [None])

    def test_running_out_of_time_says_all_that_is_known(self) -> None:
        self.say(self.writer, rdata(2))
        waiting = self.wait(9, timeout=2.5)
        self.net.advance(2.5)
        self.assertIsInstance(error_of(waiting), PositionTimeoutError)
        self.assertEqual(
            str(error_of(waiting)),
            "stream 'orders' of 'master' did not reach 9 in 2.5 s: it is at 2, live;"
            " links: tcp:127.0.0.1:9092 following",
        )
        self.assertEqual(self.worker._waiters, {})
        self.say(self.writer, position(2, 9))
        self.assertEqual(self.wait(9), [None])

    def test_and_of_a_stream_that_nobody_heard_of_too(self) -> None:
        waiting = self.wait(9, "nobody", timeout=1.0)
        self.net.cut()
        del self.net.serving[WIRE]
        with logged():
            self.net.run(1.5)
        self.assertIn("nothing has been heard of it; links: tcp:127.0.0.1:9092 not connected", str(error_of(waiting)))

    def test_and_why_a_stream_stands_still(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        waiting = self.wait(2, timeout=0.1)
        with logged():
            self.say(self.writer, rdata(2))
            self.net.run(0.2)
        self.assertIn(
            "it is at 1, stopped (applying orders of master after 1: StoreError: disk full)", str(error_of(waiting))
        )

    def test_who_gives_up_leaves_nothing_behind(self) -> None:
        waiting = self.worker.wait_for("orders", "master", 9)
        outcome = begin(waiting)
        waiting.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(self.worker._waiters, {})

    def test_trap_32_whoever_is_woken_may_wait_again_or_end_another(self) -> None:
        other = self.worker.wait_for("orders", "master", 2)
        outcome = begin(other)
        again: list[list[Any]] = []

        def wake(_: None) -> None:
            other.cancel()
            again.extend(self.wait(token) for token in (2, 3))

        first = self.worker.wait_for("orders", "master", 2)
        self.worker._waiters[ORDERS, MASTER].insert(0, self.worker._waiters[ORDERS, MASTER].pop())
        first.addCallback(wake)
        self.say(self.writer, rdata(2))
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(again, [[None], []])
        self.say(self.writer, rdata(3))
        self.assertEqual(again, [[None], [None]])

    def test_an_error_of_one_who_is_woken_is_its_own(self) -> None:
        def fail(_: None) -> None:
            raise ZeroDivisionError

        failing = begin(self.worker.wait_for("orders", "master", 2).addCallback(fail))
        other = self.wait(2)
        self.say(self.writer, rdata(2))
        self.assertIsInstance(error_of(failing), ZeroDivisionError)
        self.assertEqual((other, self.at()), ([None], 2))

    def test_stopping_ends_all_waits_and_later_ones_at_once(self) -> None:
        waits = [self.wait(9), self.wait(9, "nobody")]
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        for outcome in (*waits, self.wait(9)):
            self.assertIn("'worker1' is stopping", str(error_of(outcome)))
        self.assertEqual(self.wait(1), [None])

    def test_a_position_that_was_set_back_is_waited_for_again(self) -> None:
        self.say(self.writer, position(1, 9))
        again = self.serve(HELLO + position(5, 5))
        with logged():
            self.net.cut()
            self.net.run(1.0)
        waiting = self.wait(6)
        self.assertEqual(waiting, [])
        self.say(again, position(5, 6))
        self.assertEqual(waiting, [None])


class CacheTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.calls: list[str] = []

        @self.worker.cached()
        def get(key: str) -> str:
            self.calls.append(key)
            return key

        self.get = get
        self.writer = self.serve(HELLO + position(1, 1, "caches"))

    def row(self, name: str, *keys: str) -> str:
        spelt = ",".join(f'"{key}"' for key in keys)
        return f'["{name}",[{spelt}],1]'

    def test_trap_30_who_waits_for_the_position_finds_them_invalidated(self) -> None:
        self.start()
        self.get("1")
        self.get("2")
        fresh: list[str] = []
        self.worker.wait_for("caches", "master", 2).addCallback(lambda _: fresh.append(self.get("1")))
        self.say(self.writer, rdata(2, self.row("get", "1"), "caches"))
        self.get("2")
        self.assertEqual(self.calls, ["1", "2", "1"])
        self.assertEqual(fresh, ["1"])

    def test_a_special_name_fans_out(self) -> None:
        self.worker.caches.fan_out("changed", "get", "unknown")
        self.start()
        self.get("1")
        self.say(self.writer, rdata(2, self.row("changed", "1"), "caches"))
        self.get("1")
        self.assertEqual(self.calls, ["1", "1"])

    def test_a_row_that_is_none_is_logged_and_holds_nothing_up(self) -> None:
        self.start()
        self.get("1")
        with logged() as said:
            self.say(self.writer, rdata(2, "[17]", "caches"), rdata(3, self.row("get", "1"), "caches"))
        self.get("1")
        self.assertEqual((self.calls, self.at("caches")), (["1", "1"], 3))
        self.assertEqual(len(said), 1)
        self.assertIn("caches fact 2", said[0])

    def test_a_writer_that_went_back_makes_everything_doubtful(self) -> None:
        self.start()
        self.say(self.writer, position(1, 9, "caches"))
        self.get("1")
        self.serve(HELLO + position(5, 5, "caches"))
        with logged():
            self.net.cut()
            self.net.run(1.0)
        self.get("1")
        self.assertEqual(self.calls, ["1", "1"])

    def test_they_are_followed_beside_a_function_for_the_same_stream(self) -> None:
        self.apply("caches")
        self.start()
        self.get("1")
        self.say(self.writer, rdata(2, self.row("get", "1"), "caches"))
        self.get("1")
        self.assertEqual((self.calls, self.seen), (["1", "1"], [[2]]))

    def test_leaving_their_stream_out_is_warned_of(self) -> None:
        self.worker = self.make_worker(streams=["orders"])
        self.worker.cached()(lambda: None)
        self.serve(HELLO + position(1, 1))
        with logged() as said:
            self.start()
        self.assertEqual(said, ["nothing invalidates the cached functions: caches is not among streams"])


class FaultTests(WorkerCase):
    """A writer that says something wrong is left and called again; others are followed as if nothing had been."""

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

    def test_each_wrong_thing_is_told_counted_and_survived(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9094"])
        good = self.serve(HELLO + position(1, 1, "stock", "good"), port=9094)
        bad = self.serve(HELLO + position(1, 1) + rdata(2, "[1]"), HELLO + position(2, 2))
        self.start()
        for number, wrong in enumerate(self.WRONG, 1):
            with logged() as said:
                self.say(bad, rdata(2, "[1]"), wrong, rdata(3, '"never"'))
                self.net.run(3.0)
            received = lines_of(bad.connections[-2].received)
            self.assertTrue(received[-1].startswith("ERROR "), wrong)
            self.assertEqual(len(said), 1, wrong)
            self.assertEqual(len(bad.connections), number + 1)
            self.assertEqual(sum(self.worker.faults.values()), number)
            self.say(good, rdata(number + 1, "[]", "stock", "good"))
            self.assertEqual(self.at("stock", "good"), number + 1)
        self.assertEqual(len(good.connections), 1)
        self.say(bad, rdata(3, "[2]"))
        self.assertEqual([self.at(), contents(self.store)["orders"][2]], [3, ("[1]",)])
        kinds = {"unknown command", "wrong direction", "bad line", "line too long", "not UTF-8", "wrong server name"}
        self.assertEqual(set(self.worker.faults), kinds)

    def test_what_came_before_a_wrong_line_counts_and_what_comes_after_does_not(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        with logged():
            self.say(writer, rdata(2), b"FOO\n", rdata(3))
        self.assertEqual(self.stored(), 2)

    def test_a_half_line_is_no_line(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.say(writer, rdata(2), rdata(3)[:-1])
        writer.connections[0].transport.loseConnection()
        self.net.run()
        self.assertEqual(self.stored(), 2)


class RestTests(WorkerCase):
    def fill(self, first: int) -> bytes:
        """Return facts that take more than half of what may wait."""
        return b"".join([rdata(token, f'"{"x" * 16_000}"') for token in range(first, first + 300)])

    def resting(self) -> bool:
        peer = self.worker._links[0].peer
        assert peer is not None
        return bool(peer.paused)

    def test_a_writer_that_tells_more_than_is_applied_is_not_read_until_it_is(self) -> None:
        self.apply()
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.store.close_gate("commit")
        self.say(writer, self.fill(2))
        self.assertTrue(self.resting())
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual((self.resting(), self.at()), (False, 301))

    def test_a_stream_that_stands_still_holds_no_other_up(self) -> None:
        self.apply()
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            self.say(writer, rdata(2))
            self.say(writer, self.fill(3), rdata(2, stream="stock"))
        self.assertEqual((self.resting(), self.at(), self.at("stock")), (False, 1, 2))


class FollowingTests(WorkerCase):
    """With a real master and its HTTP, over a network in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.source = FragileStore()
        self.begin_master()

    def begin_master(self) -> None:
        self.master = Master(server_name="example.com", database=self.source, streams=["orders"], reactor=self.net)
        self.net.serving[WIRE] = self.master.factory()
        self.net.serving[HTTP] = make_site(self.master, secret=None, reactor=self.net)

    def tearDown(self) -> None:
        stopped = begin(self.worker.stop()), begin(self.master.stop())
        self.net.run()
        self.assertEqual(stopped, ([None], [None]))
        super().tearDown()

    def append(self, *rows: object) -> Sequence[Token]:
        return now(self.master.stream("orders").append([[row] for row in rows]))

    def check(self) -> None:
        self.assertEqual(contents(self.store), contents(self.source))

    def test_facts_arrive(self) -> None:
        self.start()
        self.append("a", "b")
        self.net.run()
        self.check()
        self.assertEqual(self.at(), 3)
        now(self.worker.wait_for("orders", "master", 3))

    def test_a_new_pair_needs_no_http(self) -> None:
        del self.net.serving[HTTP]
        self.start()
        self.append("a")
        self.net.run()
        self.check()

    def test_what_was_missed_is_fetched(self) -> None:
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

    def test_a_row_that_no_line_can_hold_arrives_all_the_same(self) -> None:
        self.start()
        self.append("a", "x" * 20_000, "b")
        self.net.run(1.0)
        self.check()

    def test_a_writer_that_restarts_is_followed_on(self) -> None:
        self.start()
        self.append("a")
        self.net.run()
        stopped = begin(self.master.stop())
        with logged():
            self.net.run()
            self.assertEqual(stopped, [None])
            self.begin_master()
            self.append("b")
            self.net.run(3.0)
        self.check()

    def test_a_writer_that_was_restored_is_copied_as_it_is_now(self) -> None:
        self.start()
        self.append("a", "b", "c")
        self.net.run()
        begin(self.master.stop())
        with logged() as said:
            self.net.run()
            now(self.source.open())
            now(self.source.transaction().commit([Write(ORDERS, MASTER, Token(2), reset=True)]))
            self.begin_master()
            self.net.run(3.0)
            self.append("other")
            self.net.run()
        self.check()
        self.assertEqual(len([line for line in said if "went back from 4 to 2" in line]), 1)

    def test_whatever_order_ids_complete_in_and_however_often_the_network_breaks_the_copy_is_the_same(self) -> None:
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
        self.assertEqual(self.at(), self.master.stream("orders").announced)
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

    def test_it_says_goodbye(self) -> None:
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertEqual(lines_of(self.writer.connections[0].received)[-1], "ERROR server stopping")

    def test_functions_that_are_under_way_finish(self) -> None:
        self.say(self.writer, rdata(2))
        stopped = begin(self.worker.stop())
        self.net.run(9.0)
        self.assertEqual(stopped, [])
        self.gate.callback(None)
        self.assertEqual((stopped, self.seen), ([None], [[2]]))
        now(self.store.open())
        self.assertEqual(self.stored(), 2)

    def test_one_that_does_not_is_cancelled_and_rolled_back(self) -> None:
        self.say(self.writer, rdata(2))
        stopped = begin(self.worker.stop())
        self.net.run(10.0)
        self.assertEqual((stopped, self.seen, self.store.ends[-1]), ([None], [], "rolled back"))
        now(self.store.open())
        self.assertEqual(self.stored(), 1)

    def test_a_function_that_waits_for_another_stream_does_not_keep_it(self) -> None:
        begin(self.worker.stop())
        self.net.run()
        self.worker = self.make_worker()

        @self.worker.on("orders")
        async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            await self.worker.wait_for("stock", "master", 5, timeout=600)

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.say(writer, rdata(2))
        with logged():
            stopped = begin(self.worker.stop())
            self.net.run()
        self.flushLoggedErrors()
        self.assertEqual(stopped, [None])

    def test_stopping_twice_is_stopping_once(self) -> None:
        self.say(self.writer, rdata(2))
        stopped = [begin(self.worker.stop()) for _ in range(2)]
        self.net.run()
        self.assertEqual(stopped, [[], []])
        self.gate.callback(None)
        self.assertEqual((stopped, self.store.asked.count("close")), ([[None], [None]], 1))

    def test_stopping_in_the_middle_of_a_fetch_ends_that(self) -> None:
        self.net.serving[HTTP] = FakeWriter(b"")
        self.say(self.writer, position(9, 9))
        self.net.run(1.0)
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual((stopped, self.net.getDelayedCalls()), ([None], []))

    def test_stopping_while_a_writer_is_away_ends_the_attempts(self) -> None:
        del self.net.serving[WIRE]
        self.net.cut()
        with logged():
            self.net.run(1.0)
        now(self.worker.stop())
        attempts = self.net.attempts
        self.net.run(10.0)
        self.assertEqual(self.net.attempts, attempts)


class ServedTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.say(self.writer, rdata(2), rdata(3), position(3, 5))

    def page(self, writer: str | None, after: int, upto: int | None, limit: int = 10) -> tuple[list[int], int, bool]:
        page = now(self.worker.page("orders", writer, after=after, upto=upto, limit=limit))
        return [fact.token for fact in page.facts], page.upto, page.limited

    def test_pages_come_from_the_copy_and_end_where_it_ends(self) -> None:
        self.assertEqual(self.page("master", 0, None), ([2, 3], 5, False))
        self.assertEqual(self.page("master", 2, 99), ([3], 5, False))
        self.assertEqual(self.page("master", 0, 99, limit=1), ([2], 2, True))
        self.assertEqual(self.page("master", 7, 99), ([], 5, False))
        self.assertEqual(self.page("nobody", 0, 99), ([], 0, False))

    def test_the_writer_must_be_said_where_there_are_several(self) -> None:
        self.assertEqual(self.page(None, 0, None)[0], [2, 3])
        self.say(self.writer, position(1, 1, writer="other"))
        error = error_of(begin(self.worker.page("orders", None, after=0, upto=None, limit=1)))
        self.assertEqual(str(error), "say which writer of 'orders': master, other")

    def test_what_is_not_copied_is_not_served(self) -> None:
        error = error_of(begin(self.worker.page("unknown", None, after=0, upto=None, limit=1)))
        self.assertIsInstance(error, UnknownStreamError)

    def test_nothing_is_appended_at_a_worker(self) -> None:
        error = error_of(begin(self.worker.append_texts("orders", [[1]], None)))
        self.assertIsInstance(error, NotAWriterError)
        self.assertIn("worker 'worker1' writes no stream: append to 'orders' at its writer", str(error))
        for ask in (lambda: self.worker.stream("orders"), self.worker.factory):
            with self.assertRaises(NotAWriterError):
                ask()

    def test_health_is_the_stores(self) -> None:
        now(self.worker.check())
        now(self.store.close())
        self.assertIsInstance(error_of(begin(self.worker.check())), StoreError)

    def test_statuses_say_how_far_it_is(self) -> None:
        (status,) = self.worker.stream_statuses()
        (writer,) = status.writers
        self.assertEqual((writer.instance, writer.position, writer.announced, writer.state), ("master", 5, 5, "live"))
        (peer,) = self.worker.peer_statuses()
        self.assertEqual((peer.name, peer.address, peer.last_command), ("example.com", "127.0.0.1:9092", "POSITION"))
        self.net.cut()
        self.assertEqual(
            (self.worker.peer_statuses(), self.worker.stream_statuses()[0].writers[0].state), ([], "not connected")
        )

    def test_every_figure_of_the_metrics_page_is_what_it_says(self) -> None:
        self.worker.cached(name="get")(lambda: None)()
        with logged():
            self.say(self.writer, position(8, 8))
            self.net.run(1.0)
            del self.net.serving[WIRE]
            self.say(self.writer, b"FOO\n")
        samples = {(each.name, *each.labels.values()): each.value for each in self.worker.samples()}
        for key, value in {
            ("links",): 0,
            ("connections_total",): 1,
            ("faults_total", "unknown command"): 1,
            ("catch_ups_total", "orders"): 2,
            ("applied_rows_total", "orders"): 2,
            ("failures_total", "orders"): 2,
            ("resets_total", "orders"): 0,
            ("position", "orders", "master"): 5,
            ("lag", "orders", "master"): 3,
            ("stopped", "orders", "master"): 1,
            ("cache_misses_total", "get"): 1,
            ("cache_hits_total", "get"): 0,
            ("cache_size", "get"): 1,
            ("cache_invalidations_total", "get"): 0,
        }.items():
            self.assertEqual(samples[key], value, key)


class DatabaseTests(SynchronousTestCase):
    """On SQLite: what a function does and the position it reaches are of one transaction, over restarts too."""

    def setUp(self) -> None:
        folder = TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{Path(folder.name, 'worker.db')}"
        self.pump, self.net = Pump(), Net()

    def run_worker(self, script: bytes, *, fails: bool = False, until: int = 0) -> list[list[int]]:
        seen: list[list[int]] = []
        worker = Worker(server_name="example.com", database=open_store(self.url, self.pump), reactor=self.net)
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
                self.pump.wait(worker.store.recall("nothing"))
            self.pump.wait(started)
            while worker._position(ORDERS, MASTER) < until or (fails and not seen):
                self.pump.wait(worker.store.recall("nothing"))
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

    def test_over_a_restart_each_fact_is_applied_once(self) -> None:
        self.assertEqual(self.run_worker(position(1, 1) + rdata(2), until=2), [[2]])
        self.run_worker(position(2, 2) + rdata(2) + rdata(3), fails=True)
        self.assertEqual(self.mine(), [(2,)])
        self.flushLoggedErrors(ZeroDivisionError)
        self.assertEqual(self.run_worker(position(2, 2) + rdata(2) + rdata(3), until=3), [[3]])
        self.assertEqual(self.mine(), [(2,), (3,)])

    def test_streams_are_declared_as_they_are_heard_of(self) -> None:
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


class WritingAloneTests(SynchronousTestCase):
    """A worker that writes a stream into a database of its own, and follows others who write one of that name."""

    def test_of_others_it_has_a_position_and_no_facts(self) -> None:
        """Who asked here for theirs would take what is not there for nothing."""
        net, store = Net(), FragileStore()
        worker = Worker(instance_name="w", database=store, writes=["orders"], connect=["tcp:127.0.0.1:1"], reactor=net)
        worker.on("orders")(lambda _facts, _txn: None)
        starting = begin(worker.start())
        self.assertEqual(now(worker.append_texts("orders", [[1]], None)), [2])
        page = now(worker.page("orders", None, after=0, upto=None, limit=10))
        self.assertEqual([fact.token for fact in page.facts], [2])
        outcome = begin(worker.page("orders", "master", after=0, upto=9, limit=10))
        self.assertIn("only what 'w' writes is kept here", str(error_of(outcome)))
        self.assertEqual(now(worker.stop()), None)
        self.assertEqual(len(starting), 1)
        error_of(starting)


class WritingTests(SynchronousTestCase):
    """Two workers that write, and follow each other."""

    def setUp(self) -> None:
        self.net, self.store = Net(), SharedStore()
        self.one, self.two = self.make_worker("one", 9101, 9102), self.make_worker("two", 9102, 9101)
        self.heard: list[tuple[str, str, int]] = []
        for worker in (self.one, self.two):
            worker.on("orders")(partial(self.hear, worker.instance_name))

    def hear(self, where: str, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.heard += [(where, txn.writer, fact.token) for fact in facts]

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
        tokens = now(worker.append_texts("orders", [[["o"]]] * count, None))
        self.net.run()
        return tokens

    def test_trap_46_each_process_that_writes_tells_what_it_wrote(self) -> None:
        self.start()
        self.assertEqual((self.append(self.one), self.append(self.two)), ([2], [3]))
        self.assertEqual(self.heard, [("two", "one", 2), ("one", "two", 3)])

    def test_trap_9_what_one_says_the_other_hears_once_and_nobody_says_it_back(self) -> None:
        """Each is the other's writer, and passes on what its followers say to its other followers only."""
        heard: list[tuple[str, object]] = []
        for worker in (self.one, self.two):

            @worker.on_command(RemoteServerUp)
            def note(command: object, peer: object, name: str = worker.instance_name) -> None:
                heard.append((name, command))

        self.start()
        self.assertEqual(self.one.remote_server_up("example.org"), 1)
        self.net.run(5.0)
        self.assertEqual(heard, [("two", RemoteServerUp("example.org"))])

    def test_who_syncs_at_one_is_known_at_the_other(self) -> None:
        told: list[tuple[str, bool]] = []
        self.two.on_syncing(lambda user, syncing: told.append((user, syncing)))
        self.start()
        with self.one.user_syncing("@u:h"), self.two.user_syncing("@v:h"):
            self.net.run()
            self.assertEqual(self.one.users_syncing().keys(), self.two.users_syncing().keys())
            self.assertEqual([[*each] for each in self.two.users_syncing().values()], [["@u:h"], ["@v:h"]])
        self.net.run(11.0)
        self.assertEqual(told, [("@u:h", True), ("@u:h", False)])
        with patch.object(LastSeen, "of", return_value=[]):
            self.assertEqual(now(self.two.places_of("@u:h")), [])

    def test_it_does_not_connect_to_itself(self) -> None:
        """Though its own place may be among those of the writers, which many processes share."""
        self.start()
        self.assertEqual(self.net.attempts, 2)

    def test_its_position_follows_the_other_one_and_nobody_waits_for_it(self) -> None:
        self.start()
        self.append(self.one, 3)
        self.net.run(2.0)
        waited = begin(self.one.wait_for("orders", "two", 4))
        self.assertEqual(waited, [None])

    def test_its_own_facts_need_not_be_waited_for(self) -> None:
        """Protocol E6."""
        self.start()
        self.assertEqual(now(self.one.wait_for("orders", "one", self.append(self.one)[0])), None)

    def test_trap_34_its_own_name_is_no_trouble_where_it_writes(self) -> None:
        self.start()
        with logged() as said:
            self.two._heard(
                self.two._links[0], [Position(StreamName("orders"), InstanceName("two"), Token(5), Token(5))]
            )
        self.assertEqual(said, [])
        with logged() as said:
            self.two._heard(self.two._links[0], [Position(StreamName("else"), InstanceName("two"), Token(5), Token(5))])
        self.assertEqual(len(said), 1)

    def test_what_it_invalidates_it_invalidates_in_itself_first(self) -> None:
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

    def test_what_is_written_here_is_served_and_not_copied(self) -> None:
        """Its table has it, and what others write there, already."""
        copying = self.make_worker("three", 9103, 9101, copy=True)
        self.start()
        started = begin(copying.start())
        self.net.run()
        self.assertEqual(started, [None])
        self.append(self.one, 2)
        self.net.run(1.0)
        page = now(copying.page("orders", "one", after=0, upto=None, limit=10))
        self.assertEqual([fact.token for fact in page.facts], [2, 3])
        self.assertEqual(self.store.followers.get((StreamName("orders"), copying.instance_name)), None)
        stopped = begin(copying.stop())
        self.net.run(11.0)
        self.assertEqual(stopped, [None])

    def test_its_status_shows_what_it_writes_and_what_it_follows(self) -> None:
        self.start()
        self.append(self.two)
        self.net.run(1.0)
        (status,) = [each for each in self.one.stream_statuses() if each.definition.name == "orders"]
        shown = [(each.instance, each.position, each.state) for each in status.writers]
        self.assertEqual(shown, [("one", 2, "writing"), ("two", 2, "live")])
        self.assertEqual({peer.name for peer in self.one.peer_statuses()}, {"localhost", "two"})
        samples = [(each.name, *sorted(each.labels.items())) for each in self.one.samples()]
        self.assertEqual(len(samples), len(set(samples)))
        counted = {each.name: each.value for each in self.one.samples()}
        self.assertEqual(counted["connections_total"], 2)
        now(self.one.check())

    def test_two_workers_that_wait_for_each_other_start_alone(self) -> None:
        """A writer can be followed before those that it follows are there."""
        starting = begin(self.one.start())
        del self.net.serving[9102]
        self.net.run(1.0)
        self.assertEqual(starting, [])
        self.assertEqual(self.append(self.one), [2])
        self.net.serving[9102] = self.two.factory()
        self.net.run(3.0)
        self.start()
