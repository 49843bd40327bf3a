"""``replication bench decode`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class DecodeTests(ScenarioTestCase):
    def test_rows_are_counted(self) -> None:
        """Every row that was sent came to the function, or there would be no figure."""
        self.assertEqual(self.variants("decode"), {"84-byte lines", "167-byte lines"})
