"""Writing facts: whatever becomes of a transaction, its IDs complete, and followers hear of it in order and in time."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication import writer as writer_module
from replication.errors import NotAWriterError, RowError, StoreError, StreamError
from replication.net.protocol import Limits
from replication.storage import open_store
from replication.streams.registry import CACHES, StreamDefinition
from replication.streams.settling import Settling
from replication.waiting import Waits
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import OpenFact, Reservation, StreamWriter
from tests.doubles import FragileStore, SharedStore, begin, error_of, lines_of, logged, now
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.python.failure import Failure

    from replication.session.feed import Chunk
    from replication.streams.facts import Fact
    from replication.streams.seams import IStreamStore

ORDERS = StreamName("orders")
ME = InstanceName("master")


class Process:
    """What a writer needs of a master, and notes of what it said: ``told`` are the lines of all streams."""

    def __init__(self, store: IStreamStore, *, limits: Limits | None = None) -> None:
        self.instance_name = ME
        self.limits = limits or Limits()
        self.store = store
        self.clock: Any = Clock()
        self.waits = Waits(self.clock)
        self.wall: Callable[[], float] = lambda: 1700.5
        self.stopping = False
        self.told: list[str] = []
        self.committed_facts: list[tuple[StreamName, Fact]] = []
        self.reservations: list[Reservation] = []
        self.ready: Deferred[None] = Deferred()
        self.ready.callback(None)
        self.writers: dict[StreamName, StreamWriter] = {}

    async def started(self) -> None:
        if not self.ready.called:
            await self.ready

    async def declare(self, *definitions: StreamDefinition) -> None:
        await self.store.open()
        for definition in definitions:
            await self.store.declare(definition)
            owner = None if definition.shares is None else self.writers[definition.shares]
            writer = self.writers[definition.name] = StreamWriter(self, definition, owner)
            start = max([Token(1), *(await self.store.positions(definition.name)).values()])
            writer.begin(start, self.store.sequence(definition.name))

    def caches_writer(self) -> StreamWriter:
        return self.writers[CACHES]

    def tell(self, stream: StreamName, chunk: Chunk) -> None:
        lines = lines_of(chunk.data)
        assert chunk.lines == len(lines)
        assert all(line.split(" ")[1] == stream for line in lines)
        self.told += lines

    def committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        self.committed_facts += [(stream, fact) for fact in facts]

    def reservation_begins(self, reservation: Reservation) -> None:
        if self.stopping:
            raise StreamError("stopping")
        self.reservations.append(reservation)

    def reservation_ended(self, reservation: Reservation) -> None:
        self.reservations.remove(reservation)

    def news(self) -> list[str]:
        """Return what was told since the last time."""
        news, self.told = self.told, []
        return news


DEFINITIONS = (
    StreamDefinition("orders", row=("order_id", "state")),
    StreamDefinition("notes"),
    StreamDefinition("debts", negative=True),
    StreamDefinition("foreign", writers=("somebody",)),
    StreamDefinition(CACHES, row=("cache_func", "keys", "invalidation_ts")),
)


class WriterCase(SynchronousTestCase):
    limits = Limits()

    def make_store(self) -> FragileStore:
        return FragileStore()

    def setUp(self) -> None:
        self.store = self.make_store()
        self.process = Process(self.store, limits=self.limits)
        now(self.process.declare(*DEFINITIONS))
        self.store.asked.clear()
        self.orders, self.notes = self.process.writers[ORDERS], self.process.writers[StreamName("notes")]

    def tearDown(self) -> None:
        self.assertEqual(self.process.reservations, [])
        self.assertEqual(self.process.clock.getDelayedCalls(), [])

    def hold(self, writer: StreamWriter | None = None, count: int | None = None) -> Any:
        """Reserve now; returns the reservation and what it gave."""
        reservation = (writer or self.notes).reserve(count)
        return reservation, now(reservation.__aenter__())

    def leave(self, reservation: Reservation, error: BaseException | None = None) -> list[Failure | None]:
        """Leave the block, with an error or without."""
        kind = None if error is None else type(error)
        return begin(reservation.__aexit__(kind, error, None))

    def stored(self, name: str = "notes", after: int = 0) -> dict[int, tuple[str, ...]]:
        page = now(self.store.facts(StreamName(name), ME, after=Token(after), upto=Token(10**6), limit=10**6))
        return {fact.token: fact.texts for fact in page.facts}

    def position(self, name: str = "notes") -> int:
        return now(self.store.positions(StreamName(name))).get(ME, Token(0))


class ReserveTests(WriterCase):
    def test_a_fact_is_stored_and_told_when_its_block_is_left(self) -> None:
        async def place() -> int:
            async with self.orders.reserve() as fact:
                await fact.write(["o1", "placed"])
                await fact.write(("o1", "paid"))
                self.assertEqual((self.stored("orders"), self.process.told), ({}, []))
                return int(fact.token)

        self.assertEqual(now(place()), 2)
        self.assertEqual(self.stored("orders"), {2: ('["o1","placed"]', '["o1","paid"]')})
        self.assertEqual(
            self.process.news(), ['RDATA orders master batch ["o1","placed"]', 'RDATA orders master 2 ["o1","paid"]']
        )

    def test_facts_are_told_in_order_whatever_order_they_complete_in(self) -> None:
        """The example of protocol F1."""
        held = {token: self.hold()[0] for token in (2, 3)}
        self.leave(held[3])
        self.assertEqual(self.process.news(), [])
        self.leave(held[2])
        self.assertEqual(self.process.news(), ["POSITION notes master 1 3"])
        held = {token: self.hold()[0] for token in (4, 5, 6)}
        self.leave(held[5])
        self.assertEqual(self.process.news(), [])
        self.leave(held[4])
        self.assertEqual(self.process.news(), ["POSITION notes master 3 5"])
        self.leave(held[6])
        self.assertEqual(self.process.news(), ["POSITION notes master 5 6"])

    def test_an_exception_rolls_back_completes_and_comes_out(self) -> None:
        async def fail() -> None:
            async with self.notes.reserve() as fact:
                await fact.write("never")
                await fact.execute("INSERT …")
                raise ZeroDivisionError

        self.assertIsInstance(error_of(begin(fail())), ZeroDivisionError)
        self.assertEqual(self.store.ends[0], "rolled back")
        self.assertEqual(self.stored(), {})
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])
        self.assertEqual(now(self.notes.append([[1]])), [3])

    def test_a_fact_without_rows_moves_the_position_only(self) -> None:
        reservation, _ = self.hold()
        self.leave(reservation)
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])
        self.assertEqual(self.position(), 2)

    def test_several_facts_in_one_transaction_each_have_their_own_rows(self) -> None:
        reservation, facts = self.hold(count=3)
        self.assertEqual([fact.token for fact in facts], [2, 3, 4])
        now(facts[2].write("last"))
        now(facts[0].write("first"))
        now(facts[0].execute("one"))
        now(facts[1].execute("two"))
        self.leave(reservation)
        self.assertEqual(self.store.ends, ["committed"])
        self.assertEqual(self.store.executed, ["one", "two"])
        self.assertEqual(self.stored(), {2: ('"first"',), 4: ('"last"',)})
        self.assertEqual(self.process.news(), ['RDATA notes master 2 "first"', 'RDATA notes master 4 "last"'])

    def test_one_of_several_gives_a_list_even_if_it_is_one(self) -> None:
        reservation, facts = self.hold(count=1)
        self.assertIsInstance(facts[0], OpenFact)
        self.leave(reservation)

    def test_no_facts_at_all_cannot_be_reserved(self) -> None:
        for count in (0, -1):
            with self.assertRaisesRegex(StreamError, "one ID at least"):
                self.notes.reserve(count)

    def test_a_reservation_is_good_for_one_block(self) -> None:
        reservation, _ = self.hold()
        self.assertIsInstance(error_of(begin(reservation.__aenter__())), StreamError)
        self.leave(reservation)
        self.assertIsInstance(error_of(begin(reservation.__aenter__())), StreamError)
        self.assertEqual(self.notes.pending.open_count, 0)

    def test_a_fact_is_closed_once_its_block_is_left(self) -> None:
        for error in (None, ValueError("no")):
            reservation, fact = self.hold()
            self.leave(reservation, error)
            self.assertIsInstance(error_of(begin(fact.write(1))), StreamError)
            self.assertIsInstance(error_of(begin(fact.execute("x"))), StreamError)
            with self.assertRaises(StreamError):
                fact.invalidate("get", ["1"])

    def test_a_fact_is_closed_while_it_is_being_committed(self) -> None:
        reservation, fact = self.hold()
        self.store.close_gate("commit")
        left = self.leave(reservation)
        self.assertIsInstance(error_of(begin(fact.write("too late"))), StreamError)
        self.store.open_gate("commit")
        self.assertEqual(left, [None])
        self.assertEqual(self.stored(), {})

    def test_a_row_must_be_json_and_have_the_declared_fields(self) -> None:
        reservation, fact = self.hold(self.orders)
        for row, why in [
            (["o1"], "is [order_id, state], not an array of 1"),
            (["o1", "x", "y"], "not an array of 3"),
            ({"order_id": 1, "state": 2}, "not a dict"),
            ("o1", "not a str"),
            (["o1", float("nan")], "must be JSON"),
            (["o1", {1, 2}], "must be JSON"),
        ]:
            error = error_of(begin(fact.write(row)))
            self.assertIsInstance(error, RowError)
            self.assertIn(why, str(error))
        now(fact.write(["o1", "placed"]))  # a refusal that the application survives harms nothing
        self.leave(reservation)
        self.assertEqual(self.stored("orders"), {2: ('["o1","placed"]',)})

    def test_without_declared_fields_a_row_is_any_json(self) -> None:
        now(self.notes.append([[None, 1, "a", [], {"é": "é"}]]))
        self.assertEqual(self.stored()[2], ("null", "1", '"a"', "[]", '{"\\u00e9":"\\u00e9"}'))

    def test_a_negative_stream_has_negative_ids_in_its_table_and_positive_ones_on_the_wire(self) -> None:
        reservation, fact = self.hold(self.process.writers[StreamName("debts")])
        self.assertEqual((fact.token, fact.stream_id), (2, -2))
        self.leave(reservation)
        self.assertEqual(self.process.news(), ["POSITION debts master 1 2"])
        reservation, fact = self.hold()
        self.assertEqual(fact.stream_id, 2)
        self.leave(reservation)

    def test_only_a_writer_may_write(self) -> None:
        foreign = self.process.writers[StreamName("foreign")]
        with self.assertRaisesRegex(NotAWriterError, "'master' may not write to 'foreign'; its writers: somebody"):
            foreign.reserve()
        self.assertIsInstance(error_of(begin(foreign.append([[1]]))), NotAWriterError)

    def test_what_must_wait_for_the_start_holds_nothing(self) -> None:
        self.process.ready = Deferred()
        entering = begin(self.notes.reserve().__aenter__())
        self.assertEqual((self.notes.pending.open_count, self.process.reservations), (0, []))
        self.process.stopping = True
        self.process.ready.callback(None)
        self.assertIsInstance(error_of(entering), StreamError)
        self.assertEqual(self.notes.pending.highest, 1)

    def test_streams_do_not_wait_for_one_another(self) -> None:
        reservation, _ = self.hold()
        now(self.orders.append([[["o", "p"]]]))
        self.assertEqual(len(self.process.news()), 1)
        self.leave(reservation)

    def test_a_writer_that_begins_again_is_above_all_that_was_announced(self) -> None:
        """Traps 38, 40 and 41: a restart after commits, rollbacks and a crash in the middle."""
        chance = random.Random(3)
        held: list[Reservation] = []
        announced = 1
        for _ in range(60):
            if held and chance.random() < 0.5:
                error = ValueError("no") if chance.random() < 0.5 else None
                self.leave(held.pop(chance.randrange(len(held))), error)
            else:
                held.append(self.hold()[0])
            for line in self.process.news():
                announced = max(announced, int(line.rpartition(" ")[2]))
            self.assertEqual(self.notes.announced, announced)
            again = Process(self.store)
            now(again.declare(StreamDefinition("notes")))
            self.assertGreater(again.writers[StreamName("notes")].pending.reserve(1)[0], announced)
        for each in held:
            self.leave(each)


class FailureTests(WriterCase):
    def test_a_commit_that_fails_is_told_to_the_caller_and_completes(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        reservation, _ = self.hold()
        with logged() as said:
            self.assertEqual(str(error_of(self.leave(reservation))), "disk full")
        self.assertEqual(self.notes.pending.open_count, 0)
        self.assertEqual(self.process.news(), [], "nothing durable says so")
        self.assertEqual(len(said), 1)
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_a_position_of_rolled_back_ids_is_durable_before_it_is_told(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        self.assertEqual(len(self.leave(reservation, ValueError("no"))), 1, "the caller does not wait for that")
        self.assertEqual((self.process.news(), self.position()), ([], 0))
        self.store.open_gate("commit")
        self.assertEqual((self.process.news(), self.position()), (["POSITION notes master 1 2"], 2))

    def test_rolled_back_ids_below_a_committed_one_cost_no_transaction(self) -> None:
        one, two = self.hold()[0], self.hold()[0]
        self.leave(one, ValueError("no"))
        self.store.asked.clear()
        self.leave(two)
        self.assertEqual(self.store.asked.count("commit"), 1)

    def test_facts_that_commit_while_a_position_is_stored_are_told_after_that(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        self.leave(reservation, ValueError("no"))
        gate = self.store.gates.pop("commit")
        now(self.notes.append([["later"]]))
        self.assertEqual(self.process.news(), [])
        gate.callback(None)
        self.assertEqual(self.process.news(), ['RDATA notes master 3 "later"'])

    def test_a_store_that_fails_for_long_is_asked_again_and_again_and_complained_of_once(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        with logged() as said:
            self.leave(reservation, ValueError("no"))
            self.process.clock.pump([1.0] * 10)
            self.store.errors["commit"] = StoreError("disk on fire")
            self.process.clock.pump([1.0] * 10)
        self.assertEqual(said, ["notes waits: disk full", "notes waits: disk on fire"])
        self.assertEqual(self.store.asked.count("commit"), 21)
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_a_rollback_that_fails_completes_all_the_same(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("x"))
        self.store.errors["rollback"] = StoreError("gone")
        self.assertIsInstance(error_of(self.leave(reservation, ValueError("no"))), StoreError)
        self.assertEqual(self.notes.pending.open_count, 0)

    def test_when_we_stop_nobody_waits_for_a_store_that_fails(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        with logged() as said:
            self.leave(reservation, ValueError("no"))
            self.process.stopping = True
            self.process.waits.end()
        self.assertEqual(len(said), 1)
        self.assertEqual(self.process.news(), [])

    def test_an_id_that_is_rolled_back_after_the_stores_end_is_let_be(self) -> None:
        reservation, _ = self.hold()
        self.process.stopping = True
        now(self.store.close())
        with logged() as said:
            self.leave(reservation, ValueError("no"))
        self.assertEqual(said, [])
        self.assertEqual(self.notes.pending.open_count, 0)

    def test_a_bug_in_the_store_stops_the_announcing_and_says_so(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = TypeError("a bug")
        self.leave(reservation, ValueError("no"))
        self.assertEqual(len(self.flushLoggedErrors(TypeError)), 1)
        del self.store.errors["commit"]
        now(self.notes.append([["later"]]))
        self.assertEqual(self.process.news(), [], "a row after a hole would hide the hole")


class CancellationTests(WriterCase):
    def test_cancelling_a_caller_in_its_block_rolls_back(self) -> None:
        async def work() -> None:
            async with self.notes.reserve() as fact:
                await fact.write("never")
                await Deferred()

        working = Deferred.fromCoroutine(work())
        outcome = begin(working)
        working.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(self.stored(), {})
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_cancelling_a_caller_during_its_commit_does_not_stop_the_commit(self) -> None:
        self.store.close_gate("commit")

        async def work() -> None:
            async with self.notes.reserve() as fact:
                await fact.write("kept")

        working = Deferred.fromCoroutine(work())
        outcome = begin(working)
        working.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(self.notes.pending.open_count, 1)
        self.store.open_gate("commit")
        self.assertEqual(self.process.news(), ['RDATA notes master 2 "kept"'])

    def test_cancelling_a_caller_during_its_rollback_does_not_stop_the_rollback(self) -> None:
        self.store.close_gate("rollback")

        async def work() -> None:
            async with self.notes.reserve() as fact:
                await fact.execute("x")
                raise ValueError("no")

        working = Deferred.fromCoroutine(work())
        outcome = begin(working)
        working.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.store.open_gate("rollback")
        self.assertEqual(self.store.ends[0], "rolled back")
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def drop(self, *, execute: bool) -> None:
        async def work() -> None:
            async with self.notes.reserve() as fact:
                await fact.write("never")
                if execute:
                    await fact.execute("x")
                await Deferred()

        working = work()
        working.send(None)
        working.close()

    def test_a_coroutine_that_is_dropped_rolls_back_without_waiting(self) -> None:
        self.store.close_gate("rollback")
        self.drop(execute=True)
        self.assertEqual(self.notes.pending.open_count, 1)
        self.store.open_gate("rollback")
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_a_coroutine_that_is_dropped_before_any_statement_completes_at_once(self) -> None:
        self.drop(execute=False)
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_a_rollback_that_fails_when_nobody_waits_is_logged(self) -> None:
        self.store.errors["rollback"] = StoreError("gone")
        self.drop(execute=True)
        self.assertEqual(len(self.flushLoggedErrors(StoreError)), 1)
        self.assertEqual(self.notes.pending.open_count, 0)

    def test_an_abandoned_fact_is_rolled_back_and_its_owner_told(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("x"))
        now(reservation.abandon())
        self.assertEqual(self.store.ends[0], "rolled back")
        self.assertIn("this process is stopping", str(error_of(begin(fact.write(1)))))
        self.assertIn("this process is stopping", str(error_of(self.leave(reservation))))
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"], "and completed once")

    def test_an_abandoned_fact_whose_owner_fails_too_is_completed_once(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("x"))
        now(reservation.abandon())
        self.assertEqual(self.leave(reservation, ValueError("no")), [None])

    def test_what_is_being_committed_is_not_abandoned(self) -> None:
        reservation, fact = self.hold()
        now(fact.write("kept"))
        self.store.close_gate("commit")
        left = self.leave(reservation)
        now(reservation.abandon())
        self.store.open_gate("commit")
        self.assertEqual(left, [None])
        self.assertEqual(self.stored(), {2: ('"kept"',)})


class InvalidateTests(WriterCase):
    def test_it_is_a_fact_of_the_caches_stream_in_the_same_transaction(self) -> None:
        reservation, fact = self.hold()
        now(fact.write("x"))
        fact.invalidate("get_order", [17, "a", None, True])
        now(fact.invalidate("get_total", None))
        self.leave(reservation)
        self.assertEqual(self.store.ends, ["committed"])
        rows = ('["get_order",["17","a","None","True"],1700500]', '["get_total",null,1700500]')
        self.assertEqual(self.stored("caches"), {2: rows})
        self.assertEqual(
            self.process.news(),
            ['RDATA notes master 2 "x"', f"RDATA caches master batch {rows[0]}", f"RDATA caches master 2 {rows[1]}"],
        )

    def test_a_string_is_not_taken_for_a_list_of_keys(self) -> None:
        reservation, fact = self.hold()
        with self.assertRaisesRegex(RowError, r"keys are a list of arguments, not 'abc': write \['abc'\]"):
            fact.invalidate("price", "abc")
        self.leave(reservation)

    def test_a_rollback_takes_it_back(self) -> None:
        reservation, fact = self.hold()
        fact.invalidate("get_order", ["17"])
        self.leave(reservation, ValueError("no"))
        self.assertEqual(self.stored("caches"), {})
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])
        self.assertEqual(self.process.caches_writer().pending.highest, 1, "no ID is reserved before the commit")

    def test_a_fact_of_the_caches_stream_takes_it_up_itself(self) -> None:
        reservation, facts = self.hold(self.process.caches_writer(), count=2)
        now(facts[0].write(["a", None, 1]))
        facts[1].invalidate("b", None)
        self.leave(reservation)
        self.assertEqual(self.stored("caches"), {2: ('["a",null,1]', '["b",null,1700500]')})

    def test_what_is_refused_reserves_nothing(self) -> None:
        reservation, fact = self.hold()
        with self.assertRaises(RowError):
            fact.invalidate(object(), None)
        self.assertEqual(self.process.caches_writer().pending.highest, 1)
        self.leave(reservation)

    def test_only_a_writer_of_the_caches_stream_may(self) -> None:
        definition = StreamDefinition(CACHES, writers=("somebody",))
        self.process.writers[CACHES] = StreamWriter(self.process, definition)
        reservation, fact = self.hold()
        with self.assertRaises(NotAWriterError):
            fact.invalidate("get", None)
        self.leave(reservation)


class SequenceTests(WriterCase):
    """Several processes write the stream: IDs have to be asked for."""

    def make_store(self) -> FragileStore:
        self.shared = SharedStore()
        return self.shared

    def test_ids_are_drawn_and_what_lies_between_is_somebody_elses(self) -> None:
        self.shared.others_write("notes", "other", 6)
        self.assertEqual(now(self.notes.append([["a"], ["b"]])), [7, 8])
        self.assertEqual(self.process.news(), ['RDATA notes master 7 "a"', 'RDATA notes master 8 "b"'])
        self.assertEqual(now(self.store.positions(StreamName("notes")))[ME], 8)

    def test_an_append_waits_for_its_ids(self) -> None:
        self.store.close_gate("draw")
        appended = begin(self.notes.append([["a"]]))
        self.assertEqual((appended, len(self.process.reservations)), ([], 1))
        self.store.open_gate("draw")
        self.assertEqual(appended, [[2]])

    def test_trap_36_a_position_does_not_pass_an_id_that_is_on_its_way(self) -> None:
        self.store.close_gate("draw")
        appended = begin(self.notes.append([["a"]]))
        self.notes.note(Token(9))
        self.assertEqual(self.process.news(), [])
        self.store.open_gate("draw")
        self.assertEqual(appended, [[2]])
        self.assertEqual(self.process.news(), ['RDATA notes master 2 "a"', "POSITION notes master 2 9"])

    def test_an_idle_writer_is_as_far_as_the_others(self) -> None:
        self.notes.note(Token(5))
        self.notes.note(Token(5))
        self.notes.note(Token(4))
        self.assertEqual(self.process.news(), ["POSITION notes master 1 5"])
        self.assertNotIn("commit", self.store.asked, "whoever begins again begins there anyway")

    def test_a_writer_with_an_open_id_is_not(self) -> None:
        reservation, _ = self.hold()
        self.notes.note(Token(5))
        self.assertEqual(self.process.news(), [])
        self.leave(reservation)
        self.assertEqual(self.process.news(), ["POSITION notes master 1 5"])

    def test_a_draw_that_fails_leaves_nothing_and_holds_nobody_up(self) -> None:
        self.store.close_gate("draw")
        failing = [begin(self.notes.append([["a"]])), begin(self.notes.reserve(2).__aenter__())]
        self.notes.note(Token(9))
        self.store.errors["draw"] = StoreError("gone")
        self.store.open_gate("draw")
        for each in failing:
            self.assertEqual(str(error_of(each)), "gone")
        self.assertEqual(self.process.reservations, [])
        self.assertEqual(self.process.news(), ["POSITION notes master 1 9"])

    def test_who_is_cancelled_while_it_is_drawn_for_leaves_nothing(self) -> None:
        self.store.close_gate("draw")
        entering = Deferred.fromCoroutine(self.notes.reserve().__aenter__())
        outcome = begin(entering)
        entering.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.store.open_gate("draw")
        self.assertEqual((self.process.reservations, self.notes.pending.open_count), ([], 0))

    def test_what_is_abandoned_while_it_is_drawn_for_completes_its_ids(self) -> None:
        self.store.close_gate("draw")
        entering = begin(self.notes.reserve().__aenter__())
        now(self.process.reservations[0].abandon())
        self.assertEqual(self.process.reservations, [])
        self.store.open_gate("draw")
        self.assertIn("this process is stopping", str(error_of(entering)))
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_a_reservation_that_waits_for_its_ids_is_used_too(self) -> None:
        self.store.close_gate("draw")
        reservation = self.notes.reserve()
        entering = begin(reservation.__aenter__())
        self.assertIn("used once", str(error_of(begin(reservation.__aenter__()))))
        self.store.open_gate("draw")
        self.assertEqual(len(entering), 1)
        self.leave(reservation)

    def test_what_is_invalidated_gets_its_id_when_it_is_committed(self) -> None:
        reservation, fact = self.hold()
        fact.invalidate("get", ["a"])
        self.assertNotIn(CACHES, self.shared.drawn)
        self.leave(reservation)
        self.assertEqual(self.stored("caches"), {2: ('["get",["a"],1700500]',)})

    def test_a_commit_that_gets_no_id_for_that_is_rolled_back(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("UPDATE …"))
        fact.invalidate("get", ["a"])
        self.store.errors["draw"] = StoreError("gone")
        self.assertEqual(str(error_of(self.leave(reservation))), "gone")
        self.assertEqual((self.store.ends[0], self.stored()), ("rolled back", {}))
        self.assertEqual((self.process.reservations, self.notes.pending.open_count), ([], 0))


class AppendTests(WriterCase):
    def test_ids_come_in_order_once_all_is_durable(self) -> None:
        self.store.close_gate("commit")
        appended = begin(self.notes.append([["a"], [], ["b", "c"]]))
        self.assertEqual((appended, self.process.news()), ([], []))
        self.store.open_gate("commit")
        self.assertEqual(appended, [[2, 3, 4]])
        self.assertEqual(self.stored(), {2: ('"a"',), 4: ('"b"', '"c"')})
        self.assertEqual(
            self.process.news(),
            ['RDATA notes master 2 "a"', 'RDATA notes master batch "b"', 'RDATA notes master 4 "c"'],
        )

    def test_facts_without_rows_have_ids_too(self) -> None:
        self.assertEqual(now(self.notes.append([[], []])), [2, 3])
        self.assertEqual(self.process.news(), ["POSITION notes master 1 3"])

    def test_nothing_is_nothing(self) -> None:
        self.assertEqual(now(self.notes.append([])), [])
        self.assertEqual(now(self.notes.append([], key="k")), [])
        self.assertNotIn("commit", self.store.asked)

    def test_a_bad_row_refuses_all_and_says_where_it_is(self) -> None:
        error = error_of(begin(self.orders.append([[["o", "p"]], [["o", "p"], ["o"]]])))
        assert isinstance(error, RowError)
        self.assertEqual(str(error), "fact 2: a row of 'orders' is [order_id, state], not an array of 1")
        self.assertEqual(error.fact, 1)
        self.assertEqual(self.orders.pending.highest, 1)

    def test_a_string_is_not_taken_for_a_list_of_rows(self) -> None:
        error = error_of(begin(self.notes.append([["a"], "abc"])))
        self.assertEqual(str(error), "fact 2: a fact is a list of rows, not a str")

    def test_an_append_that_fails_completes_its_ids(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            self.assertEqual(str(error_of(begin(self.notes.append([["a"]])))), "disk full")
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.process.news(), ["POSITION notes master 1 2"])

    def test_the_same_key_appends_once(self) -> None:
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="k")), [2, 3])
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="k")), [2, 3])
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="other")), [4, 5])
        self.assertEqual(len(self.stored()), 4)

    def test_the_same_key_at_the_same_time_appends_once(self) -> None:
        self.store.close_gate("commit")
        outcomes = [begin(self.notes.append([["a"]], key="k")) for _ in range(3)]
        self.store.open_gate("commit")
        self.assertEqual(outcomes, [[[2]]] * 3)
        self.assertEqual(self.stored(), {2: ('"a"',)})
        self.assertEqual(self.process.news()[0], 'RDATA notes master 2 "a"')
        self.assertEqual(self.notes.announced, 4)

    def test_a_key_whose_append_failed_is_free(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            error_of(begin(self.notes.append([["a"]], key="k")))
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(now(self.notes.append([["a"]], key="k")), [3])

    def test_giving_up_the_wait_does_not_stop_the_append(self) -> None:
        self.store.close_gate("commit")
        appending = Deferred.fromCoroutine(self.notes.append([["a"]], key="k"))
        outcome = begin(appending)
        appending.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(len(self.process.reservations), 1, "who stops waits for it")
        self.store.open_gate("commit")
        self.assertEqual(now(self.notes.append([["a"]], key="k")), [2])

    def test_no_append_begins_once_we_are_stopping(self) -> None:
        self.store.close_gate("recall")
        appending = begin(self.notes.append([["a"]], key="k"))
        self.process.stopping = True
        self.store.open_gate("recall")
        self.assertIsInstance(error_of(appending), StreamError)
        self.assertEqual(self.notes.pending.highest, 1)

    def test_appends_wait_for_what_was_reserved_before(self) -> None:
        reservation, _ = self.hold()
        now(self.notes.append([["a"]]))
        self.assertEqual(self.process.news(), [])
        self.leave(reservation)
        self.assertEqual(self.process.news(), ['RDATA notes master 3 "a"'])


class LargeTests(WriterCase):
    limits = Limits(max_queued_bytes=1_000, max_queued_lines=20)

    def test_trap_23_more_than_may_wait_for_a_peer_is_told_as_a_gap_to_be_fetched(self) -> None:
        """Else it would be too much for every peer, however well it reads, before it has had a turn to read."""
        self.assertEqual(len(now(self.notes.append([[1]] * 20))), 20)
        self.assertEqual(len(self.process.news()), 20)
        now(self.notes.append([[1]] * 21))
        self.assertEqual(self.process.news(), ["POSITION notes master 42 42"])
        now(self.notes.append([["x" * 400]] * 3))
        self.assertEqual(self.process.news(), ["POSITION notes master 45 45"])
        now(self.notes.append([[1]]))
        self.assertEqual(self.process.news(), ["RDATA notes master 46 1"])

    def test_trap_5_a_row_that_no_line_can_hold_is_stored_and_told_as_a_gap(self) -> None:
        self.process.limits = Limits()
        now(self.notes.append([["x" * 20_000]]))
        self.assertEqual(self.process.news(), ["POSITION notes master 2 2"])
        self.assertEqual(len(self.stored()[2][0]), 20_002)


class SpillTests(WriterCase):
    """What waits too long behind an open ID is forgotten, and read from the store when its time comes."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(writer_module, "PAGE_ROWS", 3)
        self.notes._settling = Settling(Token(1), max_bytes=1_000)
        self.reservation, _ = self.hold()
        for number in range(8):
            now(self.notes.append([[number, "x" * 100]]))
        self.assertEqual(self.process.news(), [])
        self.assertLess(self.notes._settling._bytes, 1_000)

    def test_all_of_it_is_told_in_order(self) -> None:
        self.leave(self.reservation)
        rows = [line.split(" ", 4)[-1] for line in self.process.news()]
        self.assertEqual([int(row) for row in rows if row.isdigit()], list(range(8)))
        self.assertEqual(self.notes.announced, 10)

    def test_positions_are_only_as_far_as_has_been_told(self) -> None:
        self.store.close_gate("facts")
        self.leave(self.reservation)
        self.assertEqual(self.notes.position().data, b"POSITION notes master 1 1\n")
        gate = self.store.gates["facts"]
        self.store.close_gate("facts")  # for the next page
        gate.callback(None)
        told = int(self.process.told[-1].split(" ")[3])
        self.assertLess(told, 10)
        self.assertEqual(self.notes.position().data, b"POSITION notes master %d %d\n" % (told, told))
        self.store.open_gate("facts")
        self.assertEqual(self.notes.position().data, b"POSITION notes master 10 10\n")

    def test_what_commits_meanwhile_is_told_after_it(self) -> None:
        self.store.close_gate("facts")
        self.leave(self.reservation)
        now(self.notes.append([["later"]]))
        self.assertEqual(self.process.news(), [])
        self.store.open_gate("facts")
        self.assertEqual(self.process.news()[-1], 'RDATA notes master 11 "later"')

    def test_a_store_that_fails_in_the_middle_is_asked_again(self) -> None:
        self.store.errors["facts"] = StoreError("busy")
        with logged() as said:
            self.leave(self.reservation)
            self.process.clock.pump([1.0] * 3)
        self.assertEqual(said, ["notes waits: busy"])
        self.assertEqual(self.process.news(), [])
        del self.store.errors["facts"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.notes.announced, 10)

    def test_when_we_stop_in_the_middle_the_rest_is_left_to_the_next_start(self) -> None:
        self.store.errors["facts"] = StoreError("busy")
        with logged():
            self.leave(self.reservation)
        self.process.stopping = True
        self.process.waits.end()
        self.assertEqual(self.process.news(), [])
        self.assertEqual(self.position(), 10)


