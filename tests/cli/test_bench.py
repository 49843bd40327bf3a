"""The command line of ``replication bench``."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from replication.bench import SCENARIOS
from replication.bench.series import BenchOptions, Result
from replication.cli import bench, main
from tests.bench.scenarios import run_bench


class CommandLineTests(SynchronousTestCase):
    def test_every_scenario_runs_if_none_is_named(self) -> None:
        """Each, in the order in which --help lists them; but Spark's only where it is installed."""
        ran: list[str] = []

        def measure(scenarios: list[str], options: BenchOptions) -> list[Result]:
            self.assertEqual(options, BenchOptions(5, quick=False))
            ran.extend(scenarios)
            return []

        for has_spark in (True, False):
            ran.clear()
            with (
                mock.patch.object(bench, "run", measure),
                mock.patch.object(bench, "has_spark", mock.Mock(return_value=has_spark)),
            ):
                self.assertEqual(run_bench()[0], 0)
            self.assertEqual(ran, [each for each in SCENARIOS if has_spark or each != "replay"])

    def test_table(self) -> None:
        """Without --json, the first line describes the machine, and each further line is a result."""
        status, out, _ = run_bench("--quick", "--rounds", "2", "ids")
        first, *lines = out.splitlines()
        self.assertEqual(status, 0)
        self.assertIn("python ", first)
        self.assertEqual(len(lines), 6)
        self.assertRegex(lines[0], r"^ids +1 outstanding +pairs +[0-9,]+ pairs/s +spread \d+%$")

    def test_times(self) -> None:
        """It multiplies the work of a round, except with --quick."""
        with mock.patch.object(bench, "run", return_value=[]) as run:
            self.assertEqual(run_bench("--times", "10", "--rounds", "1", "replay")[0], 0)
        options = run.call_args.args[1]
        self.assertEqual((options, options.size(300, 2)), (BenchOptions(1, quick=False, times=10), 3_000))
        self.assertEqual(BenchOptions(1, quick=True, times=10).size(300, 2), 2)

    def test_against_a_broker(self) -> None:
        """Both scenarios by default; the first line has the version of the broker."""
        with (
            mock.patch.object(bench, "compare", return_value=[]) as compare,
            mock.patch.object(bench, "version_of", return_value="7.0.15"),
        ):
            status, out, _ = run_bench("--against", "redis", "--rounds", "2")
        self.assertEqual((status, out.count("\n")), (0, 1))
        self.assertTrue(out.endswith(", redis 7.0.15\n"), out)
        compare.assert_called_once_with(("fanout", "latency"), "redis", BenchOptions(2, quick=False))

    def test_against_a_broker_that_is_missing(self) -> None:
        """One line has the cure, and the status is 1."""
        err = io.StringIO()
        with mock.patch.object(shutil, "which", return_value=None), redirect_stderr(err):
            self.assertEqual(main.main(["bench", "--against", "nats"]), 1)
        self.assertEqual(
            err.getvalue(),
            "replication bench: nats-server is missing: apt-get install nats-server, or put nats-server on the PATH\n",
        )

    def test_a_plot_that_cannot_be_written_fails_at_once(self) -> None:
        err = io.StringIO()
        with mock.patch.object(bench, "run") as run, redirect_stderr(err):
            self.assertEqual(main.main(["bench", "--plot", "no/such/folder.svg", "scale"]), 1)
        self.assertIn("no/such/folder.svg", err.getvalue())
        run.assert_not_called()

    def test_wrong_usage(self) -> None:
        """One line names the culprit, and the status is 2."""
        for arguments, culprit in (
            (["spark"], "spark"),
            (["ids", "--quick", "spark"], "no scenario 'spark'"),
            (["--times", "0"], "0 is not 1 or more"),
            (["--against", "kafka"], "kafka"),
            (["--against", "redis", "fanout", "ids"], "--against measures fanout and latency, not ids"),
            (["--plot", "FILE", "ids"], "--plot draws the figures of scale, which is not measured"),
            (["--plot", "FILE", "--against", "redis"], "--plot draws the figures of scale, which is not measured"),
            (["-x"], "-x"),
        ):
            with self.subTest(arguments):
                status, out, err = run_bench(*arguments)
                self.assertEqual((status, out, err.count("\n")), (2, "", 1))
                self.assertIn(culprit, err)
