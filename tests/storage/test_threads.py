"""The lane: one thread, in order."""

from __future__ import annotations

import threading

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from replication.storage.threads import Lane
from tests.storage.pump import Pump


class LaneTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.lane = Lane(self.pump, "lane of a test")
        self.addCleanup(lambda: self.pump.wait(self.lane.stop()))

    def test_work_is_done_on_the_lanes_thread_and_its_result_comes_back_on_ours(self) -> None:
        done = self.lane.run(threading.current_thread)
        both = done.addCallback(lambda there: (there.name, threading.current_thread()))
        self.assertEqual(self.pump.wait(both), ("lane of a test", threading.current_thread()))

    def test_work_is_done_in_the_order_in_which_it_was_given(self) -> None:
        seen: list[int] = []
        for number in range(100):
            last = self.lane.run(seen.append, number)
        self.pump.wait(last)
        self.assertEqual(seen, list(range(100)))

    def test_what_the_work_raises_is_raised_to_whoever_waits_and_the_lane_goes_on(self) -> None:
        self.assertRaises(ZeroDivisionError, self.pump.wait, self.lane.run(lambda: 1 // 0))
        self.assertEqual(self.pump.wait(self.lane.run(lambda: 7)), 7)

    def test_a_cancelled_caller_hears_of_it_at_once_and_the_work_is_done_all_the_same(self) -> None:
        seen: list[int] = []
        gate = threading.Event()
        self.lane.run(gate.wait, 60)
        done = self.lane.run(seen.append, 1)
        done.cancel()
        self.failureResultOf(done, CancelledError)
        self.assertEqual(seen, [])
        gate.set()
        self.pump.wait(self.lane.run(lambda: None))
        self.assertEqual(seen, [1])

    def test_stop_waits_for_what_was_given_before(self) -> None:
        lane, seen = Lane(self.pump, "another"), list[int]()
        lane.run(seen.append, 1)
        self.pump.wait(lane.stop())
        self.assertEqual(seen, [1])
