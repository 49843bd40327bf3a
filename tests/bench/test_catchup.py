"""``replication bench catchup`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from replication.replay.job import has_spark
from tests.bench.scenarios import ScenarioTestCase


class CatchupTests(ScenarioTestCase):
    def test_rows_are_counted(self) -> None:
        """A fresh worker gets the whole history from each source, or there would be no figure."""
        shared = {"PostgreSQL"} if find_binaries() else set()
        bulk = {"segments"} if has_spark() else set()
        self.assertEqual(self.variants("catchup"), {"HTTP", "database", *shared, *bulk})
