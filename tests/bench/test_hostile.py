"""``replication bench hostile`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class HostileTests(ScenarioTestCase):
    def test_every_attack_has_a_figure(self) -> None:
        attacks = {"20 garbage connections at once", "20 half-open connections"}
        endless = {"a peer that never reads", "a peer that reconnects at once"}
        self.assertEqual(self.variants("hostile"), {"quiet", *attacks, *endless})
