"""Running ``replication bench`` at a tiny size."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from replication.bench.brokers import find_broker
from replication.bench.cluster import find_binaries
from replication.bench.processes import BenchError
from replication.cli import bench

KEYS = {"scenario", "variant", "metric", "value", "unit", "rounds", "spread"}
RATES = {
    f"{each}/s"
    for each in ("transactions", "pairs", "lines", "rows", "deliveries", "facts", "bytes", "queries", "requests")
}
UNITS = RATES | {"s", "cores", "bytes", "x"}


def run_bench(*arguments: str) -> tuple[int | str | None, str, str]:
    """Return the exit status and what was printed, on standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status: int | str | None = bench.main(arguments)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


def require(broker: str) -> None:
    """Without the program of a broker the test is skipped, but on CI it fails."""
    try:
        find_broker(broker)
    except BenchError as error:
        if os.environ.get("CI"):
            raise
        raise SkipTest(str(error)) from error


class ScenarioTestCase(SynchronousTestCase):
    """Real processes, sockets and databases, and no figure asserted."""

    def measure(self, scenario: str, *options: str) -> list[float]:
        """Run one scenario in a folder of its own, check what is true of all, and return the values."""
        folder = Path(self.mktemp())
        folder.mkdir(parents=True)
        self.patch(tempfile, "tempdir", str(folder))
        status, out, err = run_bench("--json", "--quick", "--rounds", "1", *options, scenario)
        self.assertEqual((status, err if find_binaries() else ""), (0, ""))
        report = json.loads(out)
        self.assertEqual(set(report), {"machine", "results"})
        for result in report["results"]:
            self.assertEqual(set(result), KEYS)
            self.assertEqual((result["scenario"], result["rounds"], result["spread"]), (scenario, 1, 0.0))
            self.assertIn(result["unit"], UNITS)
            self.assertIsInstance(result["value"], float)
        self.assertEqual(list(folder.iterdir()), [], "the databases are removed")
        self.assertEqual(multiprocessing.active_children(), [], "the processes are ended")
        self.results = report["results"]
        return [result["value"] for result in self.results]

    def variants(self, scenario: str, *options: str) -> set[str]:
        """Run one scenario whose figures are all above zero, and return its variants."""
        for value in self.measure(scenario, *options):
            self.assertGreater(value, 0)
        return {result["variant"] for result in self.results}
