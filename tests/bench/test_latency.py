"""``replication bench latency`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase


class LatencyTests(ScenarioTestCase):
    def test_quantiles_ascend(self) -> None:
        """No fact is applied before it is complete."""
        values = self.measure("latency")
        database_kinds = 2 if find_binaries() else 1
        self.assertEqual([each["metric"] for each in self.results], ["p50", "p99", "p99.9"] * database_kinds)
        for start in range(0, len(values), 3):
            self.assertEqual(values[start : start + 3], sorted(values[start : start + 3]))
            self.assertGreater(values[start], 0)
