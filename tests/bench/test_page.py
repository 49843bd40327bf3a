"""``replication bench page`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class PageTests(ScenarioTestCase):
    def test_viewers_and_starts_have_figures(self) -> None:
        viewers = {f"{count} viewers, {pace}" for count in (0, 2, 20) for pace in ("200 facts/s", "1 fact/s")}
        starts = {"a master with the page", "a master without it"}
        self.assertEqual(self.variants("page"), {*viewers, *starts})
