"""``replication bench --against`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase, require


class AgainstTests(ScenarioTestCase):
    def test_a_fan_out_has_both_values_and_the_ratios(self) -> None:
        """Every connection receives every row, or there would be no figure."""
        require("redis")
        found = self.variants("fanout", "--against=redis")
        self.assertEqual(found, {"10 connections, ours", "10 connections, redis"})
        values = {(each["variant"], each["metric"]): each["value"] for each in self.results}
        ours, theirs = values["10 connections, ours", "deliveries"], values["10 connections, redis", "deliveries"]
        self.assertAlmostEqual(values["10 connections, ours", "ratio to redis"], ours / theirs)

    def test_a_latency_has_both_values_and_the_ratios(self) -> None:
        require("nats")
        found = self.variants("latency", "--against=nats")
        sides = ("ours, since append", "ours, since commit", "nats, since publish")
        self.assertEqual(found, {f"200 facts/s, {side}" for side in sides})
        values = {(each["variant"], each["metric"]): each["value"] for each in self.results}
        ours, theirs = values[f"200 facts/s, {sides[0]}", "p50"], values[f"200 facts/s, {sides[2]}", "p50"]
        self.assertAlmostEqual(values[f"200 facts/s, {sides[0]}", "ratio to nats, p50"], theirs / ours)
        self.assertGreater(ours, values[f"200 facts/s, {sides[1]}", "p50"])
