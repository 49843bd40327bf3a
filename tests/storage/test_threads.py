"""One thread that runs functions in order."""

from __future__ import annotations

import threading
from unittest.mock import patch

from twisted.internet.defer import CancelledError
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.threads import SerialThread
from tests.storage.pump import Pump


class SerialThreadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.thread = SerialThread(self.pump, "thread of a test")
        self.addCleanup(lambda: self.pump.wait(self.thread.stop()))

    def test_work_runs_on_the_thread_and_its_result_arrives_on_the_reactors(self) -> None:
        done = self.thread.run(threading.current_thread)
        both = done.addCallback(lambda there: (there.name, threading.current_thread()))
        self.assertEqual(self.pump.wait(both), ("thread of a test", threading.current_thread()))

    def test_work_is_done_in_the_order_in_which_it_was_given(self) -> None:
        seen: list[int] = []
        for number in range(100):
            last = self.thread.run(seen.append, number)
        self.pump.wait(last)
        self.assertEqual(seen, list(range(100)))

    def test_a_system_without_threads_is_an_error_of_the_store_with_its_cure(self) -> None:
        with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            error = self.assertRaises(StoreError, SerialThread, self.pump, "another")
        self.assertIn("the system starts no thread for 'another': raise the limit", str(error))

    def test_an_exception_reaches_the_caller_and_the_thread_goes_on(self) -> None:
        self.assertRaises(ZeroDivisionError, self.pump.wait, self.thread.run(lambda: 1 // 0))
        self.assertEqual(self.pump.wait(self.thread.run(lambda: 7)), 7)

    def test_an_error_that_ends_the_thread_is_logged(self) -> None:
        """Without memory, a daemon ends by that: it stayed, live and without its database."""
        name = "thread without memory"
        with patch.object(Pump, "callFromThread", side_effect=MemoryError):
            SerialThread(self.pump, name).run(len, "")
            for each in threading.enumerate():
                if each.name == name:
                    each.join(10)
        self.assertEqual(len(self.flushLoggedErrors(MemoryError)), 1)

    def test_a_cancelled_call_ends_at_once_and_its_work_is_done(self) -> None:
        seen: list[int] = []
        gate = threading.Event()
        self.thread.run(gate.wait, 60)
        done = self.thread.run(seen.append, 1)
        done.cancel()
        self.failureResultOf(done, CancelledError)
        self.assertEqual(seen, [])
        gate.set()
        self.pump.wait(self.thread.run(lambda: None))
        self.assertEqual(seen, [1])

    def test_stop_waits_for_what_was_given_before(self) -> None:
        thread, seen = SerialThread(self.pump, "another"), list[int]()
        thread.run(seen.append, 1)
        self.pump.wait(thread.stop())
        self.assertEqual(seen, [1])
