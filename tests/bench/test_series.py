"""What is said of what was measured."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.series import Lap, Result, Series, rates, spell_result


class SeriesTests(SynchronousTestCase):
    def test_median_and_spread(self) -> None:
        """The value is the median of the rounds, the spread (max - min) / median."""
        result = Series("v", "m", "rows/s", [3.0, 1.0, 2.0]).result("ids")
        self.assertEqual(result, Result("ids", "v", "m", 2.0, "rows/s", 3, 1.0))

    def test_nothing_has_no_spread(self) -> None:
        """A series of zeros is no division by zero."""
        self.assertEqual(Series("v", "m", "bytes", [0, 0]).result("idle").spread, 0.0)

    def test_rates(self) -> None:
        """Things are counted by the clock on the wall, and by the processor's."""
        wall, cpu = rates("v", "rows", [Lap(100, 2.0, 0.5)])
        self.assertEqual((wall.values, cpu.values), ([50.0], [200.0]))

    def test_lines_of_the_table_have_units_for_people(self) -> None:
        """Times in ms, memory in KiB, CPU as a share of a core."""
        for value, unit, spelt in (
            (0.0015, "s", "1.500 ms"),
            (2048, "bytes", "2.0 KiB"),
            (0.0019, "cores", "0.190% of a core"),
            (1234567.8, "rows/s", "1,234,568 rows/s"),
        ):
            self.assertIn(spelt, spell_result(Result("s", "v", "m", value, unit, 1, 0.0)))
