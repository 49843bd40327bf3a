"""Tests of series, rates and the table."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.series import BenchOptions, Result, Sample, Series, Size, describe_machine, encode_result, rates


class SeriesTests(SynchronousTestCase):
    def test_median_and_spread(self) -> None:
        """The value is the median of the rounds, the spread (max - min) / median."""
        result = Series("v", "m", "rows/s", [3.0, 1.0, 2.0]).result("ids")
        self.assertEqual(result, Result("ids", "v", "m", 2.0, "rows/s", 3, 1.0))

    def test_zero_has_no_spread(self) -> None:
        """A series of zeros does not divide by zero."""
        self.assertEqual(Series("v", "m", "bytes", [0, 0]).result("idle").spread, 0.0)

    def test_rates(self) -> None:
        """Rates are per second of time and per CPU second."""
        wall, cpu = rates("v", "rows", BenchOptions(1, quick=True), Sample, 100, 2.0, 0.5)
        self.assertEqual((wall.values, cpu.values), ([50.0], [200.0]))

    def test_a_line_of_the_table_has_readable_units(self) -> None:
        """Times in ms, memory in KiB, CPU as a share of a core, ratios with two decimals."""
        for value, unit, encoded in (
            (0.0015, "s", "1.500 ms"),
            (2048, "bytes", "2.0 KiB"),
            (0.0019, "cores", "0.190% of a core"),
            (1234567.8, "rows/s", "1,234,568 rows/s"),
            (0.063, "x", "0.06 x"),
        ):
            self.assertIn(encoded, encode_result(Result("s", "v", "m", value, unit, 1, 0.0)))


class SizeTests(SynchronousTestCase):
    def test_a_size_is_a_variant(self) -> None:
        """In the table and in JSON it is a text."""
        for size, text in (
            (Size(10_000, "streams", "SQLite"), "SQLite, 10,000 streams"),
            (Size(1, "streams", "SQLite"), "SQLite, 1 stream"),
            (Size(20, "connections"), "20 connections"),
        ):
            result = Series(size, "m", "s", [2.0]).result("scale")
            self.assertEqual(result.as_dict()["variant"], text)
            self.assertIn(f"scale    {text} ", encode_result(result))


class MachineTests(SynchronousTestCase):
    def test_the_description_is_complete(self) -> None:
        """Everything that affects the figures."""
        described = describe_machine()
        self.assertEqual([*described], ["python", "platform", "cpu", "cores", "load", "twisted", "sqlite"])
        self.assertNotIn("", described.values())
