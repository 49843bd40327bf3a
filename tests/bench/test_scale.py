"""``replication bench scale`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase


class ScaleTests(ScenarioTestCase):
    def test_every_size_has_a_figure(self) -> None:
        databases = {"SQLite, 20 streams", *(["PostgreSQL, 20 streams"] if find_binaries() else [])}
        ids = {f"{number} open IDs" for number in ("1", "1,000", "100,000")}
        self.assertEqual(self.variants("scale"), {*databases, "20 connections", *ids})
