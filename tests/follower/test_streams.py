"""The followers of all streams: their modes, retries, cache invalidation, and paused connections."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from unittest.mock import patch

from twisted.internet.defer import Deferred

from replication.errors import (
    StoreError,
)
from replication.follower.streams import QUIET_PERIOD
from replication.net.protocol import ReplicationProtocol
from replication.streams.cursor import Cursor
from replication.wire.grammar import StreamName
from tests.doubles import begin, error_of, lines_of, logged
from tests.follower.cases import HELLO, HTTP, MASTER, OTHER, WIRE, WorkerCase, contents, position, rdata
from tests.net.test_client import FakeWriter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact


class NameTests(WorkerCase):
    def test_replicate_names_the_chosen_streams_and_others_are_ignored(self) -> None:
        self.worker = self.make_worker(streams=["orders", "caches"])
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.send(writer, rdata(2), rdata(2, stream="stock"))
        self.assertEqual(lines_of(writer.connections[0].received)[-1], "REPLICATE orders caches")
        self.assertEqual(contents(self.store), {"orders": {2: ("[]",)}, "caches": {}})
        self.assertEqual([each.definition.name for each in self.worker.served.stream_statuses()], ["orders", "caches"])

    def test_a_stream_without_a_position_of_any_writer_is_logged_once(self) -> None:
        self.worker = self.make_worker(streams=["orders", "odrers"])
        with logged() as messages:
            begin(self.worker.start())
            self.net.run(61.0)
            writer = self.serve(HELLO)
            self.net.run(5.0)
            self.send(writer, position(1, 1))
        self.assertEqual([line for line in messages if "odrers" in line], [], "the writer has connected a moment ago")
        with logged() as messages:
            self.net.run(60.0)
        found = ["no writer has sent a position of stream odrers, and all are connected: is that its name?"]
        notes = {each.definition.name: each.notes for each in self.worker.served.stream_statuses()}
        self.assertEqual((messages, notes), (found, {"orders": [], "odrers": found}))
        self.send(writer, position(1, 1, stream="odrers"))
        self.assertEqual([each.notes for each in self.worker.served.stream_statuses()], [[], []])

    def test_trap_34_a_writer_with_the_name_of_this_process_is_not_followed_and_logged_once(self) -> None:
        self.worker = self.make_worker(instance_name="master")
        with logged() as messages:
            started = begin(self.worker.start())
            writer = self.serve(HELLO + position(1, 1) + rdata(2))
            self.net.run(3.0)
            self.send(writer, rdata(3), position(3, 4))
            self.net.run(60.0)
        self.assertEqual((started, self.worker.served.stream_statuses()), ([], []))
        why = "the writer at tcp:127.0.0.1:9092 has the name of this process, master, so its facts are not followed: "
        cure = "give each process an instance name of its own"
        self.assertEqual([line for line in messages if "has the name of" in line], [why + cure])
        self.assertEqual([line for line in messages if "is that its name" in line], [])


class OrderTests(WorkerCase):
    """One function of a stream runs at a time, and unknown streams are ignored."""

    def test_a_ping_names_a_history_that_has_changed(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        with patch.object(Cursor, "compare_again") as compared:
            self.send(writer, b"PING history other master\nPING history orders\nPING 7\nPING history orders former\n")
            compared.assert_not_called()
            self.send(writer, b"PING history orders master\n")
        compared.assert_called_once()

    def test_trap_8_facts_that_arrive_while_others_are_applied_wait(self) -> None:
        running: list[Deferred[None]] = []
        most = 0

        @self.worker.on("orders")
        async def slow(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            nonlocal most
            self.seen.append([fact.token for fact in facts])
            running.append(Deferred())
            most = max(most, len(running))
            await running[-1]
            running.pop()

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, rdata(2))
        self.send(writer, rdata(3), position(3, 5))
        self.send(writer, rdata(6))
        while running:
            running[-1].callback(None)
            self.net.run()
        self.assertEqual((self.seen, most, self.at()), ([[2], [3, 6]], 1, 6))

    def test_trap_31_unknown_and_unwanted_streams_are_ignored(self) -> None:
        self.worker = self.make_worker(streams=["orders"])
        self.apply()
        writer = self.serve(HELLO + position(1, 1, "newest") + position(1, 1) + rdata(2, stream="newest"))
        self.start()
        self.send(writer, rdata(3, stream="unknown"), position(1, 9, "newer_still"), rdata(2))
        self.assertEqual((self.at(), len(writer.connections)), (2, 1))
        self.assertEqual([status.definition.name for status in self.worker.served.stream_statuses()], ["orders"])

    def test_trap_44_replicate_is_sent_again_after_each_reconnect(self) -> None:
        """A writer does not send what it published while the connection was lost."""
        writer = self.serve(HELLO + position(1, 1), HELLO + position(1, 5), HELLO + position(5, 7))
        self.start()
        for _ in range(2):
            self.net.cut()
            self.net.run(1)
        self.assertEqual(len(writer.connections), 3)
        for each in writer.connections:
            self.assertEqual(lines_of(each.received)[-1], "REPLICATE ")
        self.assertEqual(self.at(), 7)

    def test_of_two_connections_to_one_writer_the_other_is_followed_when_one_is_lost(self) -> None:
        """The other has sent nothing but rows since its POSITION, and they were dropped."""
        ports = 9192, WIRE
        self.worker = self.make_worker(connect=[f"tcp:127.0.0.1:{port}" for port in ports])
        self.apply()
        other, first = [self.serve(HELLO + position(1, 1), port=port) for port in ports]
        self.start()
        for writer in (first, other):
            self.send(writer, rdata(2))
        first.connections[0].transport.loseConnection()
        self.net.serving.clear()
        self.net.run()
        asked = [lines_of(each.connections[0].received).count("REPLICATE ") for each in (first, other)]
        self.assertEqual(asked, [1, 2])
        self.send(other, position(2, 2), rdata(3))
        self.assertEqual((self.seen, self.at()), ([[2], [3]], 3))


class WithdrawalTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        self.master = self.serve(HELLO + position(1, 3) + position(1, 4, writer="other"))
        self.other = self.serve(HELLO + position(1, 4, writer="other"), port=9102)

    def test_a_writer_is_followed_on_another_connection_once_its_position_is_withdrawn(self) -> None:
        """The last POSITION decides which connection is followed, and only the writer's own brings its facts."""
        self.start()
        self.net.run(1)
        self.send(self.master, position(1, 4, writer="other"))
        self.send(self.other, rdata(5, writer="other"))
        self.assertEqual(self.at(writer="other"), 4)
        asked = len(self.other.connections[-1].received)
        self.send(self.master, b"PING withdrawn orders other\n")
        self.assertEqual(lines_of(self.other.connections[-1].received[asked:]), ["REPLICATE "])
        self.send(self.other, position(1, 4, writer="other"), rdata(5, writer="other"))
        self.assertEqual(self.at(writer="other"), 5)

    def test_a_position_that_is_withdrawn_while_a_stream_is_opened_is_not_followed(self) -> None:
        self.store.close_gate("positions")
        self.start()
        self.net.run(1)
        self.send(self.master, position(1, 4, writer="other"), b"PING withdrawn orders other\n")
        self.store.open_gate("positions")
        self.net.run()
        follower = self.worker._followed.get("orders")
        assert follower is not None
        self.assertEqual([follower.is_linked(each) for each in (MASTER, OTHER)], [True, False])


