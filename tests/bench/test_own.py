"""``replication bench own`` at a tiny size."""

from __future__ import annotations

from replication.bench.cluster import find_binaries
from replication.bench.own import AT_ONCE
from tests.bench.scenarios import ScenarioTestCase


class OwnTests(ScenarioTestCase):
    def test_each_way_is_measured_beside_the_bare_driver(self) -> None:
        kinds = ["SQLite", "PostgreSQL"] if find_binaries() else ["SQLite"]
        ways = ["bare", "run_interaction", "reserve"]
        expected = {f"{kind}, {callers} at once, {way}" for kind in kinds for callers in AT_ONCE for way in ways}
        self.assertEqual(self.variants("own"), expected)
        ratios = {each["variant"] for each in self.results if each["unit"] == "x"}
        self.assertEqual(ratios, {each for each in expected if not each.endswith("bare")})
