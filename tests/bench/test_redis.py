"""``replication bench redis`` at a tiny size."""

from __future__ import annotations

from unittest.mock import patch

from replication.bench import redis
from tests.bench.scenarios import ScenarioTestCase


class RedisTests(ScenarioTestCase):
    @patch.object(redis, "RATE", 1_000)  # on a busy machine, a worker may receive less than half of 10,000 RDATA/s
    def test_every_kind_of_worker_has_a_figure(self) -> None:
        kinds = ("followed", "not followed", "applied by a function")
        self.assertEqual(self.variants("redis"), {f"1,000 RDATA/s, {kind}" for kind in kinds})
