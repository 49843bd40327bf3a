"""``replication bench redis`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class RedisTests(ScenarioTestCase):
    def test_every_kind_of_worker_has_a_figure(self) -> None:
        kinds = ("followed", "not followed", "applied by a function")
        self.assertEqual(self.variants("redis"), {f"10,000 RDATA/s, {kind}" for kind in kinds})