class InMemoryTests(WriterCase):
    """A stream without a table."""

    def setUp(self) -> None:
        super().setUp()
        self.begin()

    def begin(self) -> None:
        definition = StreamDefinition("typing", row=("room_id", "user_ids"), in_memory=True)
        now(self.process.declare(definition))
        self.typing = self.process.writers[definition.name]
        self.store.ends.clear()

    def tokens(self, after: int = 0) -> list[int]:
        page = now(self.typing.facts(after=Token(after), upto=self.typing.announced, limit=100))
        return [fact.token for fact in page.facts]

    def test_facts_are_told_and_paged_and_nothing_is_stored_but_a_position_now_and_then(self) -> None:
        self.assertEqual(now(self.typing.append([[["!a", []]], [["!b", []], ["!c", []]]])), [2, 3])
        for _ in range(writer_module.LEAP - 3):
            now(self.typing.append([[["!d", []]]]))
        self.assertEqual(
            self.process.news()[:3],
            [
                'RDATA typing master 2 ["!a",[]]',
                'RDATA typing master batch ["!b",[]]',
                'RDATA typing master 3 ["!c",[]]',
            ],
        )
        self.assertEqual(self.tokens(after=writer_module.LEAP - 2), [writer_module.LEAP - 1, writer_module.LEAP])
        self.assertEqual(self.store.ends, ["committed"])
        self.assertEqual(self.stored("typing"), {})

    def test_trap_29_tokens_go_on_ascending_when_the_writer_starts_again(self) -> None:
        """Whoever was here before is behind, asks for what it missed, gets what there is, and goes on."""
        now(self.typing.append([[["!a", []]]] * 3))
        self.assertEqual(self.typing.announced, 4)
        self.process.news()
        self.begin()
        start = self.typing.announced
        self.assertGreater(start, 4)
        self.assertEqual(self.typing.position().data, b"POSITION typing master %d %d\n" % (start, start))
        self.assertEqual(self.tokens(after=4), [])
        now(self.typing.append([[["!b", []]]]))
        self.assertEqual(self.process.news(), [f'RDATA typing master {start + 1} ["!b",[]]'])
        self.assertEqual(self.tokens(after=4), [start + 1])

    def test_nothing_is_told_before_a_restart_would_go_on_after_it(self) -> None:
        self.store.close_gate("commit")
        now(self.typing.append([[["!a", []]]]))
        self.assertEqual((self.process.news(), self.typing.announced), ([], 1))
        self.store.open_gate("commit")
        self.assertEqual(self.process.news(), ['RDATA typing master 2 ["!a",[]]'])

    def test_nobody_finds_a_position_of_ours_in_the_database(self) -> None:
        """A follower that reads the database must not believe that there is nothing to be had."""
        now(self.typing.append([[["!a", []]]]))
        self.assertIsNone(self.typing.unstored())
        self.assertEqual(self.position("typing"), 0)

    def test_a_fact_that_is_rolled_back_is_not_kept(self) -> None:
        reservation, fact = self.hold(self.typing)
        now(fact.write(["!a", []]))
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.tokens(), [])
        self.assertEqual(self.process.news(), ["POSITION typing master 1 2"])

    def test_it_goes_with_what_its_transaction_executes_and_invalidates(self) -> None:
        reservation, fact = self.hold(self.typing)
        now(fact.write(["!a", []]))
        now(fact.execute("UPDATE"))
        fact.invalidate("get", None)
        self.store.errors["commit"] = StoreError("full")
        self.leave(reservation)
        self.assertEqual(self.tokens(), [])
        del self.store.errors["commit"]
        self.process.clock.pump([1.0] * 2)
        reservation, fact = self.hold(self.typing)
        now(fact.write(["!a", []]))
        fact.invalidate("get", None)
        self.leave(reservation)
        self.assertEqual(self.tokens(), [3])
        self.assertEqual(self.stored(CACHES), {3: ('["get",null,1700500]',)})

    def test_facts_that_waited_too_long_behind_an_open_id_are_among_the_forgotten(self) -> None:
        self.typing._settling = Settling(Token(1), max_bytes=100)
        reservation, _ = self.hold(self.typing)
        for _ in range(5):
            now(self.typing.append([[["!a", ["x" * 50]]]]))
        self.leave(reservation)
        self.assertEqual(self.typing.announced, 7)
        self.assertEqual(self.process.news(), ["POSITION typing master 1 7"])

    def test_only_what_lives_in_memory_is_acknowledged(self) -> None:
        now(self.typing.append([[["!a", []]]] * 3))
        self.typing.acknowledged(InstanceName("sender"), Token(3))
        self.assertEqual(self.tokens(), [4])
        now(self.notes.append([[1]]))
        self.notes.acknowledged(InstanceName("sender"), Token(3))
        self.assertEqual(self.stored(), {2: ("1",)})


