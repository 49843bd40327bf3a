"""``replication bench fanout`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class FanoutTests(ScenarioTestCase):
    def test_every_number_of_connections_has_a_figure(self) -> None:
        """Every connection receives every line, or there would be no figure."""
        self.assertEqual(self.variants("fanout"), {"1 connection", "10 connections", "100 connections"})
