"""``replication bench replay`` at a tiny size."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase
from tests.spark.sessions import need_spark


class ReplayTests(ScenarioTestCase):
    def test_every_database_and_compression_has_a_figure(self) -> None:
        """A plain scan of the same table has one, too."""
        need_spark()
        databases = ("SQLite", "PostgreSQL") if find_binaries() else ("SQLite",)
        variants = ("plain scan", "none", "gzip", "zstd", "zstd, mapped", "zstd, one process", "a worker of Spark")
        self.assertEqual(self.variants("replay"), {f"{name}, {variant}" for name in databases for variant in variants})
