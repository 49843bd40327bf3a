"""A block that writes facts commits or rolls back; either way its IDs are complete and followers get what settled."""

from __future__ import annotations

import random
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.python import threadable
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError, NotAWriterError, RowError, StoppingError, StoreError, StreamError
from replication.net import traces
from replication.storage import open_store
from replication.streams import facts
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.facts import Fact
from replication.wire.grammar import StreamName, Token
from replication.writer.reservation import Reservation
from tests.doubles import begin, error_of, logged, now
from tests.storage.pump import Pump
from tests.writer.cases import DEFINITIONS, ORDERS, Process, WriterCase


class ReserveTests(WriterCase):
    def test_a_fact_is_stored_and_published_when_its_block_ends(self) -> None:
        async def place() -> int:
            async with self.orders.reserve() as fact:
                await fact.write(["o1", "placed"])
                await fact.write(("o1", "paid"))
                self.assertEqual((self.stored("orders"), self.process.lines), ({}, []))
                return int(fact.token)

        self.assertEqual(now(place()), 2)
        self.assertEqual(self.stored("orders"), {2: ('["o1","placed"]', '["o1","paid"]')})
        self.assertEqual(
            self.process.new_lines(),
            ['RDATA orders master batch ["o1","placed"]', 'RDATA orders master 2 ["o1","paid"]'],
        )

    def test_a_fact_waits_until_smaller_ids_are_complete(self) -> None:
        """The example of docs/protocol/ids.md F1."""
        held = {token: self.hold()[0] for token in (2, 3)}
        self.leave(held[3])
        self.assertEqual(self.process.new_lines(), [])
        self.leave(held[2])
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 3"])
        held = {token: self.hold()[0] for token in (4, 5, 6)}
        self.leave(held[5])
        self.assertEqual(self.process.new_lines(), [])
        self.leave(held[4])
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 3 5"])
        self.leave(held[6])
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 5 6"])

    def test_a_fact_that_is_too_large_rolls_back_completes_the_id_and_is_raised(self) -> None:
        async def write(invalidations: int) -> None:
            async with self.notes.reserve(2) as (first, second):
                await first.execute("INSERT …")
                await second.write("x" * 200)
                for number in range(invalidations):
                    await second.invalidate("cache", [str(number)])

        with patch.multiple(facts, _SMALL=0, MAX_FACT_BYTES=220):
            error = error_of(begin(write(0)))
        self.assertEqual(str(error), "a fact has 220 bytes at most, and this one has 226: write several facts")
        with patch.object(facts, "MAX_FACT_ROWS", 1):
            self.assertIsInstance(error_of(begin(write(2))), RowError)
        self.assertEqual(self.store.ends, ["rolled back", "committed", "rolled back", "committed"])
        self.assertEqual((self.stored(), self.notes.outgoing.refused), ({}, 2))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 3", "POSITION notes master 3 5"])
        now(self.notes.append([["x" * 200]]))

    def test_an_exception_rolls_back_completes_the_id_and_is_raised(self) -> None:
        async def fail() -> None:
            async with self.notes.reserve() as fact:
                await fact.write("never")
                await fact.execute("INSERT …")
                raise ZeroDivisionError

        self.assertIsInstance(error_of(begin(fail())), ZeroDivisionError)
        self.assertEqual(self.store.ends[0], "rolled back")
        self.assertEqual(self.stored(), {})
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])
        self.assertEqual(now(self.notes.append([[1]])), [3])

    def test_a_fact_without_rows_moves_the_position_only(self) -> None:
        reservation, _ = self.hold()
        self.leave(reservation)
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])
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
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "first"', 'RDATA notes master 4 "last"'])

    def test_reserve_with_a_count_of_one_gives_a_list(self) -> None:
        reservation, facts = self.hold(count=1)
        self.assertIsInstance(facts[0], Reservation)
        self.leave(reservation)

    def test_reserve_refuses_a_count_below_one(self) -> None:
        for count in (0, -1):
            with self.assertRaisesRegex(StreamError, rf"^reserve\({count}\): reserve one ID at least$"):
                self.notes.reserve(count)

    def test_a_reservation_is_used_for_one_block(self) -> None:
        reservation, _ = self.hold()
        why = "a reservation is used once: call reserve() again"
        self.assertEqual(str(error_of(begin(reservation.__aenter__()))), why)
        self.leave(reservation)
        self.assertEqual(str(error_of(begin(reservation.__aenter__()))), why)
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 0)

    def test_a_fact_refuses_rows_after_its_block(self) -> None:
        for error, how in (
            (None, "complete: write inside its 'async with' block"),
            (ValueError("no"), "rolled back"),
        ):
            reservation, fact = self.hold()
            self.leave(reservation, error)
            self.assertEqual(str(error_of(begin(fact.write(1)))), f"this fact is {how}")
            self.assertIsInstance(error_of(begin(fact.execute("x"))), StreamError)
            with self.assertRaises(StreamError):
                fact.invalidate("get", ["1"])

    def test_a_trace_shows_for_how_long_the_id_of_a_fact_was_open(self) -> None:
        wrote: list[tuple[object, ...]] = []
        self.patch(traces, "tracer", SimpleNamespace(wrote=lambda *what: wrote.append(what)))
        self.process.clock.advance(7.0)
        reservation, fact = self.hold()
        now(fact.write("x"))
        self.process.clock.advance(1.5)
        self.leave(reservation)
        self.assertEqual(wrote, [("notes", "master", [Fact(Token(2), ('"x"',))], 1.5)])

    def test_a_fact_refuses_rows_during_its_commit(self) -> None:
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
        now(fact.write(["o1", "placed"]))  # the fact accepts rows after a refused row
        self.leave(reservation)
        self.assertEqual(self.stored("orders"), {2: ('["o1","placed"]',)})

    def test_without_declared_fields_a_row_is_any_json(self) -> None:
        now(self.notes.append([[None, 1, "a", [], {"é": "é"}]]))
        self.assertEqual(self.stored()[2], ("null", "1", '"a"', "[]", '{"\\u00e9":"\\u00e9"}'))

    def test_a_negative_stream_has_negative_ids_in_its_table_and_positive_tokens_on_the_wire(self) -> None:
        reservation, fact = self.hold(self.process.writers[StreamName("debts")])
        self.assertEqual((fact.token, fact.stream_id), (2, -2))
        self.leave(reservation)
        self.assertEqual(self.process.new_lines(), ["POSITION debts master 1 2"])
        reservation, fact = self.hold()
        self.assertEqual(fact.stream_id, 2)
        self.leave(reservation)

    def test_an_instance_that_is_not_a_writer_is_refused(self) -> None:
        foreign = self.process.writers[StreamName("foreign")]
        with self.assertRaisesRegex(
            NotAWriterError, "'master' may not write to 'foreign'; its writers: other"
        ) as caught:
            foreign.reserve()
        self.assertEqual((caught.exception.stream, caught.exception.instance), ("foreign", "master"))
        self.assertIsInstance(error_of(begin(foreign.append([[1]]))), NotAWriterError)

    def test_another_thread_than_the_reactor_s_is_refused(self) -> None:
        """A function of ``run_interaction`` runs in the database's thread."""
        self.process.clock.running = True
        self.patch(threadable, "ioThread", get_ident() + 1)
        with self.assertRaisesRegex(ConfigError, "not the reactor's"):
            self.notes.reserve()
        for call in (self.notes.append([["a"]]), self.notes.run_interaction(lambda _, __: None)):
            self.assertIsInstance(error_of(begin(call)), ConfigError)
        self.assertEqual(self.process.new_lines(), [])

    def test_a_block_that_waits_for_the_start_holds_no_id(self) -> None:
        self.process.ready = Deferred()
        entering = begin(self.notes.reserve().__aenter__())
        self.assertEqual((self.notes.publisher.ids.pending.open_count, self.process.open), (0, []))
        self.process.transactions.stopping = True
        self.process.ready.callback(None)
        error = error_of(entering)
        assert isinstance(error, StoppingError)
        self.assertEqual((str(error), error.instance), ("'master' is stopping", "master"))
        self.assertEqual(self.notes.publisher.ids.pending.highest, 1)

    def test_a_stream_does_not_wait_for_an_open_id_of_another_stream(self) -> None:
        reservation, _ = self.hold()
        now(self.orders.append([[["o", "p"]]]))
        self.assertEqual(len(self.process.new_lines()), 1)
        self.leave(reservation)

    def test_a_restarted_writer_reserves_ids_above_all_published_positions(self) -> None:
        """Traps 38, 40 and 41: a restart after commits, after rollbacks, and with open IDs."""
        chance = random.Random(3)
        held: list[Any] = []
        published = 1
        for _ in range(60):
            if held and chance.random() < 0.5:
                error = ValueError("no") if chance.random() < 0.5 else None
                self.leave(held.pop(chance.randrange(len(held))), error)
            else:
                held.append(self.hold()[0])
            for line in self.process.new_lines():
                published = max(published, int(line.rpartition(" ")[2]))
            self.assertEqual(self.notes.published, published)
            again = Process(self.store)
            now(again.declare(StreamDefinition("notes")))
            self.assertGreater(again.writers[StreamName("notes")].publisher.ids.pending.reserve(1)[0], published)
        for each in held:
            self.leave(each)


