"""A host outlives its processes."""

from __future__ import annotations

from itertools import pairwise

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.host import WALL_STEADY
from replication.bench.simulation.world import World
from replication.wire.grammar import InstanceName, StreamName


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

    def test_wall_clocks_differ_and_jump_and_come_from_the_seed(self) -> None:
        def shown(seed: int) -> list[tuple[float, ...]]:
            with World(seed=seed) as world:
                times = []
                for _ in range(6):
                    times.append(tuple(host.wall() for host in world.hosts))
                    world.advance(WALL_STEADY)
                return times

        first = shown(1)
        self.assertEqual(first, shown(1))
        self.assertNotEqual(first, shown(2))
        self.assertTrue(any(len(set(times)) > 1 for times in first), "hosts differ")
        self.assertTrue(any(later < earlier for earlier, later in pairwise(each[0] for each in first)), "one goes back")

    def test_a_power_loss_undoes_what_a_function_has_applied_but_no_copy(self) -> None:
        with World(workers={"copy": (None, ()), "apply": (None, ("a",))}) as world:
            master = world.masters[InstanceName("master")]
            master.append("a", world.rows(1, 1))
            world.turn()
            for power, left in ((False, 3), (True, 0)):
                for worker in world.workers.values():
                    worker.kill(power=power)
                self.assertEqual(
                    [each.position(StreamName("a"), InstanceName("master")) for each in world.workers.values()],
                    [3, left],
                )
                if not power:
                    world.heal()
            world.heal()
            world.converge()

    def test_a_backup_is_restored(self) -> None:
        """The facts after it are lost, and every follower goes back."""
        with World(workers={"copy": (None, ()), "apply": (None, ("a",))}, restores=True) as world:
            master = world.masters[InstanceName("master")]
            for host in world.hosts:
                host.restore()  # without a backup, nothing
                host.save()
            master.append("a", world.rows(1, 1))
            world.turn()
            self.assertEqual(master.published("a"), 4)
            master.restore()
            master.append("a", world.rows(1))
            world.heal()
            world.converge()
            self.assertEqual(master.published("a"), 3)
            for worker in world.workers.values():
                worker.restore()
            world.converge()
            self.assertEqual([*world.lags()], [])
