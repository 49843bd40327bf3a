"""``replication bench replay`` at a tiny size."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase
from tests.replay.sessions import need_spark


class ReplayTests(ScenarioTestCase):
    def test_every_database_and_compression_has_a_figure(self) -> None:
        """And a plain scan of the same table."""
        need_spark()
        databases = ("SQLite", "PostgreSQL") if find_binaries() else ("SQLite",)
        ways = ("plain scan", "none", "gzip", "zstd", "zstd, mapped", "zstd, one process", "a worker of Spark")
        self.assertEqual(self.variants("replay"), {f"{name}, {way}" for name in databases for way in ways})
