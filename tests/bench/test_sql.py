"""``replication bench sql`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase


class SqlTests(ScenarioTestCase):
    def test_commits_and_an_idle_master_have_figures(self) -> None:
        """No row is applied before its commit, and an idle master keeps polling."""
        values = self.measure("sql")
        if find_binaries():
            self.assertEqual([each["metric"] for each in self.results], ["p50", "p99", "CPU", "sent to the server"])
            self.assertLess(0, values[0])
            self.assertLessEqual(values[0], values[1])
        else:
            self.assertEqual(values, [])
