"""``replication bench ids`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class IdsTests(ScenarioTestCase):
    def test_every_number_of_outstanding_ids_has_a_figure(self) -> None:
        """With 1, 100 and 10,000 IDs outstanding."""
        self.assertEqual(self.variants("ids"), {"1 outstanding", "100 outstanding", "10,000 outstanding"})