class FailureTests(WriterCase):
    def test_a_failed_commit_raises_in_the_caller_and_completes_the_id(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        reservation, _ = self.hold()
        with logged() as messages:
            self.assertEqual(str(error_of(self.leave(reservation))), "disk full")
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 0)
        self.assertEqual(self.process.new_lines(), [], "the position is not durable yet")
        self.assertEqual(len(messages), 1)
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_a_failed_rollback_completes_the_id(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("x"))
        self.store.errors["rollback"] = StoreError("gone")
        self.assertIsInstance(error_of(self.leave(reservation, ValueError("no"))), StoreError)
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 0)


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
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_cancelling_a_caller_during_its_commit_does_not_stop_the_commit(self) -> None:
        self.store.close_gate("commit")

        async def work() -> None:
            async with self.notes.reserve() as fact:
                await fact.write("kept")

        working = Deferred.fromCoroutine(work())
        outcome = begin(working)
        working.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 1)
        self.store.open_gate("commit")
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "kept"'])

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
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

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

    def test_a_closed_coroutine_rolls_back_without_waiting(self) -> None:
        self.store.close_gate("rollback")
        self.drop(execute=True)
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 1)
        self.store.open_gate("rollback")
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_a_coroutine_closed_before_any_statement_completes_its_id_at_once(self) -> None:
        self.drop(execute=False)
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_a_failed_rollback_of_a_closed_coroutine_is_logged(self) -> None:
        self.store.errors["rollback"] = StoreError("gone")
        with logged() as messages:
            self.drop(execute=True)
        self.assertEqual(messages, ["cannot roll back a closed block"])
        self.assertEqual(len(self.flushLoggedErrors(StoreError)), 1)
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 0)

    def test_an_abandoned_fact_is_rolled_back_and_later_calls_raise(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("x"))
        now(reservation.abandon())
        self.assertEqual(self.store.ends[0], "rolled back")
        why = "this fact is rolled back: this process is stopping"
        self.assertEqual(str(error_of(begin(fact.write(1)))), why)
        self.assertIn("this process is stopping", str(error_of(self.leave(reservation))))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"], "completed once")

    def test_an_abandoned_fact_whose_block_raises_is_completed_once(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("x"))
        now(reservation.abandon())
        self.assertEqual(self.leave(reservation, ValueError("no")), [None])

    def test_a_fact_during_its_commit_is_not_abandoned(self) -> None:
        reservation, fact = self.hold()
        now(fact.write("kept"))
        self.store.close_gate("commit")
        left = self.leave(reservation)
        now(reservation.abandon())
        self.store.open_gate("commit")
        self.assertEqual(left, [None])
        self.assertEqual(self.stored(), {2: ('"kept"',)})


