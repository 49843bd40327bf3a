"""Two masters write the same streams into one PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import NotAWriterError, StoppingError, StoreError
from replication.storage.postgres.holder import HOLDER_KEY
from replication.storage.postgres.ids import END_SESSIONS
from replication.storage.postgres.store import PostgresStore
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.positions import MultiWriterToken
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.former_writers import ENDED_AFTER
from replication.writer.master import Master
from tests.doubles import Net, connect, lines_of, logged
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump
from tests.system.daemons import until

if TYPE_CHECKING:
    from replication.writer.stream import StreamWriter

A, B = InstanceName("a"), InstanceName("b")


def test_the_role_is_master() -> None:
    assert Master.role == "master"


class PostgresTests(HasDatabase, SynchronousTestCase):
    """Two masters on one PostgreSQL."""

    def setUp(self) -> None:
        self.pump, self.net = Pump(), Net()
        self.a, self.b = self.make_master("a"), self.make_master("b")

    def make_master(self, name: str, **options: Any) -> Master:
        store = PostgresStore(self.url, self.pump)
        given: dict[str, Any] = {"streams": ["orders"], "reactor": self.net, **options}
        master = Master(instance_name=name, database=store, **given)
        self.addCleanup(lambda: self.pump.wait(master.stop()))
        return master

    def start(self, master: Master) -> StreamWriter:
        self.pump.wait(master.start())
        return master.stream("orders")

    def ids(self) -> list[int]:
        return [each for (each,) in self.sql("SELECT stream_id FROM stream_orders ORDER BY stream_id")]

    def test_two_masters_append_at_once_and_no_id_is_used_twice(self) -> None:
        writers = [self.start(self.a), self.start(self.b)]
        appends = [
            Deferred.fromCoroutine(writers[number % 2].append([[number]] * (1 + number % 3))) for number in range(60)
        ]
        tokens = [token for answer in self.pump.wait(gatherResults(appends)) for token in answer]
        self.assertEqual(sorted(tokens), self.ids())
        self.assertEqual(len(set(tokens)), 120)

    def test_a_stop_during_the_start_gives_the_name_back(self) -> None:
        for _ in range(2):  # the second is refused if the first one keeps its sessions
            master = self.make_master("c")
            master.stream("orders")
            starting, stopped = master.start(), master.stop()
            self.assertRaises(StoppingError, self.pump.wait, starting)
            self.pump.wait(stopped)
        self.start(self.make_master("c"))

    def test_each_master_waits_for_its_own_open_ids_only(self) -> None:
        one, two = self.start(self.a), self.start(self.b)
        reservation = one.reserve()
        fact = self.pump.wait(reservation.__aenter__())
        self.assertEqual(self.pump.wait(two.append([["two"]])), [3])
        wire = connect(self.b.factory())
        wire.protocol.dataReceived(b"REPLICATE orders\n")
        self.assertIn("POSITION orders b 3 3", lines_of(wire.read()))
        self.pump.wait(self.a._positions.poll())
        self.assertEqual(one.published, 1, "its own fact is open")
        self.pump.wait(fact.write("one"))
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.pump.wait(self.a._positions.poll())
        self.assertEqual(one.published, 3, "where the other master is, once it is stored")
        wire.lose()

    def test_an_epoch_that_begins_above_the_own_facts_has_another_state(self) -> None:
        """The other master may have written there since a restore that lost facts of this one."""
        self.sql("CREATE TABLE joined (id bigint, writer text, name text)")
        table = SourceTable(table="joined", row=("name",), id_column="id", instance_column="writer")
        a, b = (
            self.make_master(name, streams=[StreamDefinition("joined", row=("name",), tables=(table,))])
            for name in "ab"
        )

        async def write(master: Master) -> None:
            async with master.stream("joined").reserve() as fact:
                await fact.execute("INSERT INTO joined VALUES (%s, %s, 'x')", [fact.token, master.instance_name])

        self.pump.wait(b.start())
        self.pump.wait(write(b))
        self.pump.wait(a.start())
        names = [
            self.pump.wait(a.store.history(StreamName("joined"), writer))[-1].name.partition(".")[2]
            for writer in (B, A)
        ]
        self.assertEqual((names[0], names[1] != names[0]), ("00000001", True))

    def test_the_position_of_the_idle_master_follows_the_other(self) -> None:
        one, two = self.start(self.a), self.start(self.b)
        self.pump.wait(two.append([["x"]] * 5))
        self.pump.wait(self.a._positions.poll())
        self.assertEqual(one.published, 6)
        stored = self.pump.wait(self.a.store.stored_positions())[StreamName("orders")]
        self.assertEqual(stored, {InstanceName("a"): 6, InstanceName("b"): 6})

    def test_no_token_passes_rows_of_a_writer_that_has_never_run(self) -> None:
        """Other programs insert rows in its name, also before its first start: a program that polled missed them."""
        self.sql("CREATE TABLE visits (id bigserial PRIMARY KEY, who text, page text)")
        self.sql("INSERT INTO visits (who, page) VALUES ('b', 'early'), ('a', 'first')")
        shared: dict[str, Any] = {"table": "visits", "id_column": "id", "instance_column": "who", "row": ["page"]}
        mapped = StreamDefinition("visits", writers=["a", "b"], **shared)
        one, two = (self.make_master(each, streams=[mapped]) for each in "ab")
        self.pump.wait(one.start())
        until(lambda: self.pump.wait(one._positions.poll()) or one.stream("visits").published == 2, "a is at 2")
        page, text = self.pump.wait(one.served.since("visits", "0", 10))
        self.assertEqual([(each.token, each.writer) for each in page.written], [(2, A)])
        self.assertEqual((text.split("~")[0], one.token("visits").stream), ("m0", 0))
        self.pump.wait(two.start())
        until(lambda: self.pump.wait(two._positions.poll()) or two.stream("visits").published == 2, "b is at 2")
        page, text = self.pump.wait(one.served.since("visits", text, 10))
        self.assertEqual(([(each.token, each.writer) for each in page.written], text), ([(1, B)], "2"))

    def test_protocol_f6_a_token_of_one_master_is_valid_at_the_other(self) -> None:
        one, two = self.start(self.a), self.start(self.b)
        self.pump.wait(one.append([["a2"], ["a3"]]))
        self.pump.wait(two.append([["b4"]]))
        self.assertEqual(self.a.token("orders").of(A), 3)
        since, text = self.pump.wait(self.a.served.since("orders", "1", 2))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(2, A), (3, A)])
        self.assertTrue(since.limited)
        reservation = one.reserve()
        self.pump.wait(reservation.__aenter__())
        self.pump.wait(two.append([["b6"]]))
        since, text = self.pump.wait(self.a.served.since("orders", text, 100))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(4, B), (6, B)])
        self.assertEqual(text, "m3~1.6")
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.pump.wait(one.append([["a7"]]))
        self.pump.wait(self.b.store.transaction().commit([]))
        since, text = self.pump.wait(self.b.served.since("orders", text, 100))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(7, A)])
        self.assertFalse(since.limited)
        self.assertEqual(self.pump.wait(self.b.served.since("orders", text, 100))[0].written, [])

    def test_protocol_f6_the_token_of_a_master_passes_no_open_id_of_one_that_has_started_since_its_poll(self) -> None:
        """Otherwise a program that goes on from that token would never receive the fact."""
        one, two = self.start(self.a), self.start(self.b)
        reservation = two.reserve()
        fact = self.pump.wait(reservation.__aenter__())
        self.assertEqual(self.pump.wait(one.append([["a3"]])), [3])
        self.assertEqual((fact.token, self.a.token("orders").of(A), self.a.token("orders").of(B)), (2, 3, 1))
        self.pump.wait(self.a._positions.poll())
        self.assertEqual((self.a.token("orders").of(A), self.a.token("orders").of(B)), (3, 1))
        self.pump.wait(reservation.__aexit__(None, None, None))
        for master in (self.b, self.b, self.a):
            self.pump.wait(master._positions.poll())
        self.assertEqual(self.a.token("orders"), MultiWriterToken(Token(3)))

    def test_protocol_f6_a_page_passes_no_open_id_of_a_master_that_starts_while_positions_are_read(self) -> None:
        one = self.start(self.a)
        read = self.a.store.stored_positions

        async def answer_late() -> Any:
            positions = await read()
            reservation = self.start(self.b).reserve()
            fact = self.pump.wait(reservation.__aenter__())
            self.pump.wait(fact.write("b2"))
            self.pump.wait(one.append([["a3"]]))
            self.pump.wait(reservation.__aexit__(None, None, None))
            return positions

        with patch.object(self.a.store, "stored_positions", answer_late):
            first, text = self.pump.wait(self.a.served.since("orders", "0", 100))
        then, _ = self.pump.wait(self.a.served.since("orders", text, 100))
        self.assertEqual([(each.token, each.writer) for each in (*first.written, *then.written)], [(2, B), (3, A)])

    def test_a_second_process_that_writes_a_stream_in_memory_is_refused(self) -> None:
        """Each would count the IDs by itself, so two facts would have one ID, and no copy could have both."""
        typing = StreamDefinition("typing", in_memory=True)
        first, second = (self.make_master(each, streams=[typing], reactor=Net()) for each in ("first", "second"))
        self.pump.wait(first.start())
        with self.assertRaisesRegex(StoreError, "'typing' is in memory, so one process writes it, and .*: name"):
            self.pump.wait(second.start())
        named = StreamDefinition("typing", in_memory=True, writers=("first",))
        self.pump.wait(self.make_master("third", streams=["orders", named]).start())
        self.pump.wait(first.stop())
        after = self.make_master("fourth", streams=[typing], reactor=Net())
        self.pump.wait(after.start())
        self.assertEqual(self.pump.wait(after.stream("typing").append([["a"]])), [2])

    def test_f17_a_second_process_of_one_name_is_refused(self) -> None:
        self.start(self.a)
        again = self.make_master("a")
        with self.assertRaisesRegex(StoreError, "another process writes as 'a': .* give each process a name"):
            self.start(again)
        self.pump.wait(self.a.stop())
        self.start(self.make_master("a"))

    def test_f15_a_sequence_behind_its_table_is_moved_forward_and_logged(self) -> None:
        """A sequence ahead of its table, as after a failover, is not logged."""
        self.pump.wait(self.start(self.a).append([["x"]] * 5))
        self.pump.wait(self.a.stop())
        self.sql("SELECT setval('stream_orders_seq', 3)")
        with logged() as messages:
            self.start(self.b)
        self.assertRegex(messages[-1], "sequence .*stream_orders_seq.* was at 3, behind ID 6.*moved forward")
        self.assertEqual(self.pump.wait(self.b.stream("orders").append([["y"]])), [7])
        self.sql("SELECT setval('stream_orders_seq', 39)")
        with logged() as messages:
            third = self.start(self.make_master("c"))
        self.assertEqual(([each for each in messages if "orders" in each], third.published), ([], 7))
        self.assertEqual(self.pump.wait(third.append([["z"]])), [40])

    def removed_writer(self) -> tuple[Master, Any]:
        """Return a master that still writes, with ID 2 open and ID 3 committed, and the reservation of ID 2."""
        removed = self.make_master("removed", reactor=Net())  # its timers do not run: the process is paused
        reservation = self.start(removed).reserve()
        fact = self.pump.wait(reservation.__aenter__())
        self.pump.wait(fact.write("two"))
        self.assertEqual(self.pump.wait(removed.stream("orders").append([["three"]])), [3])
        return removed, reservation

    def end_sessions_of(self, master: Master) -> None:
        """End its sessions; it does not notice before it needs one."""
        store = master.store
        assert isinstance(store, PostgresStore)
        self.sql(END_SESSIONS, store._holder.id)
        self.wait_for_end(master)

    def wait_for_end(self, master: Master) -> None:
        """Wait until the server has noticed that the sessions of a master have ended."""
        store = master.store
        assert isinstance(store, PostgresStore)
        held = f"SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = ({HOLDER_KEY} & 4294967295)::oid"
        until(lambda: not self.sql(held, store._holder.id), "its sessions have ended")

    def remaining(self) -> Master:
        """Return a master whose configuration lacks the removed writer."""
        return self.make_master("a", streams=[StreamDefinition("orders", writers=("a", "b"))])

    def sent_of_removed(self, master: Master) -> list[str]:
        """Return what a new follower of a master receives about the removed writer."""
        wire = connect(master.factory())
        wire.protocol.dataReceived(b"REPLICATE orders\n")
        self.pump.wait(master._positions.refresh())  # after the one that the answer waits for
        lines = [line for line in lines_of(wire.read()) if " removed " in line]
        wire.lose()
        return lines

    def next_of_removed(self, master: Master) -> list[str]:
        """Poll once, and return what a new follower receives then; on a busy server a poll may fail."""
        self.poll(master, 1)
        return self.sent_of_removed(master)

    def poll(self, master: Master, times: int) -> None:
        for _ in range(times):
            self.pump.wait(master._positions.poll())

    def test_f17_a_removed_writer_commits_no_id_below_its_position_that_others_have_sent(self) -> None:
        """It lost its sessions, and is connected again after another process has started."""
        removed, reservation = self.removed_writer()
        self.end_sessions_of(removed)
        a = self.remaining()
        self.start(a)
        self.poll(a, 1 + ENDED_AFTER)
        self.assertEqual(self.sent_of_removed(a), ["POSITION orders removed 3 3"])
        with self.assertRaisesRegex(StoreError, "taken over the name 'removed'"):
            self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.ids(), [3])

    def test_f17_a_removed_writer_commits_no_id_below_its_position_that_others_have_raised(self) -> None:
        """It lost its sessions while the other process ran."""
        removed, reservation = self.removed_writer()
        a = self.remaining()
        writer = self.start(a)
        self.pump.wait(writer.append([["four"]]))
        self.poll(a, 2 * ENDED_AFTER)
        self.assertEqual(self.sent_of_removed(a), [], "it runs")
        self.end_sessions_of(removed)
        self.poll(a, ENDED_AFTER)
        self.assertEqual(self.sent_of_removed(a), [], "it may be connected again")
        self.poll(a, 3)
        self.assertEqual(self.sent_of_removed(a), ["POSITION orders removed 4 4"])
        with self.assertRaisesRegex(StoreError, "taken over the name 'removed'"):
            self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.ids(), [3, 4])

        again = self.make_master("removed", reactor=Net())  # begins above the position that others have sent
        self.assertEqual(self.pump.wait(self.start(again).append([["five"]])), [5])
        self.poll(a, 2 * ENDED_AFTER)
        self.assertEqual(self.sent_of_removed(a), [], "it runs again")

    def test_f17_a_removed_writer_that_lost_its_sessions_for_a_moment_commits(self) -> None:
        """A restart of the server ends all sessions."""
        removed, reservation = self.removed_writer()
        a = self.remaining()
        self.start(a)
        self.end_sessions_of(removed)
        self.poll(a, ENDED_AFTER - 1)
        self.assertEqual(self.sent_of_removed(a), [])
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.poll(a, 2 * ENDED_AFTER)
        self.assertEqual((self.ids(), self.sent_of_removed(a)), ([2, 3], []))

    def test_f17_the_settled_position_of_a_writer_that_has_stopped_is_sent_without_a_takeover(self) -> None:
        """It may have lost its sessions for a moment: then it goes on."""
        removed, reservation = self.removed_writer()
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.poll(removed, 1)
        self.end_sessions_of(removed)
        a = self.remaining()
        self.start(a)
        self.assertEqual(self.sent_of_removed(a), ["POSITION orders removed 3 3"])
        self.poll(a, 2 * ENDED_AFTER)
        self.assertEqual(self.pump.wait(removed.stream("orders").append([["four"]])), [4])
        self.assertEqual(self.sent_of_removed(a), [])

    def test_f17_a_removed_writer_is_listed_before_its_name_is_taken_over(self) -> None:
        """Otherwise followers log that no process knows it, and a cure that deletes its facts."""
        removed, reservation = self.removed_writer()
        self.end_sessions_of(removed)
        a = self.remaining()
        self.start(a)
        states = []
        for polls in (0, 1 + ENDED_AFTER):
            self.poll(a, polls)
            (status,) = a.served.stream_statuses("orders")
            states.append([(each.instance, each.state) for each in status.writers])
        self.assertEqual(states, [[(A, "writing"), ("removed", state)] for state in ("elsewhere", "former")])
        with self.assertRaisesRegex(StoreError, "taken over the name 'removed'"):
            self.pump.wait(reservation.__aexit__(None, None, None))

    def left(self, *streams: StreamDefinition | str) -> Master:
        """Return a master that has written ``orders``, and then was started again with other ``streams``."""
        before = self.make_master("removed")
        self.pump.wait(self.start(before).append([["two"]]))
        self.pump.wait(before.stop())
        return self.make_master("removed", streams=[*streams, "others"])

    def sent(self, master: Master) -> list[str]:
        """Return the positions that a new follower of ``orders`` receives from a master."""
        wire = connect(master.factory())
        wire.protocol.dataReceived(b"REPLICATE orders\n")
        self.pump.wait(master._positions.refresh())
        lines = [line for line in lines_of(wire.read()) if line.startswith("POSITION")]
        wire.lose()
        return lines

    def test_f17_a_process_that_is_no_writer_any_more_publishes_its_own_position(self) -> None:
        """Its name is claimed and connected, so the writers send none for it."""
        left = self.left(StreamDefinition("orders", writers=("a", "b")))
        self.pump.wait(left.start())
        a = self.remaining()
        writer = self.start(a)
        with self.assertRaises(NotAWriterError):
            left.stream("orders").reserve()
        self.assertEqual(self.sent(left), ["POSITION orders removed 2 2"])
        self.assertEqual(self.sent(a), ["POSITION orders a 2 2"])
        page = self.pump.wait(left.served.page("orders", None, after=0, upto=None, limit=10))
        self.assertEqual(([fact.token for fact in page.facts], page.upto), ([2], 2))

        wire = connect(left.factory())
        wire.protocol.dataReceived(b"REPLICATE orders\n")
        wire.read()
        self.pump.wait(writer.append([["three"]]))
        self.poll(left, 1)
        self.net.advance(0)
        self.assertEqual(lines_of(wire.read()), ["POSITION orders removed 2 3"], "linear order waits for it")
        wire.lose()
        self.assertEqual(self.sent(left), ["POSITION orders removed 3 3"])
        for master in (left, a):
            since, text = self.pump.wait(master.served.since("orders", "1", 100))
            self.assertEqual(
                ([(each.token, each.writer) for each in since.written], text), ([(2, "removed"), (3, A)], "3")
            )

        self.pump.wait(left.stop())
        self.wait_for_end(left)
        self.poll(a, 2 + ENDED_AFTER)
        self.assertEqual(self.sent(a), ["POSITION orders removed 3 3", "POSITION orders a 3 3"])

    def test_f17_a_process_that_was_never_a_writer_publishes_no_position(self) -> None:
        self.pump.wait(self.start(self.remaining()).append([["two"]]))
        other = self.make_master("other", streams=[StreamDefinition("orders", writers=("a", "b"))])
        self.pump.wait(other.start())
        self.poll(other, 2)
        self.assertEqual(self.sent(other), [])

    def test_f17_a_process_that_has_lost_its_sessions_does_not_raise_its_position(self) -> None:
        """Another process has taken over its name, and sends its position."""
        left = self.left(StreamDefinition("orders", writers=("a", "b")))
        self.pump.wait(left.start())
        a = self.remaining()
        writer = self.start(a)
        self.end_sessions_of(left)
        self.pump.wait(writer.append([["three"]]))
        raised = ["POSITION orders removed 3 3"]
        until(lambda: self.next_of_removed(a) == raised, "the raised position is sent")
        self.poll(left, 2)
        self.assertEqual(left.stream("orders").published, 2)

    def test_f17_a_process_that_does_not_have_a_stream_any_more_logs_a_warning(self) -> None:
        """It cannot send its position, and no other process does so while it runs."""
        left = self.left()
        self.start(self.remaining())
        with logged() as messages:
            self.pump.wait(left.start())
            self.poll(left, 2)
        (message,) = [each for each in messages if "orders" in each]
        self.assertIn("stream 'orders': 'removed' has written it, and is configured without it now", message)
        self.assertIn("with the writers that write it now", message)

    def test_f17_that_warning_is_logged_once_another_process_writes_the_stream(self) -> None:
        """A stream that no process writes any more may be left."""
        left = self.left()
        with logged() as messages:
            self.pump.wait(left.start())
            self.poll(left, 2)
            self.assertEqual([each for each in messages if "orders" in each], [])
            self.start(self.remaining())
            self.poll(left, 2)
        self.assertEqual(len([each for each in messages if "orders" in each]), 1)

    def test_a_master_that_returns_under_any_name_continues_after_all_facts(self) -> None:
        self.pump.wait(self.start(self.a).append([["x"]] * 2))
        self.pump.wait(self.a.stop())
        self.pump.wait(self.start(self.b).append([["y"]] * 2))
        back, renamed = self.start(self.make_master("a")), self.start(self.make_master("renamed"))
        self.assertEqual((back.published, renamed.published), (5, 5))
        self.assertEqual(self.pump.wait(back.append([["z"]])), [6])
