"""Waiting for one thing from several places, for what goes on without us, and only as long as we run."""

from __future__ import annotations

import gc

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.waiting import Waits, share, shield
from tests.doubles import begin, error_of, now


class ShareTests(SynchronousTestCase):
    def test_all_get_the_result_and_it_stays(self) -> None:
        original: Deferred[int] = Deferred()
        early = [begin(share(original)) for _ in range(2)]
        original.callback(7)
        self.assertEqual(early, [[7], [7]])
        self.assertEqual(now(share(original)), 7)
        self.assertEqual(now(original), 7)

    def test_who_cancels_gives_up_alone(self) -> None:
        original: Deferred[int] = Deferred()
        mine = share(original)
        cancelled, other = begin(mine), begin(share(original))
        mine.cancel()
        self.assertIsInstance(error_of(cancelled), CancelledError)
        self.assertFalse(original.called)
        original.callback(7)
        self.assertEqual(other, [7])

    def test_a_failure_goes_to_the_first_who_still_waits(self) -> None:
        original: Deferred[int] = Deferred()
        mine = share(original)
        cancelled, other = begin(mine), begin(share(original))
        mine.cancel()
        original.errback(ValueError("no"))
        self.assertIsInstance(error_of(cancelled), CancelledError)
        self.assertIsInstance(error_of(other), ValueError)

    def test_a_failure_for_which_nobody_waits_is_not_lost(self) -> None:
        original: Deferred[int] = Deferred()
        mine = share(original)
        begin(mine)
        mine.cancel()
        original.errback(ValueError("no"))
        del original, mine
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)


class ShieldTests(SynchronousTestCase):
    def test_the_work_goes_on_if_nobody_waits(self) -> None:
        gate: Deferred[None] = Deferred()
        done: list[str] = []

        async def work() -> str:
            await gate
            done.append("done")
            return "result"

        shielded = shield(work())
        outcome = begin(shielded)
        shielded.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        gate.callback(None)
        self.assertEqual(done, ["done"])

    def test_its_outcome_is_passed_on(self) -> None:
        async def work() -> int:
            return 7

        async def fails() -> int:
            raise ValueError("no")

        self.assertEqual(now(shield(work())), 7)
        self.assertIsInstance(error_of(begin(shield(fails()))), ValueError)


class WaitsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.waits = Waits(self.clock)

    def tearDown(self) -> None:
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_nap_takes_its_time(self) -> None:
        nap = begin(self.waits.nap(2.0))
        self.clock.advance(1.9)
        self.assertEqual(nap, [])
        self.clock.advance(0.1)
        self.assertEqual(nap, [None])

    def test_the_end_wakes_all_who_nap_and_leaves_no_timer(self) -> None:
        naps = [begin(self.waits.nap(seconds)) for seconds in (1.0, 2.0)]
        self.waits.end()
        self.assertEqual(naps, [[None], [None]])

    def test_after_the_end_nobody_falls_asleep(self) -> None:
        self.waits.end()
        self.assertEqual(begin(self.waits.nap(5.0)), [None])

    def test_the_end_cancels_what_is_waited_for(self) -> None:
        waiting: Deferred[int] = Deferred()
        outcome = begin(self.waits.add(waiting))
        self.waits.end()
        self.assertIsInstance(error_of(outcome), CancelledError)

    def test_what_was_fulfilled_before_is_left_alone(self) -> None:
        waiting: Deferred[int] = Deferred()
        outcome = begin(self.waits.add(waiting))
        waiting.callback(7)
        self.waits.end()
        self.assertEqual(outcome, [7])
        self.assertEqual(self.waits._under_way, set())

    def test_an_error_is_passed_on(self) -> None:
        waiting: Deferred[int] = Deferred()
        outcome = begin(self.waits.add(waiting))
        waiting.errback(Failure(ValueError("no")))
        self.assertIsInstance(error_of(outcome), ValueError)

    def test_waking_one_may_end_another(self) -> None:
        one: Deferred[int] = Deferred()
        two: Deferred[int] = Deferred()
        first = begin(self.waits.add(one).addErrback(lambda _: two.callback(7)))
        second = begin(self.waits.add(two))
        self.waits.end()
        self.assertEqual(first, [None])
        self.assertEqual(len(second), 1)
