"""Single cases of workers behind a relay; ``test_seeds.py`` has the random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.bench.simulation.disk import finish
from replication.storage.memory import MemoryStore
from tests.simulation.scenario import A, Scenario

if TYPE_CHECKING:
    from replication.bench.simulation.following import WorkerHost
    from replication.bench.simulation.world import World

WORKERS = {"relay": (None, ()), "copy": (None, ()), "apply": (None, ("a", "caches"))}


class RelayScenario(Scenario):
    def make_world(self, **what: Any) -> World:
        return super().make_world(workers=WORKERS, relays={"copy": "relay", "apply": "relay"}, **what)

    @property
    def relay(self) -> WorkerHost:
        return self.world.workers["relay"]

    def test_a_relay_with_an_empty_database_takes_no_follower_back(self) -> None:
        self.append(*[1] * 30)
        self.assert_well()
        self.relay.kill()
        self.relay.disk = MemoryStore()
        finish(self.relay.disk.open())
        self.relay.applied.clear()
        self.relay.pages_held = True
        self.relay.start()
        self.append(1)
        self.world.advance(3)
        self.assertEqual(self.sent_to(self.copy, "POSITION a")[-1].split()[-1], "1")  # of its first connection
        self.assertEqual(self.position(self.copy), 31)
        self.world.heal()
        self.assert_well(within=20.0)
        self.assertEqual(self.position(self.copy), 32)

    def test_no_follower_is_ahead_of_what_the_relay_has_stored(self) -> None:
        self.relay.store.held = True
        self.append(1, 2, 1)
        self.assertEqual((self.position(self.copy), self.position(self.relay)), (1, 1))
        while self.relay.store.waiting:
            self.relay.store.release(self.relay.store.waiting[0])
            self.world.turn()
            self.assertLessEqual(self.position(self.copy), self.position(self.relay))
        self.relay.store.release_all()
        self.assert_well()

    def test_a_page_that_is_missing_at_the_relay_comes_through_it(self) -> None:
        """A row that no line can hold is a gap at the master, and at the relay."""
        self.append(1, size=300)
        self.append(1)
        self.assert_well()
        self.assertEqual(len(self.copy.applied_by(A, self.master.name).facts), 2)
