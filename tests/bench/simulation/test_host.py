"""A host outlives its processes."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.world import World


class HostTests(SynchronousTestCase):
    def test_the_disk_is_there_after_a_kill_and_a_stop(self) -> None:
        with World() as world:
            for host in world.hosts:
                self.assertEqual(repr(host), host.name)
                host.kill()
                self.assertFalse(host.running)
                host.start()
            world.converge()
            for host in world.hosts:
                host.stop()
                self.assertTrue(host.stopping)
            world.advance(30.0)
            self.assertFalse(any(host.running for host in world.hosts))
            world.heal()
            world.converge()