class SharedIdsTests(WriterCase):
    """Two streams with one ID generator: trap 17."""

    limits = Limits(max_queued_lines=20)

    def setUp(self) -> None:
        super().setUp()
        data, tags = StreamDefinition("data"), StreamDefinition("tags", shares="data")
        now(self.process.declare(data, tags))
        self.data, self.tags = self.process.writers[data.name], self.process.writers[tags.name]

    def test_trap_17_no_id_is_in_both_and_facts_of_both_are_told_in_the_order_of_their_ids(self) -> None:
        """Who has one position for both streams, as a Synapse, takes nothing for old."""
        reservation, fact = self.hold(self.data)
        tags = [now(self.tags.append([[each]])) for each in ("a", "b")]
        self.assertEqual((fact.token, tags), (2, [[3], [4]]))
        self.assertEqual(now(self.data.append([[1]])), [5])
        self.assertEqual(now(self.tags.append([["c"]])), [6])
        self.assertEqual(self.process.news(), [])
        now(fact.write(0))
        self.leave(reservation)
        self.assertEqual(
            self.process.news(),
            [
                "RDATA data master 2 0",
                'RDATA tags master 3 "a"',
                'RDATA tags master 4 "b"',
                "RDATA data master 5 1",
                'RDATA tags master 6 "c"',
                "POSITION data master 5 6",
            ],
        )
        self.assertEqual((self.data.announced, self.tags.announced), (6, 6))

    def test_a_fact_of_one_waits_for_an_open_id_of_the_other(self) -> None:
        reservation, _ = self.hold(self.tags)
        now(self.data.append([[1]]))
        self.assertEqual(self.process.news(), [])
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.news(), ["RDATA data master 3 1", "POSITION tags master 1 3"])

    def test_ids_that_were_rolled_back_move_both(self) -> None:
        reservation, _ = self.hold(self.tags, 3)
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.news(), ["POSITION data master 1 4", "POSITION tags master 1 4"])
        unstored = self.tags.unstored()
        self.assertEqual((self.position("data"), None if unstored is None else unstored.upto), (4, 4))

    def test_a_burst_is_told_as_a_gap_in_both(self) -> None:
        reservation, _ = self.hold(self.data)
        for _ in range(11):
            now(self.data.append([[1]]))
            now(self.tags.append([[1]]))
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.news(), ["POSITION data master 24 24", "POSITION tags master 24 24"])

    def test_what_waited_too_long_is_told_as_a_gap_in_both(self) -> None:
        self.tags._settling = Settling(Token(1), max_bytes=100)
        reservation, _ = self.hold(self.data)
        for _ in range(3):
            now(self.tags.append([["x" * 50]]))
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.news(), ["POSITION data master 5 5", "POSITION tags master 5 5"])


