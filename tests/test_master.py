"""A master is a process that writes, and nothing else; several of them may share the streams of one PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.master import Master
from replication.serving import Serving
from replication.storage.postgres import PostgresStore
from replication.wire.grammar import InstanceName, StreamName
from tests.doubles import Net, connect, lines_of, logged
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from replication.writer import StreamWriter

A, B = InstanceName("a"), InstanceName("b")


def test_it_serves_under_its_role() -> None:
    """What it does is Serving's; its role is what status shows."""
    assert issubclass(Master, Serving)
    assert Master.role == "master"


class PostgresTests(HasDatabase, SynchronousTestCase):
    """Two masters, and one database."""

    def setUp(self) -> None:
        self.pump, self.net = Pump(), Net()
        self.a, self.b = self.make_master("a"), self.make_master("b")

    def make_master(self, name: str, **options: Any) -> Master:
        store = PostgresStore(self.url, self.pump)
        master = Master(instance_name=name, database=store, streams=["orders"], reactor=self.net, **options)
        self.addCleanup(lambda: self.pump.wait(master.stop()))
        return master

    def start(self, master: Master) -> StreamWriter:
        self.pump.wait(master.start())
        return master.stream("orders")

    def ids(self) -> list[int]:
        return [each for (each,) in self.sql("SELECT stream_id FROM stream_orders ORDER BY stream_id")]

    def test_they_append_at_once_and_no_id_is_given_twice(self) -> None:
        writers = [self.start(self.a), self.start(self.b)]
        appends = [
            Deferred.fromCoroutine(writers[number % 2].append([[number]] * (1 + number % 3))) for number in range(60)
        ]
        tokens = [token for answer in self.pump.wait(gatherResults(appends)) for token in answer]
        self.assertEqual(sorted(tokens), self.ids())
        self.assertEqual(len(set(tokens)), 120)

    def test_neither_announces_what_the_other_has_open(self) -> None:
        one, two = self.start(self.a), self.start(self.b)
        reservation = one.reserve()
        fact = self.pump.wait(reservation.__aenter__())
        self.assertEqual(self.pump.wait(two.append([["two"]])), [3])
        wire = connect(self.b.factory())
        wire.protocol.dataReceived(b"REPLICATE orders\n")
        self.assertIn("POSITION orders b 3 3", lines_of(wire.read()))
        self.net.advance(1.0)
        self.pump.wait(self.a.check())
        self.assertEqual(one.announced, 1, "its own fact is open")
        self.pump.wait(fact.write("one"))
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(one.announced, 3, "and once it is complete, the other's is known already")
        wire.lose()

    def test_the_idle_one_comes_after_the_other(self) -> None:
        one, two = self.start(self.a), self.start(self.b)
        self.pump.wait(two.append([["x"]] * 5))
        self.net.advance(1.0)
        self.pump.wait(self.a.check())
        self.assertEqual(one.announced, 6)
        self.pump.wait(self.a.store.transaction().commit([]))  # which comes after the position
        stored = self.pump.wait(self.a.store.stored())[StreamName("orders")]
        self.assertEqual(stored, {InstanceName("a"): 6, InstanceName("b"): 6})

    def test_protocol_f6_a_token_of_one_is_read_by_the_other(self) -> None:
        one, two = self.start(self.a), self.start(self.b)
        self.pump.wait(one.append([["a2"], ["a3"]]))
        self.pump.wait(two.append([["b4"]]))
        self.assertEqual(self.a.token("orders").of(A), 3)
        since, text = self.pump.wait(self.a.since("orders", "1", 2))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(2, A), (3, A)])
        self.assertTrue(since.limited)
        reservation = one.reserve()
        self.pump.wait(reservation.__aenter__())
        self.pump.wait(two.append([["b6"]]))
        since, text = self.pump.wait(self.a.since("orders", text, 100))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(4, B), (6, B)])
        self.assertEqual(text, "m3~1.6")
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.pump.wait(one.append([["a7"]]))
        self.pump.wait(self.b.store.transaction().commit([]))
        since, text = self.pump.wait(self.b.since("orders", text, 100))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(7, A)])
        self.assertFalse(since.limited)
        self.assertEqual(self.pump.wait(self.b.since("orders", text, 100))[0].written, [])

    def test_f17_two_processes_with_one_name(self) -> None:
        self.start(self.a)
        again = self.make_master("a")
        with self.assertRaisesRegex(StoreError, "another process writes as 'a': .* give each process a name"):
            self.start(again)
        self.pump.wait(self.a.stop())
        self.start(self.make_master("a"))

    def test_f15_a_sequence_behind_its_table_is_moved_forward_and_said(self) -> None:
        """One ahead of it, as after a failover, is nothing."""
        self.pump.wait(self.start(self.a).append([["x"]] * 5))
        self.pump.wait(self.a.stop())
        self.sql("SELECT setval('stream_orders_seq', 3)")
        with logged() as said:
            self.start(self.b)
        self.assertRegex(said[-1], "sequence .*stream_orders_seq.* was at 3, behind ID 6.*moved forward")
        self.assertEqual(self.pump.wait(self.b.stream("orders").append([["y"]])), [7])
        self.sql("SELECT setval('stream_orders_seq', 39)")
        with logged() as said:
            third = self.start(self.make_master("c"))
        self.assertEqual(([each for each in said if "orders" in each], third.announced), ([], 7))
        self.assertEqual(self.pump.wait(third.append([["z"]])), [40])

    def test_one_that_comes_back_under_its_name_or_another_goes_on_where_all_were(self) -> None:
        self.pump.wait(self.start(self.a).append([["x"]] * 2))
        self.pump.wait(self.a.stop())
        self.pump.wait(self.start(self.b).append([["y"]] * 2))
        back, renamed = self.start(self.make_master("a")), self.start(self.make_master("renamed"))
        self.assertEqual((back.announced, renamed.announced), (5, 5))
        self.assertEqual(self.pump.wait(back.append([["z"]])), [6])
