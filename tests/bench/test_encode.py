"""``replication bench encode`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class EncodeTests(ScenarioTestCase):
    def test_every_kind_of_row_has_a_figure(self) -> None:
        """Rows as objects and as JSON text, of two lengths."""
        self.assertEqual(len(self.variants("encode")), 4)
