"""``replication bench start`` at a tiny size."""

from __future__ import annotations

from replication.bench.start import VARIANTS
from tests.bench.scenarios import ScenarioTestCase


class StartTests(ScenarioTestCase):
    def test_daemons_and_commands_have_figures(self) -> None:
        self.assertEqual(self.variants("start"), set(VARIANTS))
