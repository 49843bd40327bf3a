"""``replication bench idle`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class IdleTests(ScenarioTestCase):
    def test_every_cost_has_a_figure(self) -> None:
        """An idle worker, quiet connections, and a peer that never reads."""
        self.measure("idle")
        self.assertEqual([each["unit"] for each in self.results], ["cores", "bytes", "bytes"])
