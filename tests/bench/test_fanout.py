"""``replication bench fanout`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class FanoutTests(ScenarioTestCase):
    def test_deliveries_are_counted(self) -> None:
        """Every line came to every connection, or there would be no figure."""
        self.assertEqual(self.variants("fanout"), {"1 connection", "10 connections", "100 connections"})