def remember(writer: StreamWriter, store: IStreamStore, pump: Pump) -> None:
    """Do what the process does every second."""
    write = writer.unstored()
    if write is not None:
        pump.wait(store.transaction().commit([write]))
        writer.stored(write.upto)


class StoredPositionTests(SynchronousTestCase):
    """What somebody finds who reads the database alone, as a replay does: no ID is open at or below a position."""

    def setUp(self) -> None:
        folder = TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "m.db")
        self.pump = Pump()
        self.start()

    def tearDown(self) -> None:
        self.pump.wait(self.store.close())

    def start(self) -> None:
        self.store = open_store(f"sqlite:///{self.path}", self.pump)
        self.process = Process(self.store)
        self.pump.wait(self.process.declare(StreamDefinition("notes")))
        self.notes = self.process.writers[StreamName("notes")]

    def positions(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.path)) as database:
            return dict(database.execute("SELECT instance_name, stream_id FROM stream_positions").fetchall())

    def append(self, *rows: object) -> None:
        self.pump.wait(self.notes.append([list(rows)]))

    def test_it_stays_below_an_id_that_is_open(self) -> None:
        self.append("2")
        reservation = self.notes.reserve()
        self.pump.wait(reservation.__aenter__())
        self.append("4")
        self.append("5")
        self.assertEqual(self.positions(), {ME: 2})
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.positions()[ME], 5)

    def test_it_is_brought_up_to_what_was_committed_together(self) -> None:
        """Neither of two facts knew of the other's end when it was committed."""
        appends = [Deferred.fromCoroutine(self.notes.append([[number]])) for number in range(3)]
        for each in appends:
            self.pump.wait(each)
        self.assertEqual(self.positions(), {ME: 2})
        remember(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), {ME: 4})
        self.assertIsNone(self.notes.unstored())
        self.append("5")
        self.assertIsNone(self.notes.unstored())

    def test_a_fact_without_rows_above_an_open_id_is_not_given_again(self) -> None:
        """Trap 40: nobody has a row for it, and it is not settled."""
        reservation = self.notes.reserve()
        self.pump.wait(reservation.__aenter__())
        self.append()
        self.append()
        self.assertEqual(self.positions(), {ME: 1, "": 4})
        self.pump.wait(reservation.__aexit__(ValueError, ValueError(), None))
        self.pump.wait(self.store.close())
        self.start()
        self.assertEqual(self.pump.wait(self.notes.append([["next"]])), [5])
        self.assertEqual(self.positions()[ME], 5)

    def test_after_a_restart_all_that_is_there_is_complete(self) -> None:
        self.pump.wait(self.notes.reserve().__aenter__())
        self.append("3")
        self.assertEqual(self.positions(), {ME: 1})
        self.pump.wait(self.store.close())
        self.start()
        remember(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), {ME: 3})


