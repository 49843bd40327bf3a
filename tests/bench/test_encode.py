"""``replication bench encode`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class EncodeTests(ScenarioTestCase):
    def test_lines_are_counted(self) -> None:
        """From rows and from spelt rows, of two lengths."""
        self.assertEqual(len(self.variants("encode")), 4)
