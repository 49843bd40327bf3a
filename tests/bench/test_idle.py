"""``replication bench idle`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class IdleTests(ScenarioTestCase):
    def test_costs_are_told(self) -> None:
        """A worker at rest, quiet connections and a peer that never reads cost something, or nothing."""
        self.measure("idle")
        self.assertEqual([each["unit"] for each in self.results], ["cores", "bytes", "bytes"])
