"""The picture of ``--plot``: where lines and texts are."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw
from replication.bench.series import Result, Size

SVG = "{http://www.w3.org/2000/svg}"


def result(number: int, value: float, what: str = "SQLite", metric: str = "start", unit: str = "s") -> Result:
    return Result("scale", Size(number, "streams", what), metric, value, unit, 1, 0.0)


def charts_of(*results: Result) -> list[ET.Element]:
    return ET.fromstring(draw(results)).findall(f"{SVG}g")


def lines_of(chart: ET.Element) -> list[str]:
    """Return the paths of the measured lines."""
    return [each.get("d", "") for each in chart.findall(f"{SVG}path") if each.get("stroke-width")]


def texts_of(chart: ET.Element) -> list[str]:
    return ["".join(each.itertext()) for each in chart.findall(f"{SVG}text")]


class PlotTests(SynchronousTestCase):
    def test_both_axes_are_logarithmic(self) -> None:
        """Three decades across and two upwards; a point in the middle of an axis is at its geometric mean."""
        left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
        (chart,) = charts_of(result(10, 0.001), result(10_000, 0.1), result(1_000, 0.01))
        across = round(left + (right - left) * 2 / 3, 1)
        line = f"M{left}.0 {bottom}.0L{across} {(top + bottom) / 2}L{right}.0 {top}.0"
        self.assertEqual(lines_of(chart), [line])
        expected = ["10", "100", "1 k", "10 k", "1 ms", "10 ms", "100 ms", "SQLite", "start", "streams"]
        self.assertEqual(texts_of(chart), expected)

    def test_each_figure_has_a_chart_and_each_database_a_line_of_one_colour(self) -> None:
        first, second = charts_of(
            result(1, 2.0),
            result(1, 3.0, "PostgreSQL"),
            result(1, 5e6, "PostgreSQL", "rows < of all", "facts/s"),
        )
        self.assertEqual((len(lines_of(first)), len(lines_of(second))), (2, 1))
        colours = [[each.get("fill") for each in chart.findall(f"{SVG}circle")] for chart in (first, second)]
        self.assertEqual(colours[0][1:], colours[1])
        self.assertNotEqual(colours[0][0], colours[0][1])
        self.assertIn("rows < of all (facts/s)", texts_of(second))
        self.assertIn("10 M", texts_of(second))

    def test_a_dashed_line_shows_what_grows_in_proportion_to_the_size(self) -> None:
        """It begins at the smallest size; costs have one, and rates have none."""
        for unit, expected in (("s", 1), ("bytes", 1), ("facts/s", 0)):
            (chart,) = charts_of(result(1, 10.0, unit=unit), result(1_000, 10_000.0, unit=unit))
            dashed = [each.get("d", "") for each in chart.findall(f"{SVG}path") if each.get("stroke-dasharray")]
            self.assertEqual(len(dashed), expected)
            self.assertLessEqual({*dashed}, {*lines_of(chart)})

    def test_other_figures_are_left_out(self) -> None:
        """Those of other scenarios have no size, and a logarithmic axis has no zero."""
        other = Result("ids", "1 outstanding", "pairs", 5.0, "pairs/s", 1, 0.0)
        self.assertEqual(len(charts_of(other, result(10, 0.0), result(10, 1.0, metric="memory", unit="bytes"))), 1)
