"""The application's tasks that write facts."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.world import World
from replication.bench.simulation.writing import RollBackError


class JobTests(SynchronousTestCase):
    def test_what_is_acknowledged_is_committed_and_the_rest_is_not(self) -> None:
        with World() as world:
            (master,) = world.masters.values()
            kept, undone = master.write("a", world.rows(2), ["x"]), master.write("a", world.rows(1))
            world.turn()
            self.assertTrue(kept.open)
            kept.outcome.callback(None)
            undone.outcome.errback(RollBackError())
            master.append("a", world.rows(1))
            world.turn()
            self.assertTrue(kept.ended)
            self.assertTrue(undone.ended)
            self.assertEqual([*master.histories[kept.history.name.partition("/")[2]].committed], [2, 4])  # type: ignore[index]

    def test_a_false_acknowledgement_is_noticed(self) -> None:
        with World() as world:
            (master,) = world.masters.values()
            job = master.append("a", world.rows(1))
            world.turn()
            job.history.committed.clear()
            self.assertRaisesRegex(AssertionError, "acknowledged", job.succeeded)
