"""``run_interaction``: a function of the application and its fact, in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import NotAWriterError, RowError, StoppingError, StoreError, StreamError
from replication.storage import open_store
from replication.storage.sqlite import connection
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.facts import MAX_FACT_ROWS, Fact
from replication.streams.interfaces import Write
from replication.streams.reorder_buffer import ReorderBuffer
from replication.wire.grammar import StreamName, Token
from replication.writer.interaction import NewFact
from tests.doubles import SharedStore, begin, error_of
from tests.storage.pump import Pump
from tests.writer.cases import DEFINITIONS, ME, ORDERS, Process, WriterCase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Concatenate, ParamSpec, TypeVar

    from twisted.python.failure import Failure

    from replication.streams.ids import Allocation
    from replication.streams.interfaces import ISqlExecutor
    from replication.writer.stream import StreamWriter

    P = ParamSpec("P")
    R = TypeVar("R")


def write_nothing(_: ISqlExecutor, fact: NewFact) -> int:
    return fact.token


def write_note(_: ISqlExecutor, fact: NewFact, *rows: object, error: Exception | None = None) -> int:
    for row in rows:
        fact.write(row)
    if error is not None:
        raise error
    return fact.stream_id


class AllocatingStore(SharedStore):
    """The transaction of a function allocates the ID of its fact, as in PostgreSQL."""

    async def interact(self, function: Callable[..., Any], allocation: Allocation | None = None) -> None:  # type: ignore[override]
        assert allocation is not None
        sequence = self.sequence(allocation.stream)
        assert sequence is not None
        allocation.expect()
        for each in await sequence.allocate(1):
            allocation.allocated(each)
        await super().interact(function, allocation)


class AllocationTests(WriterCase):
    def make_store(self) -> AllocatingStore:
        return AllocatingStore()

    def open_ids(self) -> list[tuple[Any, ...]]:
        return [(stream.definition.name, *rest) for stream, *rest in self.process.transactions.oldest_first()]

    def test_an_id_of_the_stream_is_open_until_the_commit_is_durable_also_while_the_process_stops(self) -> None:
        self.store.close_gate("commit")
        outcome: list[Any] = begin(self.notes.run_interaction(write_note, "a"))
        self.process.clock.advance(2.0)
        self.assertEqual((outcome, self.open_ids()), ([], [("notes", 2, 2.0)]))
        stopping = begin(self.process.transactions.finish(10.0))
        self.process.clock.advance(10.0)
        self.assertEqual((stopping, outcome, self.open_ids()), ([None], [], [("notes", 2, 12.0)]))
        self.store.open_gate("commit")
        self.assertEqual((outcome, self.open_ids()), ([2], []))
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "a"'])


class SharedTests(WriterCase):
    def make_store(self) -> SharedStore:
        return SharedStore()

    def test_beside_other_writers_no_position_is_stored_with_a_fact_or_an_invalidation(self) -> None:
        """The row of the position would be locked until the commit is durable."""

        def work(_: ISqlExecutor, fact: NewFact) -> None:
            fact.write("a")
            fact.invalidate("get", None)

        self.notes.publisher.begin_with_external_writers()
        self.notes.publisher.raise_horizon(Token(1))
        with patch.object(self.store, "land", wraps=self.store.land) as land:
            self.assertEqual(begin(self.notes.run_interaction(work)), [None])
        facts = {StreamName("notes"): '"a"', CACHES: '["get",null,1700500]'}
        written = [Write(name, ME, Token(0), [Fact(Token(2), (row,))]) for name, row in facts.items()]
        self.assertEqual(land.call_args_list[0].args[0], written)


class InteractionTests(WriterCase):
    """In memory, where a function runs on the reactor's thread and has no SQL."""

    def run_in(
        self,
        writer: StreamWriter,
        function: Callable[Concatenate[ISqlExecutor, NewFact, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | Failure]:
        outcome: list[Any] = begin(writer.run_interaction(function, *args, **kwargs))
        return outcome

    def test_a_fact_is_stored_and_published_and_the_result_returned(self) -> None:
        self.assertEqual(self.run_in(self.notes, write_note, "a", "b"), [2])
        self.assertEqual(self.stored(), {2: ('"a"', '"b"')})
        self.assertEqual(self.process.new_lines(), ['RDATA notes master batch "a"', 'RDATA notes master 2 "b"'])
        self.assertEqual([fact.token for _, fact in self.process.committed_facts], [2])

    def test_an_exception_rolls_back_completes_the_id_and_is_raised(self) -> None:
        error = ZeroDivisionError()
        self.assertIs(error_of(self.run_in(self.notes, write_note, "a", error=error)), error)
        self.assertEqual(self.stored(), {})
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_a_failed_commit_is_raised_and_completes_the_id(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        self.assertEqual(str(error_of(self.run_in(self.notes, write_note, "a"))), "disk full")
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 0)
        self.store.errors.clear()
        self.process.clock.advance(1.0)

    def test_a_fact_waits_until_smaller_ids_are_complete(self) -> None:
        reservation_, _ = self.hold()
        self.assertEqual(self.run_in(self.notes, write_note, "later"), [3])
        self.assertEqual((self.process.new_lines(), self.position()), ([], 3))
        self.assertEqual(self.store_position(), 1, "no position is stored above an open ID")
        self.leave(reservation_)
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 3 "later"'])

    def store_position(self) -> int:
        return self.store._streams[StreamName("notes")].positions["master"]  # type: ignore[index]

    def test_a_fact_without_rows_moves_the_position_only(self) -> None:
        self.assertEqual(self.run_in(self.notes, write_nothing), [2])
        self.assertEqual((self.stored(), self.process.new_lines()), ({}, ["POSITION notes master 1 2"]))

    def test_a_row_must_have_the_declared_fields(self) -> None:
        self.assertIsInstance(error_of(self.run_in(self.orders, write_note, "a")), RowError)
        self.assertEqual(self.orders.outgoing.refused, 1)

    def test_a_fact_that_is_too_large_is_refused(self) -> None:
        rows = [0] * (MAX_FACT_ROWS + 1)
        self.assertIsInstance(error_of(self.run_in(self.notes, write_note, *rows)), RowError)
        self.assertEqual((self.stored(), self.notes.outgoing.refused), ({}, 1))

    def test_a_negative_stream_has_negative_ids_in_its_table(self) -> None:
        self.assertEqual(self.run_in(self.process.writers[StreamName("debts")], write_note, "a"), [-2])

    def test_a_coroutine_function_is_refused(self) -> None:
        async def work(_: ISqlExecutor, __: NewFact) -> None:
            pass

        wrong = "run_interaction() needs a plain function without `yield`: it runs on a thread, and can await nothing"

        def generate(_: ISqlExecutor, fact: NewFact) -> Iterator[None]:
            fact.write("never")
            yield

        for each in (work, generate, lambda *_: Deferred[None]()):
            error = error_of(self.run_in(self.notes, each))
            self.assertEqual((type(error), str(error)), (StreamError, wrong))

    def test_an_instance_that_is_not_a_writer_or_is_stopping_is_refused(self) -> None:
        foreign = self.process.writers[StreamName("foreign")]
        self.assertIsInstance(error_of(self.run_in(foreign, write_nothing)), NotAWriterError)
        self.process.stop()
        self.assertIsInstance(error_of(self.run_in(self.notes, write_nothing)), StoppingError)

    def test_a_cancelled_caller_does_not_stop_the_transaction(self) -> None:
        self.store.close_gate("commit")
        running = Deferred.fromCoroutine(self.notes.run_interaction(write_note, "kept"))
        outcome = begin(running)
        running.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.store.open_gate("commit")
        self.assertEqual(self.stored(), {2: ('"kept"',)})

    def test_a_process_that_stops_lets_the_transaction_end(self) -> None:
        self.store.close_gate("commit")
        outcome = self.run_in(self.notes, write_note, "kept")
        stopping = begin(self.process.transactions.finish(10.0))
        self.process.clock.advance(10.0)
        self.assertEqual((stopping, outcome, self.process.new_lines()), ([None], [], []))
        self.store.open_gate("commit")
        self.assertEqual((outcome, self.stored()), ([2], {2: ('"kept"',)}))
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "kept"'])

    def test_a_function_without_a_database_has_no_sql(self) -> None:
        for call in (lambda txn, _: txn.execute("SELECT 1"), lambda txn, _: txn.executemany("SELECT 1", [()])):
            self.assertIsInstance(error_of(self.run_in(self.notes, call)), StoreError)

    # ---- invalidations, and streams in memory

    def test_an_invalidation_is_a_caches_fact_of_the_same_transaction(self) -> None:
        def work(_: ISqlExecutor, fact: NewFact) -> NewFact:
            fact.write("x")
            fact.invalidate("get_order", [17])
            fact.invalidate("get_total", None)
            return fact

        (written,) = self.run_in(self.notes, work)
        assert isinstance(written, NewFact)
        self.assertEqual(written.caches_token, 2)
        self.assertEqual(self.store.ends, ["committed"])
        rows = ('["get_order",["17"],1700500]', '["get_total",null,1700500]')
        self.assertEqual(self.stored("caches"), {2: rows})
        self.assertEqual(
            self.process.new_lines(),
            ['RDATA notes master 2 "x"', f"RDATA caches master batch {rows[0]}", f"RDATA caches master 2 {rows[1]}"],
        )

    def test_an_invalidation_in_a_caches_fact_is_a_row_of_that_fact(self) -> None:
        def work(_: ISqlExecutor, fact: NewFact) -> NewFact:
            fact.write(["a", None, 1])
            fact.invalidate("b", None)
            return fact

        (written,) = self.run_in(self.process.caches_writer(), work)
        assert isinstance(written, NewFact)
        self.assertEqual((written.token, written.caches_token), (2, 2))
        self.assertEqual(self.stored("caches"), {2: ('["a",null,1]', '["b",null,1700500]')})

    def test_a_rollback_after_an_invalidation_reserves_no_id_of_caches(self) -> None:
        def work(_: ISqlExecutor, fact: NewFact) -> None:
            fact.invalidate("get_order", [17])
            raise ZeroDivisionError

        self.run_in(self.notes, work)
        self.assertEqual(self.process.caches_writer().publisher.ids.pending.highest, 1)

    def test_only_a_writer_of_the_caches_stream_may_invalidate(self) -> None:
        self.process.writers[CACHES] = self.process.make_writer(StreamDefinition(CACHES, writers=("other",)))
        outcome = self.run_in(self.notes, lambda _, fact: fact.invalidate("get", None))
        self.assertIsInstance(error_of(outcome), NotAWriterError)


class SqliteTests(SynchronousTestCase):
    """On SQLite, whose functions run on a thread."""

    def setUp(self) -> None:
        self.patch(connection, "SHARED_TIME", 60.0)
        self.pump = Pump()
        self.store = open_store("sqlite://", self.pump)
        self.process = Process(self.store)
        typing = StreamDefinition("typing", in_memory=True)
        self.pump.wait(self.process.declare(*DEFINITIONS, typing))
        self.orders, self.typing = self.process.writers[ORDERS], self.process.writers[StreamName("typing")]
        self.pump.wait(self.orders.run_interaction(lambda txn, _: txn.execute("CREATE TABLE mine (id TEXT UNIQUE)")))

    def tearDown(self) -> None:
        self.pump.wait(self.store.close())
        self.assertEqual(self.process.open, [])
        self.assertEqual(self.process.clock.getDelayedCalls(), [])

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return self.pump.wait(self.store.read(lambda database: database.execute(sql)))

    @staticmethod
    def place(txn: ISqlExecutor, fact: NewFact, order: str) -> str:
        txn.execute("INSERT INTO mine VALUES (?)", [order])
        fact.write([order, "placed"])
        fact.invalidate("get_order", [order])
        return f"{order} is {fact.token}"

    def test_a_temporary_table_that_hides_another_one_is_refused_with_its_transaction(self) -> None:
        """Otherwise facts would be acknowledged, and stored in the temporary table."""

        def hide(txn: ISqlExecutor, fact: NewFact) -> None:
            txn.execute("CREATE TEMP TABLE Stream_Orders AS SELECT * FROM stream_orders")
            fact.write(["o1", "hidden"])

        hidden = "the temporary table 'Stream_Orders' hides the table of this name: give it another name"
        running = [self.pump.start(self.orders.run_interaction(hide)) for _ in range(2)]
        for each in running:
            with self.assertRaisesRegex(StoreError, hidden):
                self.pump.wait(each)
        self.pump.wait(self.orders.append([[["o1", "stored"]]]))
        self.assertEqual(self.query("SELECT row FROM stream_orders"), [('["o1","stored"]',)])

    def test_of_functions_that_wait_each_has_its_own_outcome_and_facts_are_published_in_order(self) -> None:
        names = ["o1", "o2", "o1", "o3"]
        running = [self.pump.start(self.orders.run_interaction(self.place, name)) for name in names]
        outcomes: list[str] = []
        for each in running:
            try:
                outcomes.append(self.pump.wait(each))
            except StoreError as error:
                outcomes.append(type(error).__name__)
        self.assertEqual(outcomes, ["o1 is 3", "o2 is 4", "StoreError", "o3 is 6"])
        self.assertEqual(self.query("SELECT id FROM mine"), [("o1",), ("o2",), ("o3",)])
        self.assertEqual(self.query("SELECT stream_id FROM stream_orders"), [(3,), (4,), (6,)])
        self.assertEqual(self.query("SELECT stream_id FROM stream_caches"), [(2,), (3,), (4,)])
        self.assertEqual(
            [line for line in self.process.lines if " orders " in line],
            [
                "POSITION orders master 1 2",
                'RDATA orders master 3 ["o1","placed"]',
                'RDATA orders master 4 ["o2","placed"]',
                'RDATA orders master 6 ["o3","placed"]',
            ],
        )

    def test_a_function_that_is_called_again_reserves_one_id_of_caches(self) -> None:
        blocked = self.pump.start(self.orders.run_interaction(self.place, "first"))  # so that the next two wait
        calls: list[str] = []

        def undo(txn: ISqlExecutor, _: NewFact) -> None:
            txn.execute("INSERT OR ROLLBACK INTO mine VALUES ('second')")

        def place(txn: ISqlExecutor, fact: NewFact) -> None:
            calls.append("called")
            self.place(txn, fact, "second")

        running = [self.pump.start(self.orders.run_interaction(each)) for each in (place, undo)]
        self.pump.wait(blocked)
        self.pump.wait(running[0])
        self.assertRaises(StoreError, self.pump.wait, running[1])
        self.assertEqual(calls, ["called"] * 2)
        self.assertEqual(self.query("SELECT stream_id FROM stream_caches"), [(2,), (3,)])
        self.assertEqual(self.process.caches_writer().publisher.ids.pending.open_count, 0)

    def test_a_fact_of_a_stream_in_memory_is_published_with_the_statements_of_its_function(self) -> None:
        def work(txn: ISqlExecutor, fact: NewFact) -> None:
            txn.execute("INSERT INTO mine VALUES ('typed')")
            fact.write("x")

        self.pump.wait(self.typing.run_interaction(work))
        self.assertEqual(self.query("SELECT id FROM mine"), [("typed",)])  # after a position was stored
        self.assertIn('RDATA typing master 2 "x"', self.process.lines)

    def test_a_fact_that_cannot_wait_in_memory_undoes_the_statements_of_its_function(self) -> None:
        async def work() -> None:
            async with self.typing.reserve():
                self.patch(ReorderBuffer, "has_room", lambda *_: False)
                await self.typing.run_interaction(lambda txn, _: txn.execute("INSERT INTO mine VALUES ('no')"))

        self.assertRaises(StoreError, self.pump.wait, work())
        self.assertEqual(self.query("SELECT id FROM mine"), [])
