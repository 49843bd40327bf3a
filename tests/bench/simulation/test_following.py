"""A host with a worker."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.world import World


class WorkerTests(SynchronousTestCase):
    def test_a_function_raises_hangs_and_works_again(self) -> None:
        with World() as world:
            (master,), apply = world.masters.values(), world.workers["apply"]
            apply.raising.add("a")
            apply.hanging.add("a")
            master.append("a", world.rows(1))
            world.turn()
            self.assertEqual(len(apply.hung), 1)
            apply.hanging.clear()
            apply.hung.pop().callback(None)
            world.turn()
            self.assertTrue(any("a bug of the application" in each for each in world.lags()))
            world.heal()
            world.converge()
        self.flushLoggedErrors(ValueError)

    def test_a_call_of_wait_for_ends(self) -> None:
        with World() as world:
            copy = world.workers["copy"]
            late, reached = copy.wait_for("a", "master", 9, 1.0), copy.wait_for("a", "master", 2, 1.0)
            world.masters[next(iter(world.masters))].append("a", world.rows(1))
            world.turn()
            self.assertEqual((late.ended, reached.ended), (False, True))
            world.advance(1.0)
            self.assertTrue(late.ended)
