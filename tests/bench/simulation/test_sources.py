"""The catch-up sources of a simulated worker."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.world import World


class PageTests(SynchronousTestCase):
    def test_pages_wait_fail_and_arrive(self) -> None:
        with World() as world:
            (master,), copy = world.masters.values(), world.workers["copy"]
            copy.pages_held = True
            master.append("a", world.rows(1, size=300))  # no line holds it
            world.turn()
            world.page_requests[0].fail("502")
            world.advance(1.0)
            self.assertEqual(copy.position(*next(iter(copy.applied))), 1)
            copy.pages_held = False
            world.page_requests[0].deliver_answer()
            world.converge()
