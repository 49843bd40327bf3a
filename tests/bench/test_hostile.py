"""``replication bench hostile`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class HostileTests(ScenarioTestCase):
    def test_every_attack_has_a_figure(self) -> None:
        attacks = {"20 garbage connections at once", "20 half-open connections"}
        endless = {"a peer that never reads", "a peer that reconnects at once"}
        self.measure("hostile")
        self.assertEqual({each["variant"] for each in self.results}, {"quiet", *attacks, *endless})
        for each in self.results:
            if each["metric"] != "CPU of turns over 4 ms":  # there may be none
                self.assertGreater(each["value"], 0, each)
