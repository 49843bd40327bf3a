"""The fact that a function cannot take is found, skipped once, and taken up again."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.errors import PositionMovedError, StoreError, StreamError, ValueRefusedError
from replication.follower.application import FailedFactFunction
from replication.follower.failures import FailingFacts
from replication.follower.merge import MergingFollower
from replication.follower.stream import FollowMode, StreamFollower
from replication.streams.cursor import Apply
from replication.streams.facts import Fact
from replication.streams.interfaces import Page, Write
from replication.streams.skips import FailedFact, FailedFactAction, SkippedFact, SkipState
from replication.wire.grammar import InstanceName, Token
from tests.doubles import begin, error_of, logged, now
from tests.follower.cases import MASTER, ORDERS, OTHER, FollowerCase, fact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.follower.application import ApplyTransaction
    from tests.follower.cases import First

WORKER, LINE = InstanceName("worker1"), InstanceName("")


class FailingCase(FollowerCase):
    """A follower whose function raises for the tokens in ``poison``."""

    mode = FollowMode.APPLIED
    decide: Callable[[FailedFact, ApplyTransaction], object] | None = None

    def setUp(self) -> None:
        self.poison: set[int] = set()
        self.seen: list[list[int]] = []
        self.failed: list[FailedFact] = []
        super().setUp()
        self.at(0, 1)

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        options: dict[str, Any] = {"function": function or self.apply, "first": first, **self.process.arguments}
        if self.decide is not None:
            options["on_failed"] = FailedFactFunction(self.decide, attempts=3)
        return StreamFollower(name=ORDERS, mode=self.mode, **options)

    def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        tokens = [each.token for each in facts]
        self.seen.append([*tokens])
        if bad := self.poison.intersection(tokens):
            raise ValueError(f"cannot take {bad}")

    def restart(self) -> None:
        self.process.lifetime.end()
        self.process.lifetime = type(self.process.lifetime)(self.process.clock)
        self.follower = self.make_follower()
        now(self.follower.open())

    def until_alone(self, token: int, writer: InstanceName = MASTER) -> None:
        """Let time pass until a fact fails alone."""
        for _ in range(20):
            if self.follower.application.failing.failing(writer) == token:
                return
            self.process.clock.advance(0.25)
        raise AssertionError(f"{token} is not found: {self.seen}")

    def leave_out(self, token: int, writer: InstanceName = MASTER) -> list[Any]:
        outcome = begin(self.follower.application.failing.request_skip(writer, Token(token)))
        self.follower.application.failing.wake()
        return outcome

    def kept(self) -> list[SkippedFact]:
        return [*now(self.store.skipped_facts(WORKER, limit=100))]

    def states(self) -> list[tuple[int, str]]:
        return [(each.fact.token, each.state.value) for each in self.kept()]


class FindTests(FailingCase):
    def test_the_fact_that_fails_is_found_and_those_below_it_are_applied(self) -> None:
        self.poison = {7}
        with logged() as messages:
            self.rows(*map(fact, range(2, 10)))
            self.until_alone(7)
        self.assertEqual(self.position(), 6)
        error = "applying orders of master after 6: ValueError: cannot take {7}"
        skip = "`replication skip orders master 7`, with --http or --database of this worker,"
        cure = f"it is fact 7: {skip} leaves it out"
        self.assertIn(f"{error}; next attempt in 0.25 s; {cure}", messages)
        self.assertEqual((self.follower.status(MASTER).failed, self.state()), (7, "stopped"))
        self.flushLoggedErrors(ValueError)

    def test_the_status_has_the_facts_among_which_the_one_that_fails_is_searched(self) -> None:
        """A slow function takes long until that one is alone; meanwhile the status named no fact."""
        self.poison = {7}
        found: list[str | None] = []
        with logged() as messages:
            self.rows(*map(fact, range(2, 10)))
            while self.follower.application.failing.failing(MASTER) is None:
                found.append(self.follower.status(MASTER).error)
                self.process.clock.advance(0.25)
            found.append(self.follower.status(MASTER).error)
        error = "applying orders of master after {}: ValueError: cannot take {{7}}"
        among = "; the cause is a fact from {} to {}: fewer are applied at a time, until it is alone"
        self.assertEqual(
            found,
            [
                error.format(1) + among.format(2, 9),
                error.format(5) + among.format(6, 9),
                error.format(5) + among.format(6, 7),
                error.format(6) + among.format(7, 8),
                error.format(6),
            ],
        )
        self.assertFalse([each for each in messages if "the cause is" in each])
        self.flushLoggedErrors(ValueError)

    def test_one_error_has_one_traceback_until_the_stream_has_gone_on(self) -> None:
        def refuse(facts: Sequence[Fact], _: object) -> None:
            if self.poison.intersection(each.token for each in facts):
                raise error("no")

        def tracebacks() -> int:
            return len(self.flushLoggedErrors(ValueError, TypeError))

        error: type[Exception] = ValueError
        self.follower = self.make_follower(refuse)
        now(self.follower.open())
        self.at(0, 1)
        self.poison = {7, 8}
        with logged() as messages:
            self.rows(*map(fact, range(2, 40)))
            self.until_alone(7)
            self.leave_out(7)
            self.until_alone(8)
            self.process.clock.advance(20)
        self.assertEqual(tracebacks(), 1)
        self.assertEqual(len([each for each in messages if "; it is fact" in each]), 2)
        error = TypeError
        with logged():
            self.process.clock.advance(20)
        self.assertEqual(tracebacks(), 1)
        self.poison.clear()
        self.process.clock.advance(20)
        self.assertEqual(self.position(), 39)
        self.poison = {40, 900}
        with logged():
            self.rows(*map(fact, range(40, 1000)))
            self.until_alone(40)
            self.assertEqual(tracebacks(), 1)
            self.leave_out(40)
            self.until_alone(900)
        self.assertEqual(tracebacks(), 1, "all facts were applied together again before this one")

    def test_a_database_that_is_broken_is_not_blamed_on_a_fact(self) -> None:
        broken = StoreError("database disk image is malformed")

        async def check() -> None:
            raise broken

        self.store.errors["commit"] = broken
        with patch.object(self.store, "check", check), logged() as messages:
            self.rows(fact(2))
            for _ in range(20):
                self.process.clock.advance(0.25)
        self.assertEqual((self.follower.status(MASTER).failed, self.state()), (None, "stopped"))
        self.assertFalse([each for each in messages if "leaves it out" in each])
        del self.store.errors["commit"]
        self.process.clock.advance(100)
        self.assertEqual(self.position(), 2)
        self.flushLoggedErrors(StoreError)

    def test_a_commit_that_a_fact_lets_fail_is_blamed_on_it(self) -> None:
        self.store.errors["commit"] = StoreError("FOREIGN KEY constraint failed")
        with logged():
            self.rows(fact(2))
            self.until_alone(2)
        self.flushLoggedErrors(StoreError)

    def test_what_only_the_fact_can_cause_needs_no_check_of_the_database(self) -> None:
        """The function raised, or the database refused a value."""

        async def check() -> None:
            raise StoreError("the disk is full")

        def refused(facts: Sequence[Fact], _: object) -> None:
            raise ValueRefusedError("integer out of range")

        self.poison = {2}
        for follower in (self.follower, self.make_follower(refused)):
            self.follower = follower
            now(follower.open())
            self.at(0, 1)
            with patch.object(self.store, "check", check), logged():
                self.rows(fact(2))
                self.until_alone(2)
        self.flushLoggedErrors(ValueError, ValueRefusedError)

    def test_every_poisoned_fact_among_many_is_found(self) -> None:
        for poison in range(2, 34):
            self.seen.clear()
            self.poison = {poison}
            self.follower = self.make_follower()
            self.store._streams.clear()
            now(self.follower.open())
            self.at(0, 1)
            with logged():
                self.rows(*map(fact, range(2, 34)))
                self.until_alone(poison)
            self.assertEqual(self.position(), max(1, poison - 1))
            self.poison.clear()
            self.process.clock.advance(10)
            self.assertEqual(self.position(), 33)
            applied = [token for tokens in self.seen for token in tokens if poison not in tokens]
            self.assertEqual(applied[:1], [2] if poison > 2 else applied[:1])
        self.flushLoggedErrors(ValueError)

    def test_after_a_success_facts_are_applied_together_again(self) -> None:
        self.poison = {3}
        with logged():
            self.rows(*map(fact, range(2, 10)))
            self.until_alone(3)
        self.poison.clear()
        self.seen.clear()
        self.process.clock.advance(10)
        self.assertEqual(self.seen, [[3], [4, 5], [6, 7, 8, 9]])
        self.rows(*map(fact, range(10, 20)))
        self.rows(*map(fact, range(20, 50)))
        self.assertEqual(self.seen[-3:], [[*range(10, 18)], [18, 19], [*range(20, 50)]])
        self.flushLoggedErrors(ValueError)

    def test_what_another_attempt_may_cure_is_no_fault_of_a_fact(self) -> None:
        for error in (StoreError("locked", temporary=True), PositionMovedError("moved")):
            self.store.errors["commit"] = error
            with logged():
                self.rows(fact(2))
                self.process.clock.advance(0.25)
            self.assertIsNone(self.follower.application.failing.failing(MASTER))
            self.assertIsInstance(error_of(self.skip_error(2)), StreamError)

    def skip_error(self, token: int) -> list[Any]:
        try:
            return self.leave_out(token)
        except StreamError as error:
            outcome: Deferred[None] = Deferred()
            outcome.errback(error)
            return begin(outcome)

    def test_a_late_fact_that_fails_is_found_among_late_ones(self) -> None:
        self.at(1, 9)
        self.poison = {5}
        self.assertTrue(self.follower.cursors[MASTER].found_late([fact(4), fact(5), fact(6)]))
        with logged():
            self.follower.resume()
            self.until_alone(5)
        self.assertEqual(self.position(), 9)
        done = self.leave_out(5)
        self.process.clock.advance(1)
        self.assertEqual((done, self.seen[-1], self.position()), ([None], [6], 9))
        self.flushLoggedErrors(ValueError)


class RaisedTests(FailingCase):
    """Exceptions that mean more elsewhere: the end of a process, a task that was cancelled."""

    def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        if bad := self.poison.intersection(each.token for each in facts):
            raise self.error(f"cannot take {bad}")

    def check(self, error: type[BaseException]) -> None:
        self.poison, self.error = {3}, error
        with logged():
            self.rows(fact(2), fact(3), fact(4))
            self.until_alone(3)
        self.assertEqual((self.position(), self.state()), (2, "stopped"))
        self.assertIn(f"{error.__name__}: cannot take {{3}}", self.follower.errors.texts[MASTER])
        with logged():
            done = self.leave_out(3)
        self.assertEqual((done, self.position(), self.state()), ([None], 4, "live"))
        with logged():
            done = begin(self.follower.application.failing.request_retry(self.kept()[0]))
            self.follower.resume()
        self.assertIn(f"{error.__name__}: cannot take {{3}}", str(error_of(done)))
        self.rows(fact(5))
        self.assertEqual((self.states(), self.position(), self.state()), ([(3, "skipped")], 5, "live"))
        self.flushLoggedErrors()

    def test_an_exit_stops_the_stream_as_any_exception(self) -> None:
        self.check(SystemExit)

    def test_a_generator_exit_stops_the_stream_as_any_exception(self) -> None:
        self.check(GeneratorExit)

    def test_a_task_of_asyncio_that_was_cancelled_stops_the_stream_as_any_exception(self) -> None:
        self.check(asyncio.CancelledError)

    def test_a_deferred_that_was_cancelled_stops_the_stream_as_any_exception(self) -> None:
        self.check(CancelledError)


class NoTextError(Exception):
    def __str__(self) -> str:
        raise TypeError


class NoTextTests(FailingCase):
    def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        if self.poison.intersection(each.token for each in facts):
            raise NoTextError

    def test_an_error_without_a_text_stops_the_stream_as_any_exception(self) -> None:
        """The task that applies facts ended, and the status showed no error."""
        self.poison = {3}
        with logged():
            self.rows(fact(2), fact(3), fact(4))
            self.until_alone(3)
        self.assertEqual((self.position(), self.state()), (2, "stopped"))
        with logged():
            done = self.leave_out(3)
        self.assertEqual((done, self.position(), self.state()), ([None], 4, "live"))
        self.flushLoggedErrors()


class SkipTests(FailingCase):
    def setUp(self) -> None:
        super().setUp()
        self.poison = {3}
        with logged():
            self.rows(fact(2), fact(3, "[1]", "[2]"), fact(4))
            self.until_alone(3)
        self.flushLoggedErrors(ValueError)

    def test_the_fact_is_left_out_with_its_rows_and_the_reason_and_the_stream_goes_on(self) -> None:
        with logged() as messages:
            done = self.leave_out(3)
        self.assertEqual((done, self.position(), self.state(), self.seen[-1]), ([None], 4, "live", [4]))
        (kept,) = self.kept()
        self.assertEqual((kept.stream, kept.writer, kept.fact), (ORDERS, MASTER, fact(3, "[1]", "[2]")))
        self.assertEqual((kept.state, kept.error), (SkipState.SKIPPED, "ValueError: cannot take {3}"))
        self.assertEqual(
            messages, ["fact 3 of orders by master is skipped, as a command decided: ValueError: cannot take {3}"]
        )
        status = self.follower.status(MASTER)
        self.assertEqual((status.failed, status.skipped), (None, 1))

    def test_a_fact_that_does_not_fail_is_not_skipped(self) -> None:
        for token, writer, why in (
            (2, MASTER, "3 does"),
            (99, MASTER, "3 does"),
            (3, OTHER, "no fact of it fails now"),
        ):
            error = self.assertRaises(StreamError, self.leave_out, token, writer)
            self.assertEqual(str(error), f"fact {token} of stream 'orders' by {writer!r} does not fail: {why}")

    def test_the_skip_and_the_position_are_one_transaction(self) -> None:
        self.store.errors["commit"] = StoreError("locked", temporary=True)
        with logged():
            done = self.leave_out(3)
        self.assertEqual((done, self.kept(), self.position()), ([], [], 2))
        del self.store.errors["commit"]
        self.process.clock.advance(10)
        self.assertEqual((done, self.states(), self.position()), ([None], [(3, "skipped")], 4))

    def test_a_skip_without_a_commit_is_forgotten_at_the_end(self) -> None:
        self.store.close_gate("commit")
        self.leave_out(3)
        self.process.lifetime.end()
        self.store.errors["commit"] = StoreError("gone")
        with logged():
            self.store.open_gate("commit")
        del self.store.errors["commit"]
        self.assertEqual(self.states(), [])
        self.restart()
        self.assertEqual(self.follower.position(MASTER), 2)

    def test_a_restart_knows_what_was_skipped(self) -> None:
        self.leave_out(3)
        self.restart()
        self.at(4, 4)
        self.assertEqual(self.follower.status(MASTER).skipped, 1)

    def test_a_writer_that_goes_back_takes_back_what_was_skipped(self) -> None:
        self.leave_out(3)
        self.follower.connection_lost("link")
        with logged():
            self.at(2, 2)
        self.assertEqual((self.states(), self.position()), ([], 2))
        self.assertEqual(self.follower.status(MASTER).skipped, 0)
        self.poison.clear()
        self.rows(fact(3, '"another"'))
        self.assertEqual((self.position(), self.seen[-1]), (3, [3]))

    def test_what_is_skipped_is_noted_as_any_other_fact(self) -> None:
        """So neither another writer nor the audit brings it back."""
        notes: list[int] = []

        class Known:
            async def new_facts(self, facts: Sequence[Fact]) -> Sequence[Fact]:
                return facts

            async def note(self, transaction: object, writer: object, facts: Sequence[Fact], floor: object) -> None:
                notes.extend(each.token for each in facts)

        self.follower.known, self.follower.known_by_token = cast("Any", Known()), True
        self.leave_out(3)
        self.assertEqual(notes, [3, 4])


class RequestedTests(FailingCase):
    def request(self, *facts: SkippedFact) -> None:
        position = now(self.store.positions(ORDERS))[MASTER]
        now(
            self.store.transaction().commit(
                [Write(ORDERS, MASTER, position, expected=position, follower=WORKER, skipped=facts)]
            )
        )

    def test_a_skip_that_was_requested_before_the_start_is_done_before_the_fact_is_tried(self) -> None:
        self.request(SkippedFact(ORDERS, MASTER, Fact(Token(3), ()), SkipState.SKIP_REQUESTED))
        self.restart()
        self.process.pages = [Page([fact(2), fact(3), fact(4)], Token(4), limited=False)]
        with logged() as messages:
            self.at(4, 4)
        self.assertEqual((self.seen, self.position()), ([[2, 4]], 4))
        self.assertEqual([each.fact for each in self.kept()], [fact(3)])
        why = "its skip was requested before the start"
        self.assertEqual(messages, [f"fact 3 of orders by master is skipped, as a command decided: {why}"])

    def test_a_skip_of_an_id_that_no_fact_has_at_the_start_is_dropped(self) -> None:
        """A later fact with that ID is a good one."""
        self.request(*[SkippedFact(ORDERS, MASTER, Fact(Token(each), ()), SkipState.SKIP_REQUESTED) for each in (3, 9)])
        for published in (5, 8):
            self.restart()
            self.process.pages = [Page([fact(published)], Token(published), limited=False)]
            with logged() as messages:
                self.at(published, published)
            dropped = "no fact of orders by master has the ID {}: the request to skip it is dropped"
            self.assertEqual(messages, [dropped.format(each) for each in (3, 9)] if published == 5 else [])
        self.rows(fact(9))
        self.assertEqual(self.seen, [[5], [8], [9]])
        self.assertEqual(self.states(), [(9, "dropped"), (3, "dropped")])
        self.assertEqual(self.follower.status(MASTER).skipped, 0)

    def test_a_retry_that_was_requested_before_the_start_is_done_once_the_writer_is_connected(self) -> None:
        self.request(SkippedFact(ORDERS, MASTER, fact(3), SkipState.RETRY_REQUESTED, "old"))
        self.restart()
        with logged() as messages:
            self.at(5, 5)
            self.process.pages = [Page([], Token(5), limited=False)]
            self.process.clock.advance(1)
        self.assertEqual((self.seen, self.states()), ([[3]], [(3, "applied")]))
        self.assertIn("fact 3 of orders by master, which was skipped, is applied now", messages)
        self.assertEqual(self.follower.status(MASTER).skipped, 0)

    def test_a_fact_whose_requested_retry_fails_is_still_counted(self) -> None:
        self.request(SkippedFact(ORDERS, MASTER, fact(3), SkipState.RETRY_REQUESTED, "old"))
        self.poison = {3}
        self.restart()
        with logged():
            self.at(1, 1)
        self.assertEqual((self.states(), self.follower.status(MASTER).skipped), ([(3, "skipped")], 1))


class RetryTests(FailingCase):
    def setUp(self) -> None:
        super().setUp()
        self.poison = {3}
        with logged():
            self.rows(fact(2), fact(3), fact(4))
            self.until_alone(3)
            self.leave_out(3)
        self.flushLoggedErrors(ValueError)
        self.seen.clear()

    def retry(self) -> list[Any]:
        outcome = begin(self.follower.application.failing.request_retry(self.kept()[0]))
        self.follower.resume()
        return outcome

    def test_a_skipped_fact_is_applied_once_and_the_position_stays(self) -> None:
        self.poison.clear()
        with logged():
            done = self.retry()
        self.assertEqual((done, self.seen, self.position()), ([None], [[3]], 4))
        self.assertEqual((self.states(), self.follower.status(MASTER).skipped), ([(3, "applied")], 0))
        self.rows(fact(5))
        self.assertEqual(self.seen[-1], [5])

    def test_a_fact_that_fails_again_stays_skipped_with_the_new_reason_and_stops_nothing(self) -> None:
        with logged() as messages:
            done = self.retry()
        reason = "ValueError: cannot take {3}"
        self.assertEqual(str(error_of(done)), f"fact 3 stays skipped, the function raised {reason}")
        self.assertEqual(messages, [f"fact 3 of orders by master stays skipped: {reason}"])
        self.assertEqual(self.kept()[0].error, reason)
        self.assertEqual((self.states(), self.state()), ([(3, "skipped")], "live"))
        self.rows(fact(5))
        self.assertEqual(self.position(), 5)

    def test_a_retry_is_one_transaction(self) -> None:
        self.poison.clear()
        self.store.errors["commit"] = StoreError("locked", temporary=True)
        with logged():
            done = self.retry()
        self.assertEqual((done, self.states()), ([], [(3, "skipped")]))
        del self.store.errors["commit"]
        with logged():
            self.process.clock.advance(1)
        self.assertEqual((done, self.states()), ([None], [(3, "applied")]))


class DecideTests(FailingCase):
    action: object = FailedFactAction.SKIP
    raised: Exception | None = None

    async def decide(self, failed: FailedFact, txn: ApplyTransaction) -> object:
        self.failed.append(failed)
        await txn.execute("INSERT INTO letters …")
        if self.raised is not None:
            raise self.raised
        return self.action

    def make_it_fail(self) -> list[str]:
        self.poison = {3}
        with logged() as messages:
            self.rows(fact(2), fact(3), fact(4))
            for _ in range(8):
                self.process.clock.advance(1)
        self.flushLoggedErrors(ValueError)
        return messages

    def test_after_the_attempts_the_function_decides_and_its_effects_are_kept(self) -> None:
        self.make_it_fail()
        (failed,) = self.failed
        self.assertEqual((failed.stream, failed.writer, failed.fact, failed.attempts), (ORDERS, MASTER, fact(3), 3))
        self.assertIsInstance(failed.error, ValueError)
        self.assertEqual(self.store.executed, ["INSERT INTO letters …"])
        self.assertEqual([(each.decided_by, each.error) for each in self.kept()], [("function", failed.reason)])
        self.assertEqual((self.position(), self.state()), (4, "live"))

    def test_with_stop_the_stream_stays_stopped_and_it_is_called_again(self) -> None:
        self.action = FailedFactAction.STOP
        self.make_it_fail()
        self.assertEqual([each.attempts for each in self.failed], [3, 4, 5])
        self.assertEqual((self.position(), self.kept(), self.state()), (2, [], "stopped"))
        self.assertIn("ValueError: cannot take {3}", self.follower.errors.texts[MASTER])

    def test_any_other_answer_is_an_error_and_skips_nothing(self) -> None:
        self.action = None
        messages = self.make_it_fail()
        self.assertEqual((self.position(), self.kept()), (2, []))
        wrong = "the function of on_failed_fact('orders') returned None: "
        right = "return FailedFactAction.SKIP or FailedFactAction.STOP"
        self.assertTrue(any(f"ConfigError: {wrong}{right}; next" in each for each in messages), messages)

    def test_if_it_raises_nothing_is_skipped(self) -> None:
        self.raised = KeyError("x")
        self.make_it_fail()
        self.assertEqual((self.position(), self.kept()), (2, []))
        self.assertIn("KeyError", self.follower.errors.texts[MASTER])
        self.flushLoggedErrors(KeyError)


class LinearTests(FailingCase):
    """All writers of a stream in one order."""

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        return MergingFollower(
            name=ORDERS,
            mode=self.mode,
            function=function or self.apply,
            first=first,
            all_positions_received=lambda: True,
            **self.process.arguments,
        )

    def test_a_fact_of_one_writer_is_found_and_skipped_among_those_of_all(self) -> None:
        self.poison = {5}
        self.at(0, 1, OTHER)
        with logged():
            self.rows(fact(2), fact(4), fact(6))
            self.rows(fact(3), fact(5), fact(7), writer=OTHER)
            self.at(6, 7)
            self.until_alone(5, OTHER)
            done = self.leave_out(5, OTHER)
        self.assertEqual(done, [None])
        self.assertEqual((self.position(), self.position(OTHER)), (7, 7))
        self.assertEqual([(each.writer, each.fact) for each in self.kept()], [(OTHER, fact(5))])
        applied = [token for tokens in self.seen for token in tokens if 5 not in tokens]
        self.assertEqual(applied, [2, 3, 4, 6, 7])
        self.flushLoggedErrors(ValueError)


class FailingFactsTests(SynchronousTestCase):
    """What is known of failing facts, without a follower: several writers in one line, as in linear order."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.failing = FailingFacts(ORDERS, Lifetime(self.clock))

    def note_failure(self, *tokens: int, writer: InstanceName = MASTER, line: InstanceName = LINE) -> FailedFact | None:
        return self.failing.note(line, [*map(fact, tokens)], lambda _: writer, ValueError("no"))

    def size(self, line: InstanceName = LINE) -> int:
        """How many of twenty facts may be applied at once."""
        return len(self.failing.cut(line, Apply([*map(fact, range(2, 22))], Token(1), Token(21))).facts)

    def skipped(self, token: int, writer: InstanceName = MASTER) -> SkippedFact:
        return SkippedFact(ORDERS, writer, fact(token), SkipState.SKIPPED)

    def test_what_was_decided_before_the_start_is_read_of_this_stream_alone(self) -> None:
        asked: list[object] = []

        class Store:
            async def skipped_counts(self, *which: object) -> dict[InstanceName, int]:
                asked.append(which)
                return {MASTER: 2}

            async def skipped_facts(self, *which: object, **_: object) -> list[SkippedFact]:
                asked.append(which)
                return []

            async def read(self, _: object) -> dict[InstanceName, Token]:
                return {}

        now(self.failing.load(cast("Any", Store()), InstanceName("worker1"), {}))
        self.assertEqual((asked, self.failing.counts), ([("worker1", ORDERS)] * 2, {MASTER: 2}))

    def test_attempts_are_counted_while_the_same_fact_fails_alone(self) -> None:
        tries = [(2, MASTER), (2, MASTER), (2, MASTER), (2, OTHER), (3, OTHER), (3, OTHER)]
        found = [self.note_failure(token, writer=writer) for token, writer in tries]
        self.assertEqual([each and each.attempts for each in found], [1, 2, 3, 1, 1, 2])
        self.failing.committed(LINE, [], 1)
        self.assertEqual((again := self.note_failure(3, writer=OTHER)) and again.attempts, 1)

    def test_a_fact_that_fails_is_found_only_if_it_was_alone(self) -> None:
        self.assertIsNone(self.note_failure(2, 3))
        self.assertEqual((self.failing.failing(MASTER), self.failing.cure(LINE)), (None, ""))
        self.assertIn("from 2 to 3: ", self.failing.search(LINE))
        self.failing.committed(LINE, [], 1)
        self.assertEqual(self.failing.search(LINE), "")
        self.assertIsNone(self.note_failure(2, 3))
        self.assertEqual((self.failing.is_narrowing(LINE), self.failing.found_now(LINE)), (True, False))
        self.note_failure(2)
        self.assertEqual((self.failing.failing(MASTER), self.failing.failing(OTHER)), (2, None))
        self.assertEqual((self.failing.is_narrowing(LINE), self.failing.found_now(LINE)), (False, True))
        self.assertTrue(self.failing.is_limited(LINE))
        self.note_failure(2)
        self.assertFalse(self.failing.found_now(LINE))

    def test_half_as_many_facts_are_applied_after_a_failure_and_twice_as_many_after_a_success(self) -> None:
        sizes = [self.size()]
        for count in (20, 10, 5, 2, 1):
            self.note_failure(*range(2, 2 + count))
            sizes.append(self.size())
        self.assertEqual(sizes, [20, 10, 5, 2, 1, 1])
        sizes.clear()
        for rows in (1, 2, 4, 7):
            self.failing.committed(LINE, [], rows)
            sizes.append(self.size())
        self.assertEqual(sizes, [2, 4, 8, 20], "the last step was not full: all that was there was applied")

    def test_each_line_has_its_own_limit(self) -> None:
        self.note_failure(*range(2, 22), line=MASTER)
        self.assertEqual((self.size(MASTER), self.size(OTHER)), (10, 20))

    def test_only_the_requested_facts_of_a_step_are_left_out(self) -> None:
        facts, writers = [fact(2), fact(3), fact(4)], {2: MASTER, 3: OTHER, 4: MASTER}
        divide = partial(self.failing.divide, facts, lambda each: writers[each.token])
        self.assertEqual(divide(), (facts, []))
        self.note_failure(3, writer=OTHER)
        begin(self.failing.request_skip(OTHER, Token(3)))
        (kept, (skipped,)) = divide()
        self.assertEqual(kept, [fact(2), fact(4)])
        self.assertEqual((skipped.key, skipped.error, skipped.state), ((OTHER, 3), "ValueError: no", SkipState.SKIPPED))
        self.assertEqual(self.failing.divide([fact(9)], lambda _: MASTER), ([fact(9)], []))

    def test_facts_that_a_writer_has_lost_are_forgotten(self) -> None:
        waiting: dict[tuple[InstanceName, int], list[Any]] = {}
        for line, (writer, token) in enumerate([(MASTER, 4), (MASTER, 5), (OTHER, 6)]):
            self.note_failure(token, writer=writer, line=InstanceName(str(line)))
            waiting[writer, token] = begin(self.failing.request_skip(writer, Token(token)))
            self.failing._failed.clear()
            begin(self.failing.request_retry(self.skipped(token + 10, writer)))
        self.failing.went_back(MASTER, Token(14))
        self.assertEqual(waiting, {(MASTER, 4): [], (MASTER, 5): [], (OTHER, 6): []})
        self.assertEqual([*self.failing._retries], [(MASTER, 14), (OTHER, 16)])
        self.failing.went_back(MASTER, Token(4))
        self.assertEqual(str(error_of(waiting[MASTER, 5])), "master went back to 4, and has lost fact 5")
        self.assertEqual((waiting[MASTER, 4], waiting[OTHER, 6]), ([], []))
        self.assertEqual(self.failing._skips, {(MASTER, 4), (OTHER, 6)})
        self.assertEqual([*self.failing._retries], [(OTHER, 16)])

    def test_a_retry_is_that_of_its_writer(self) -> None:
        begin(self.failing.request_retry(self.skipped(5, OTHER)))
        self.assertIsNone(self.failing.retry_of(MASTER))
        again = self.failing.retry_of(OTHER)
        assert again is not None
        self.assertEqual((again.skipped.key, again.after), ((OTHER, 5), 4))

    def test_skips_are_counted_by_writer_and_a_retry_takes_one_back(self) -> None:
        with logged():
            self.failing.committed(LINE, [self.skipped(2), self.skipped(3), self.skipped(4, OTHER)], 3)
            begin(self.failing.request_retry(self.skipped(2)))
            again = self.failing.retry_of(MASTER)
            assert again is not None
            self.failing.end_retry(again, None)
        self.assertEqual(self.failing.skipped_total, {MASTER: 2, OTHER: 1})
        self.assertEqual(self.failing.counts, {MASTER: 1, OTHER: 1})
        self.assertIsNone(self.failing.retry_of(MASTER))

    def test_a_pause_ends_with_its_time_or_with_a_request(self) -> None:
        ended = [begin(self.failing.pause(line, seconds)) for line, seconds in ((MASTER, 1.0), (OTHER, 9.0))]
        self.clock.advance(1.0)
        self.assertEqual(ended, [[None], []])
        self.failing.wake()
        self.assertEqual(ended, [[None], [None]])
        self.assertEqual(self.clock.getDelayedCalls(), [])
