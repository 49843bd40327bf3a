"""``replication bench decode`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class DecodeTests(ScenarioTestCase):
    def test_every_length_has_a_figure(self) -> None:
        """The function receives every row that was sent, or there would be no figure."""
        self.assertEqual(self.variants("decode"), {"84-byte lines", "167-byte lines"})