class OpeningTests(WorkerCase):
    """A stream whose table cannot be declared stops alone, and is followed once the table can be declared."""

    def test_a_stream_that_cannot_be_opened_is_retried_and_replicate_is_sent_again(self) -> None:
        self.store.errors["declare"] = StoreError("locked")
        writer = self.serve(HELLO + position(1, 1) + rdata(2))
        with logged() as messages:
            self.start()
            self.net.run(0.2)
            self.assertEqual(self.at(), -1)
            waiting = begin(self.worker.wait_for("orders", "master", 2, timeout=0.1))
            self.net.run(0.2)
        self.assertEqual(messages, ["cannot follow orders: locked"])
        self.assertEqual(self.worker.served.absent_writers(), messages)
        self.assertIn("it cannot be followed: locked", str(error_of(waiting)))
        del self.store.errors["declare"]
        self.net.run(1.0)
        self.assertEqual(lines_of(writer.connections[0].received).count("REPLICATE "), 3)
        self.net.serving[HTTP] = self.page_of({2: "[]"}, 2)
        self.send(writer, position(2, 2))
        self.net.run(1.0)
        self.assertEqual(contents(self.store), {"orders": {2: ("[]",)}})
        self.assertEqual(self.worker.served.absent_writers(), [])

    def page_of(self, rows: dict[int, str], upto: int) -> FakeWriter:
        updates = ",".join(f"[{token},{row}]" for token, row in rows.items())
        body = f'{{"updates":[{updates}],"upto_token":{upto},"limited":false}}'.encode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        return FakeWriter(head % len(body) + body)

    def test_a_stream_name_that_no_table_can_have_is_logged_once_and_keeps_no_rows(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "été"))
        with logged() as messages:
            self.start()
            for number in range(2, 50):
                self.send(writer, rdata(number, stream="été"), rdata(number))
                self.net.run(1.0)
        self.assertEqual(len(messages), 1)
        self.assertIn("été", messages[0])
        self.assertEqual(self.at(), 49)
        self.assertIsNone(self.worker._followed._followers[StreamName("été")]._early)

    def test_stop_ends_the_retries(self) -> None:
        self.store.errors["declare"] = StoreError("locked")
        self.serve(HELLO + position(1, 1))
        with logged():
            self.start()
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual((stopped, self.net.getDelayedCalls()), ([None], []))

    def test_a_stream_that_cannot_be_opened_because_the_worker_stops_is_not_logged(self) -> None:
        declared: Deferred[None] = Deferred()
        self.store.declare = lambda *_definitions: declared  # type: ignore[assignment, method-assign]
        self.serve(HELLO + position(1, 1))
        with logged() as messages:
            self.start()
            self.net.run(0.2)
            stopped = begin(self.worker.stop())
            declared.errback(StoreError("database ':memory:' is closed"))
            self.net.run()
        self.assertEqual((stopped, messages), ([None], []))


