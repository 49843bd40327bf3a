"""A world of masters and workers."""

from __future__ import annotations

import random

from twisted.trial.unittest import SynchronousTestCase

import replication.follower.relay
from replication.bench.simulation.world import World
from replication.streams.cursor import Cursor


class WorldTests(SynchronousTestCase):
    def test_facts_reach_every_worker(self) -> None:
        with World() as world:
            (master,) = world.masters.values()
            master.append("a", world.rows(1, 2))
            world.turn()
            self.assertEqual([*world.lags()], [])
            world.check_quiet(2.0)
            world.workers["copy"].kill()
            master.append("a", world.rows(1))
            world.turn()
            self.assertIn("copy has a of master at 3 of 4", [*world.lags()])
            self.assertRaisesRegex(AssertionError, "I10", world.converge, 1.0)
            world.heal()
            self.assertLess(world.converge(), 5.0)
            master.append("a", world.rows(1))
            self.assertRaisesRegex(AssertionError, "I11", world.check_quiet, 1.0)

    def test_nothing_is_left_changed(self) -> None:
        before = random.getstate()
        with World(seed=7):
            self.assertIsNot(vars(replication.follower.relay)["Cursor"], Cursor)
        self.assertEqual(random.getstate(), before)
        self.assertIs(vars(replication.follower.relay)["Cursor"], Cursor)

    def test_a_check_that_fails_in_a_callback_is_not_lost(self) -> None:
        with World() as world:
            world.failures.append("a check has failed")
            self.assertRaisesRegex(AssertionError, "a check has failed", world.check)
