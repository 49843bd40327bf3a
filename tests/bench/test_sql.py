"""``replication bench sql`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase


class SqlTests(ScenarioTestCase):
    def test_commits_of_others_and_a_master_at_rest(self) -> None:
        """Nothing is applied before it is committed, and a master at rest asks on."""
        values = self.measure("sql")
        if find_binaries():
            self.assertEqual([each["metric"] for each in self.results], ["p50", "p99", "CPU", "asked of the server"])
            self.assertLess(0, values[0])
            self.assertLessEqual(values[0], values[1])
        else:
            self.assertEqual(values, [])
