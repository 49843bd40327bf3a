"""Running ``replication bench`` at a tiny size."""

from __future__ import annotations

import io
import json
import multiprocessing
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.cluster import find_binaries
from replication.cli import bench

KEYS = {"scenario", "variant", "metric", "value", "unit", "rounds", "spread"}
RATES = {
    f"{each}/s" for each in ("transactions", "pairs", "lines", "rows", "deliveries", "facts", "queries", "requests")
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


class ScenarioTestCase(SynchronousTestCase):
    """Real processes, sockets and databases, and no figure asserted."""

    def measure(self, scenario: str) -> list[float]:
        """Run one scenario in a folder of its own, check what is true of all, and return the values."""
        folder = Path(self.mktemp())
        folder.mkdir(parents=True)
        self.patch(tempfile, "tempdir", str(folder))
        status, out, err = run_bench("--json", "--quick", "--rounds", "1", scenario)
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

    def variants(self, scenario: str) -> set[str]:
        """Run one scenario whose figures are all above zero, and return its variants."""
        for value in self.measure(scenario):
            self.assertGreater(value, 0)
        return {result["variant"] for result in self.results}