class PostgresPositionTests(HasDatabase, SynchronousTestCase):
    """Where transactions with statements go on side by side, they leave the position to what is done each second."""

    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store(self.url, self.pump)
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.process = Process(self.store)
        self.pump.wait(self.process.declare(StreamDefinition("notes")))
        self.notes = self.process.writers[StreamName("notes")]

    def test_trap_17_streams_that_share_their_ids_draw_from_one_sequence(self) -> None:
        """Also where another process has drawn from it."""
        data, tags = StreamDefinition("data"), StreamDefinition("tags", shares="data")
        self.pump.wait(self.process.declare(data, tags))
        writers = [self.process.writers[each.name] for each in (tags, data, tags)]
        sequence = self.store.sequence(data.name)
        self.assertIsNotNone(sequence)
        for writer in writers:
            writer.ids.sequence = sequence
        tokens = [token for writer in writers for token in self.pump.wait(writer.append([[1]]))]
        self.sql("SELECT nextval('stream_data_seq')")
        tokens += self.pump.wait(writers[0].append([[1]]))
        self.assertEqual(tokens, [2, 3, 4, 6])
        self.assertEqual(self.process.news()[-2:], ["RDATA tags master 6 1", "POSITION data master 4 6"])

    def test_trap_29_tokens_of_a_stream_without_a_table_go_on_ascending(self) -> None:
        typing = StreamDefinition("typing", in_memory=True)
        ends: list[Token] = []
        for _ in range(2):
            self.pump.wait(self.process.declare(typing))
            writer = self.process.writers[typing.name]
            ends += self.pump.wait(writer.append([[1]] * 3))[-1:]
            # Once another commit is done, the position is stored, and the facts are told.
            self.pump.wait(self.store.transaction().commit([]))
        self.assertGreater(ends[1], ends[0] + 1_000)
        self.assertEqual(self.positions(), [("", ends[0] - 3 + 2 * writer_module.LEAP + 6)])
        self.assertEqual(self.sql("SELECT relname FROM pg_class WHERE relname = 'stream_typing'"), [])

    def hold(self, sql: str = "SELECT 1") -> tuple[Reservation, OpenFact]:
        reservation = self.notes.reserve()
        fact: OpenFact = self.pump.wait(reservation.__aenter__())
        self.pump.wait(fact.execute(sql))
        return reservation, fact

    def positions(self) -> list[tuple[object, ...]]:
        return self.sql("SELECT instance_name, stream_id FROM stream_positions ORDER BY 1")

    def test_it_is_stored_a_little_later(self) -> None:
        reservation, fact = self.hold()
        self.pump.wait(fact.write(7))
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.positions(), [])
        self.assertEqual(self.process.news(), ["RDATA notes master 2 7"])
        remember(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), [(ME, 2)])

    def test_a_fact_without_rows_is_remembered_in_its_transaction(self) -> None:
        """Trap 40: it has nothing else."""
        reservation, _ = self.hold()
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.positions(), [("", 2)])

    def test_it_does_not_pass_an_id_that_is_open(self) -> None:
        first, _ = self.hold()
        second, fact = self.hold()
        self.pump.wait(fact.write(7))
        self.pump.wait(second.__aexit__(None, None, None))
        remember(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), [(ME, 1)])
        self.pump.wait(first.__aexit__(ValueError, ValueError(), None))
        remember(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), [(ME, 3)])


