"""``replication bench latency`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class LatencyTests(ScenarioTestCase):
    def test_quantiles_ascend(self) -> None:
        """No fact is applied before it is complete, and quantiles do not descend."""
        values = self.measure("latency")
        self.assertEqual([each["metric"] for each in self.results], ["p50", "p99", "p99.9"])
        self.assertEqual(values, sorted(values))
        self.assertGreater(values[0], 0)