class AuditedRelayTests(WorkerCase):
    """Behind a relay that compares its facts with a database, a worker that uses facts compares with the relay."""

    INTERVAL = 10.0

    def setUp(self) -> None:
        super().setUp()
        self.worker = self.make_worker(audit_interval=self.INTERVAL, copy=False)
        self.worker.cached()(lambda: None)
        self.http = self.net.serving[HTTP] = FakeWriter(b"")
        self.answer(audited=1)
        self.serve(HELLO + position(1, 1, "caches") + position(1, 1, "stock"), HELLO + position(1, 1, "caches"))

    def answer(self, *, audited: int | None, late: int = 0) -> None:
        streams = [
            {"name": name, "writers": [{"instance": "master", "position": 1, "audited": audited, "late": late}]}
            for name in ("caches", "stock")
        ]
        body = json.dumps({"streams": streams}).encode()
        self.http.scripts = [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body]

    def asked(self) -> int:
        """Return how often the relay was asked; the history of the caches is asked for, too."""
        return len([each for each in self.http.connections if b"/history" not in each.received])

    def audited(self) -> dict[str, int | None]:
        return {
            each.definition.name: writer.audited
            for each in self.worker.served.stream_statuses()
            for writer in each.writers
        }

    def test_only_streams_that_are_used_are_compared(self) -> None:
        self.start()
        self.net.run(1.0)
        self.assertEqual(self.audited(), {"caches": 1, "stock": None})

    def test_it_is_asked_in_each_interval_and_at_each_connection(self) -> None:
        self.start()
        self.net.run(QUIET_PERIOD + 1.0)  # after this time its writers are looked at, once
        before = self.asked()
        self.net.run(self.INTERVAL)
        self.assertEqual(self.asked(), before + 1)
        self.answer(audited=None)
        with logged():
            self.net.cut()
            self.net.run(1.0)
        self.assertEqual(self.audited()["caches"], None)


class PauseTests(WorkerCase):
    def fill(self, first: int) -> bytes:
        """Return facts beyond half of the limit of what waits."""
        return b"".join([rdata(token, f'"{"x" * 16_000}"') for token in range(first, first + 300)])

    def paused(self) -> bool:
        peer = self.worker._clients[0].peer
        assert isinstance(peer, ReplicationProtocol)
        return bool(peer.paused)

    def test_a_connection_is_paused_while_too_much_waits_to_be_applied(self) -> None:
        self.apply()
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.store.close_gate("commit")
        self.send(writer, self.fill(2))
        self.assertTrue(self.paused())
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual((self.paused(), self.at()), (False, 301))

    def test_a_stopped_stream_does_not_pause_the_connection(self) -> None:
        self.apply()
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            self.send(writer, rdata(2))
            self.send(writer, self.fill(3), rdata(2, stream="stock"))
        self.assertEqual((self.paused(), self.at(), self.at("stock")), (False, 1, 2))


class AccessTokenTests(WorkerCase):
    """The keys of one cache of a Synapse are access tokens; this process must not pass them on (docs C4)."""

    ROW, HIDDEN = '["get_user_by_access_token",["syt_1"],5]', '["get_user_by_access_token",null,5]'

    def follow(self) -> None:
        writer = self.serve(HELLO + position(1, 1, "caches"))
        self.start()
        self.send(writer, rdata(2, self.ROW, "caches"), rdata(3, '["other",["a"],5]', "caches"))

    def test_a_copy_has_no_access_tokens_and_a_cache_is_invalidated_by_them(self) -> None:
        self.worker = self.make_worker(copy=True)

        @self.worker.cached(name="get_user_by_access_token")
        def get_user(token: str) -> str:
            return token.upper()

        self.assertEqual((get_user("syt_1"), get_user("syt_2")), ("SYT_1", "SYT_2"))
        self.follow()
        self.assertEqual(contents(self.store)["caches"], {2: (self.HIDDEN,), 3: ('["other",["a"],5]',)})
        self.assertEqual(get_user.cache_info().currsize, 1)  # the other one stays

    def test_a_function_receives_no_access_tokens(self) -> None:
        self.check_function(linear=False)

    def test_a_function_of_the_linear_order_receives_no_access_tokens(self) -> None:
        self.check_function(linear=True)

    def check_function(self, *, linear: bool) -> None:
        texts: list[str] = []

        @self.worker.on("caches", linear=linear)
        def note(facts: Sequence[Fact], _: ApplyTransaction) -> None:
            texts.extend(text for fact in facts for text in fact.texts)

        self.follow()
        self.assertEqual(texts, [self.HIDDEN, '["other",["a"],5]'])

    def test_with_access_tokens_a_copy_has_them(self) -> None:
        self.worker = self.make_worker(access_tokens=True)
        self.follow()
        self.assertEqual(contents(self.store)["caches"][2], (self.ROW,))
