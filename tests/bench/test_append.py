"""``replication bench append`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase


class AppendTests(ScenarioTestCase):
    def test_every_workload_has_a_figure(self) -> None:
        """Three workloads through Python and HTTP, and lines; on PostgreSQL four, and two of four writers."""
        shared = {each for each in self.variants("append") if each.startswith("PostgreSQL")}
        self.assertEqual(len({each["variant"] for each in self.results} - shared), 7)
        self.assertEqual(len(shared), 6 if find_binaries() else 0)
