"""The command line of ``replication simulate``."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.run import Plan
from replication.bench.simulation.seeds import Failed, Totals
from replication.cli import simulate
from replication.streams.cursor import Cursor


def run_command(*arguments: str) -> tuple[int | str | None, str, str]:
    """Return the exit status and what was printed, on standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status: int | str | None = simulate.main(arguments)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()


class CommandLineTests(SynchronousTestCase):
    def test_one_seed_prints_its_trace(self) -> None:
        status, out, _ = run_command("--seed", "3", "--world", "copy")
        *trace, last = out.splitlines()
        self.assertEqual(status, 0)
        self.assertRegex(last, r"^no failure: \d+ steps, \d+ facts, [\d.]+ simulated s$")
        self.assertIn("1 master -> copy: SERVER simulated", trace)
        self.assertTrue(any(line.startswith('---- ["heal",') for line in trace))

    def test_a_plan_that_fails_prints_why(self) -> None:
        with mock.patch.object(Cursor, "step", lambda self: None):
            status, out, _ = run_command("--plan", '[1,"copy",[["append",0,[[1,0]],true],["heal",1.0]]]')
        self.assertEqual(status, 1)
        self.assertIn("\nfailure: AssertionError: I10: ", out)

    def test_a_failure_prints_the_command_that_repeats_it(self) -> None:
        failed = Failed(7, "I10: wrong", 9, Plan(7, "copy", [["kill", 1, True, 0]]))
        with mock.patch.object(simulate, "run_seeds", return_value=[(Totals(7), failed)]) as run_seeds:
            status, out, _ = run_command("--seeds", "10", "--from", "5", "--jobs", "2", "--world", "copy")
        self.assertEqual(run_seeds.call_args.args, (range(5, 15), 2, "copy"))
        self.assertEqual(status, 1)
        self.assertEqual(
            out.splitlines(),
            [
                "seed 7 fails: I10: wrong",
                "repeat it: replication simulate --seed 7 --world copy",
                '1 of 9 steps fail too: replication simulate --plan \'[7,"copy",[["kill",1,true,0]]]\'',
            ],
        )

    def test_a_long_failure_is_cut(self) -> None:
        failed = Failed(7, "I1: " + 1000 * "x", 9, Plan(7, "copy", []))
        with mock.patch.object(simulate, "run_seeds", return_value=[(Totals(7), failed)]):
            _, out, _ = run_command()
        self.assertEqual(out.splitlines()[0], "seed 7 fails: I1: " + 195 * "x" + "…")

    def test_many_seeds_print_totals(self) -> None:
        with (
            mock.patch.object(simulate, "run_seeds", return_value=[(Totals(100), None), (Totals(200), None)]),
            mock.patch.object(simulate, "REPORT_EVERY", 0.0),
        ):
            status, out, _ = run_command("--seeds", "200")
        self.assertEqual(status, 0)
        self.assertRegex(out, r"^after 0 s: 100 seeds.*\nafter 0 s: 200 seeds.*\nno failure in 0.0 s: 200 seeds")

    def test_wrong_usage(self) -> None:
        for arguments, culprit in (
            (["--seeds", "0"], "0 is not 1 or more"),
            (["--plan", "[1]"], "--plan"),
            (["--world", "flat"], "flat"),
            (["--seed", "1", "--plan", "[]"], "not allowed with"),
        ):
            with self.subTest(arguments):
                status, out, err = run_command(*arguments)
                self.assertEqual((status, out, err.count("\n")), (2, "", 1))
                self.assertIn(culprit, err)