class SqliteTests(SynchronousTestCase):
    """The same with SQL, on a thread."""

    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store("sqlite://", self.pump)
        self.process = Process(self.store)
        self.pump.wait(self.process.declare(*DEFINITIONS))
        self.orders = self.process.writers[ORDERS]

    def tearDown(self) -> None:
        self.pump.wait(self.store.close())
        self.assertEqual(self.process.clock.getDelayedCalls(), [])

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        async def ask() -> list[tuple[Any, ...]]:
            transaction = self.store.transaction()
            rows = await transaction.execute(sql)
            await transaction.rollback()
            return rows

        return self.pump.wait(ask())

    async def place(self, order: str, *, fails: bool = False) -> None:
        async with self.orders.reserve() as fact:
            await fact.execute("CREATE TABLE IF NOT EXISTS mine (id TEXT PRIMARY KEY, placed_as INTEGER)")
            await fact.execute("INSERT INTO mine VALUES (?, ?)", [order, fact.stream_id])
            await fact.write([order, "placed"])
            fact.invalidate("get_order", [order])
            if fails:
                raise ZeroDivisionError

    def test_the_applications_sql_and_the_fact_commit_together(self) -> None:
        self.pump.wait(self.place("o1"))
        self.assertEqual(self.query("SELECT * FROM mine"), [("o1", 2)])
        self.assertEqual(self.query("SELECT stream_id, row FROM stream_orders"), [(2, '["o1","placed"]')])
        self.assertEqual(self.query("SELECT stream_id FROM stream_caches"), [(2,)])

    def test_and_roll_back_together(self) -> None:
        self.pump.wait(self.place("o1"))
        with self.assertRaises(ZeroDivisionError):
            self.pump.wait(self.place("o2", fails=True))
        with self.assertRaises(StoreError):
            self.pump.wait(self.place("o1"))  # the primary key
        self.assertEqual(self.query("SELECT * FROM mine"), [("o1", 2)])
        self.assertEqual(self.pump.wait(self.orders.append([[["o3", "placed"]]])), [5])
        self.assertEqual(
            [line for line in self.process.told if " orders " in line],
            [
                'RDATA orders master 2 ["o1","placed"]',
                "POSITION orders master 2 3",
                "POSITION orders master 3 4",
                'RDATA orders master 5 ["o3","placed"]',
            ],
        )

    def test_the_same_key_at_the_same_time_appends_once(self) -> None:
        started = [self.pump.start(self.orders.append([[["o", str(n)]]], key="k")) for n in range(5)]
        outcomes = [self.pump.wait(each) for each in started]
        self.assertEqual(outcomes, [outcomes[0]] * 5)
        self.assertEqual(self.query("SELECT count(*) FROM stream_orders"), [(1,)])

    def test_a_statement_that_is_refused_may_be_survived(self) -> None:
        async def work() -> None:
            async with self.orders.reserve() as fact:
                try:
                    await fact.execute("INSERT INTO nowhere VALUES (1)")
                except StoreError:
                    await fact.write(["o1", "refused"])

        self.pump.wait(work())
        self.assertEqual(self.query("SELECT row FROM stream_orders"), [('["o1","refused"]',)])