class InvalidateTests(WriterCase):
    def test_an_invalidation_is_a_caches_fact_of_the_same_transaction(self) -> None:
        reservation, fact = self.hold()
        now(fact.write("x"))
        fact.invalidate("get_order", [17, "a", None, True])
        now(fact.invalidate("get_total", None))
        self.leave(reservation)
        self.assertEqual(self.store.ends, ["committed"])
        rows = ('["get_order",["17","a","None","True"],1700500]', '["get_total",null,1700500]')
        self.assertEqual(self.stored("caches"), {2: rows})
        self.assertEqual(
            self.process.new_lines(),
            ['RDATA notes master 2 "x"', f"RDATA caches master batch {rows[0]}", f"RDATA caches master 2 {rows[1]}"],
        )

    def test_a_string_is_refused_as_keys(self) -> None:
        reservation, fact = self.hold()
        with self.assertRaisesRegex(RowError, r"keys are a list of arguments, not 'abc': write \['abc'\]"):
            fact.invalidate("price", "abc")
        self.leave(reservation)

    def test_a_rollback_drops_the_invalidation(self) -> None:
        reservation, fact = self.hold()
        fact.invalidate("get_order", ["17"])
        self.leave(reservation, ValueError("no"))
        self.assertEqual(self.stored("caches"), {})
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])
        self.assertEqual(
            self.process.caches_writer().publisher.ids.pending.highest, 1, "no ID is reserved before the commit"
        )

    def test_an_invalidation_in_a_caches_fact_is_a_row_of_that_fact(self) -> None:
        reservation, facts = self.hold(self.process.caches_writer(), count=2)
        now(facts[0].write(["a", None, 1]))
        facts[1].invalidate("b", None)
        self.leave(reservation)
        self.assertEqual(self.stored("caches"), {2: ('["a",null,1]', '["b",null,1700500]')})

    def test_a_refused_invalidation_reserves_no_id(self) -> None:
        reservation, fact = self.hold()
        with self.assertRaises(RowError):
            fact.invalidate(object(), None)
        self.assertEqual(self.process.caches_writer().publisher.ids.pending.highest, 1)
        self.leave(reservation)

    def test_only_a_writer_of_the_caches_stream_may_invalidate(self) -> None:
        definition = StreamDefinition(CACHES, writers=("other",))
        self.process.writers[CACHES] = self.process.make_writer(definition)
        reservation, fact = self.hold()
        with self.assertRaises(NotAWriterError):
            fact.invalidate("get", None)
        self.leave(reservation)


class SqliteTests(SynchronousTestCase):
    """With SQL statements on SQLite, whose answers come from a thread."""

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

    def test_the_applications_sql_and_the_fact_roll_back_together(self) -> None:
        self.pump.wait(self.place("o1"))
        with self.assertRaises(ZeroDivisionError):
            self.pump.wait(self.place("o2", fails=True))
        with self.assertRaises(StoreError):
            self.pump.wait(self.place("o1"))  # violates the primary key
        self.assertEqual(self.query("SELECT * FROM mine"), [("o1", 2)])
        self.assertEqual(self.pump.wait(self.orders.append([[["o3", "placed"]]])), [5])
        self.assertEqual(
            [line for line in self.process.lines if " orders " in line],
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

    def test_a_fact_survives_a_refused_statement(self) -> None:
        async def work() -> None:
            async with self.orders.reserve() as fact:
                try:
                    await fact.execute("INSERT INTO nowhere VALUES (1)")
                except StoreError:
                    await fact.write(["o1", "refused"])

        self.pump.wait(work())
        self.assertEqual(self.query("SELECT row FROM stream_orders"), [('["o1","refused"]',)])
