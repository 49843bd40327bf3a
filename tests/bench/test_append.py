"""``replication bench append`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class AppendTests(ScenarioTestCase):
    def test_facts_are_counted(self) -> None:
        """Appended in three ways, over Python and over HTTP."""
        self.assertEqual(len(self.variants("append")), 6)
