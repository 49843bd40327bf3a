"""``replication bench catchup`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from replication.spark.job import has_spark
from tests.bench.scenarios import ScenarioTestCase


class CatchupTests(ScenarioTestCase):
    def test_every_source_has_a_figure(self) -> None:
        """A new worker receives all facts from each source, or there would be no figure."""
        shared = {"PostgreSQL"} if find_binaries() else set()
        bulk = {"segments"} if has_spark() else set()
        self.assertEqual(self.variants("catchup"), {"HTTP", "database", *shared, *bulk})
