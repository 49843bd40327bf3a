"""The simulated clock."""

from __future__ import annotations

from twisted.internet.error import AlreadyCalled, AlreadyCancelled
from twisted.internet.interfaces import IDelayedCall
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from replication.bench.simulation.clock import SimulatedClock, Timer


class ClockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = SimulatedClock()
        self.called: list[str] = []

    def later(self, delay: float, name: str) -> Timer:
        return Timer(self.clock, self.clock.now + delay, self.called.append, (name,), {}, self)

    def run_at(self, now: float) -> list[str]:
        self.clock.now = now
        self.clock.run_due()
        return self.called

    def test_the_timers_of_an_owner_are_those_that_are_still_to_come(self) -> None:
        called, moved, cancelled = (self.later(delay, "mine") for delay in (1, 2, 3))
        Timer(self.clock, 5.0, self.called.append, ("other",), {}, "another owner")
        self.run_at(1)
        moved.reset(9)
        cancelled.cancel()
        self.assertFalse(called.active())
        self.assertEqual(self.clock.timers_of(self), [moved])

    def test_calls_come_in_the_order_of_their_times_then_of_their_making(self) -> None:
        for delay, name in ((2, "c"), (1, "a"), (1, "b"), (9, "d")):
            self.later(delay, name)
        self.assertEqual(self.clock.next_time(), 1)
        self.assertEqual(self.run_at(2), ["a", "b", "c"])
        self.assertFalse(self.clock.run_due())

    def test_a_call_is_cancelled_moved_and_ends_once(self) -> None:
        timer, other = self.later(1, "a"), self.later(1, "b")
        verifyObject(IDelayedCall, timer)
        other.cancel()
        self.assertRaises(AlreadyCancelled, other.cancel)
        timer.delay(2)
        self.assertEqual((timer.getTime(), self.run_at(2)), (3, []))
        timer.reset(4)
        self.assertEqual(self.run_at(5), [])
        self.assertTrue(timer.active())
        self.assertEqual(self.run_at(6), ["a"])
        self.assertRaises(AlreadyCalled, timer.reset, 1)
        self.assertIsNone(self.clock.next_time())
