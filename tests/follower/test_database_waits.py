"""A transaction that waits for its database: logged once, shown in the status, and no reason not to be ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.errors import StoreError
from replication.follower.database_waits import (
    FUNCTION_NOTED_AFTER,
    NOTED_AFTER,
    PATIENCE,
    DatabaseWaits,
    look_for_waits,
)
from replication.web.health import Health
from tests.doubles import begin, now
from tests.follower.cases import HELLO, ORDERS, WorkerCase, position, rdata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact


class Slow:
    """An ITransaction whose calls return when the test fires them."""

    def __init__(self) -> None:
        self.answer: Deferred[Any] = Deferred()
        self.found: Deferred[Sequence[str]] = Deferred()

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return list(await self.answer)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        await self.answer

    async def run(self, function: Any) -> Any:
        return function(await self.answer)

    async def commit(self, writes: Sequence[object], receipt: object = None) -> None:
        await self.answer

    async def rollback(self) -> None:
        await self.answer

    async def blockers(self) -> Sequence[str]:
        return await self.found


@attrs.frozen
class Follower:
    """A StreamFollower, as far as looks go."""

    waits: DatabaseWaits

    @property
    def application(self) -> Follower:
        return self


class DatabaseWaitsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.lifetime = Lifetime(self.clock)
        self.waits = DatabaseWaits(ORDERS, "function", self.lifetime)
        self.slow = Slow()
        begin(look_for_waits([Follower(self.waits)], self.lifetime))  # type: ignore[list-item]

    def tearDown(self) -> None:
        self.lifetime.end()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def pass_time(self, seconds: float) -> list[str]:
        """Let time pass, second by second, and return what was logged."""
        with capturedLogs() as logged:
            for _ in range(int(seconds)):
                self.clock.advance(1)
        return [formatEvent(each) for each in logged]

    def test_each_kind_of_call_that_waits_is_logged_once_with_what_it_waits_for(self) -> None:
        for call in (
            lambda each: each.execute("SELECT 1"),
            lambda each: each.executemany("SELECT 1", [()]),
            lambda each: each.run(list),
            lambda each: each.commit([]),
        ):
            self.setUp()
            waiting = begin(call(self.waits.begin(self.slow)))
            self.assertEqual(self.pass_time(2 * NOTED_AFTER - 1), [])
            self.slow.found.callback(["session 7 of bob", "session 8"])
            text = "a transaction of its function has waited for the database for more than {} s"
            why = f"{text}: it waits for session 7 of bob, session 8"
            self.assertEqual(self.pass_time(1), [f"orders: {why.format(6)}"])
            self.assertEqual(self.pass_time(100), [])
            self.assertEqual(self.waits.note, f"stream 'orders': {why.format(106)}")
            with capturedLogs() as logged:
                self.slow.answer.callback([])
                self.waits.end()
            self.assertEqual(len(waiting), 1)
            self.assertEqual(
                [formatEvent(each) for each in logged], ["orders: the wait for the database is over, after 106 s"]
            )
            self.assertIsNone(self.waits.note)
            self.assertEqual(self.pass_time(100), [])
            self.tearDown()

    def test_a_function_that_takes_long_between_its_statements_does_not_wait_for_the_database(self) -> None:
        transaction = self.waits.begin(self.slow)
        self.slow.answer.callback([])
        for _ in range(10):
            now(transaction.execute("SELECT 1"))
            self.assertEqual(self.pass_time(NOTED_AFTER), [])
        self.assertIsNone(self.waits.note)

    def test_a_function_that_awaits_something_else_for_a_minute_is_logged_once(self) -> None:
        """Nothing showed a function that never returns: its stream stood, and health, status and log were good."""
        transaction = self.waits.begin(self.slow)
        self.slow.answer.callback([])
        now(transaction.execute("SELECT 1"))
        self.assertEqual(self.pass_time(NOTED_AFTER + FUNCTION_NOTED_AFTER - 1), [])
        why = "its function has run for more than {} s, and awaits something other than the database: give what it "
        why += "awaits a timeout"
        self.assertEqual(self.pass_time(1), [f"orders: {why.format(60)}"])
        self.assertEqual(self.pass_time(100), [])
        self.assertEqual(self.waits.note, f"stream 'orders': {why.format(160)}")
        now(transaction.execute("SELECT 2"))
        self.assertEqual(self.pass_time(NOTED_AFTER), ["orders: the wait for the function is over, after 162 s"])
        self.assertIsNone(self.waits.note)
        self.waits.end()

    def test_statements_that_each_take_less_are_no_wait(self) -> None:
        transaction = self.waits.begin(self.slow)
        for _ in range(10):
            begin(transaction.execute("SELECT 1"))
            self.assertEqual(self.pass_time(NOTED_AFTER - 1), [])
            answer, self.slow.answer = self.slow.answer, Deferred()
            answer.callback([])

    def test_a_wait_whose_reason_is_not_known_in_time_is_logged_without_it(self) -> None:
        begin(self.waits.begin(self.slow).commit([]))
        (text,) = self.pass_time(2 * NOTED_AFTER + PATIENCE)
        self.assertTrue(text.endswith("has waited for the database for more than 8 s"))
        self.waits.end()
        self.slow.found = Deferred()
        begin(self.waits.begin(self.slow).commit([]))
        self.slow.found.errback(StoreError("it does not answer"))
        (text,) = self.pass_time(2 * NOTED_AFTER)
        self.assertIn("has waited for the database for more than", text)

    def test_a_wait_that_ends_while_its_reason_is_read_is_not_logged(self) -> None:
        begin(self.waits.begin(self.slow).commit([]))
        self.assertEqual(self.pass_time(2 * NOTED_AFTER), [])
        self.slow.answer.callback(None)
        self.waits.end()
        self.assertEqual(self.pass_time(100), [])

    def test_the_end_of_the_wait_of_one_statement_is_noted_before_the_transaction_ends(self) -> None:
        transaction = self.waits.begin(self.slow)
        begin(transaction.execute("SELECT 1"))
        self.slow.found.callback([])
        self.assertEqual(len(self.pass_time(2 * NOTED_AFTER)), 1)
        self.slow.answer.callback([])
        (text,) = self.pass_time(NOTED_AFTER)
        self.assertIn("the wait for the database is over", text)
        self.assertIsNone(self.waits.note)


class WorkerWaitsTests(WorkerCase):
    def test_a_stream_that_waits_is_not_stopped_and_its_status_has_the_wait(self) -> None:
        @self.worker.on("orders")
        async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            """Apply nothing."""

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.store.close_gate("commit")
        with capturedLogs() as logged:
            self.send(writer, rdata(2))
            for _ in range(int(2 * NOTED_AFTER)):
                self.net.advance(1)
        texts = [formatEvent(each) for each in logged if each["log_level"] is LogLevel.warn]
        waits = "a transaction of its function has waited for the database for more than"
        self.assertEqual([each for each in texts if waits in each], [f"orders: {waits} 6 s"])
        (status,) = self.worker.served.stream_statuses("orders")
        (note,) = status.notes
        self.assertIn(f"stream 'orders': {waits}", note)
        self.assertEqual([(each.error, each.lag) for each in status.writers], [(None, 1)])
        self.assertEqual(Health(self.worker.served, self.net).stream_faults(), [])
        self.store.open_gate("commit")
        self.net.run()
        (status,) = self.worker.served.stream_statuses("orders")
        self.assertEqual(([*status.notes], self.at()), ([], 2))
