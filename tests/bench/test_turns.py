"""The turns of a reactor, measured."""

from __future__ import annotations

import time
from types import SimpleNamespace

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.turns import LONG, Turns


class TurnsTests(SynchronousTestCase):
    def test_a_long_turn_is_counted_and_short_ones_are_not(self) -> None:
        def iterate(delay: float | None) -> None:
            end = time.thread_time() + (delay or 0.0)
            while time.thread_time() < end:
                pass

        reactor = SimpleNamespace(doIteration=iterate)
        turns = Turns(reactor)
        reactor.doIteration(0.0)
        self.assertEqual(turns.in_long, 0.0)
        reactor.doIteration(2 * LONG)
        self.assertGreaterEqual(turns.longest, 2 * LONG)
        self.assertEqual(turns.in_long, turns.longest)
        turns.begin()
        self.assertEqual((turns.longest, turns.in_long), (0.0, 0.0))
