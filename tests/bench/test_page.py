"""``replication bench page`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class PageTests(ScenarioTestCase):
    def test_viewers_and_starts_have_figures(self) -> None:
        starts = {"a master with the page", "a master without it"}
        self.assertEqual(self.variants("page"), {"0 viewers, 200 facts/s", "2 viewers, 200 facts/s", *starts})
