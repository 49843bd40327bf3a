"""What the comparison of chaos calls lost, and what a loss may have taken."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import pytest

from tests.chaos.__main__ import read_result, report
from tests.chaos.comparison import Findings, lost_keys, twice
from tests.chaos.ledger import Append, LedgerFile, read_ledger
from tests.chaos.rounds import Totals
from tests.chaos.scene import Loss

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("done", "ids", "lost"),
    [
        (5.0, [9], {"k"}),  # acknowledged between the backup and the loss, and not in the backup
        (5.0, [2], set()),  # it is in the backup
        (0.5, [9], set()),  # acknowledged before the backup: it must be there
        (7.0, [9], set()),  # acknowledged after the loss
        (5.0, None, set()),  # not acknowledged
    ],
)
def test_a_loss_takes_only_what_was_acknowledged_since_the_backup(
    done: float, ids: list[int] | None, lost: set[str]
) -> None:
    loss = Loss("orders", 1.0, 7.0, frozenset({(2, 0, "master", '["a"]')}))
    assert lost_keys({"k": Append("k", 0.0, [[["a"]]], ids, done)}, [loss]) == lost


def test_what_occurs_again_is_found() -> None:
    assert twice(["a", "b", "a"]) == ["a"]


def test_a_ledger_outlives_a_line_that_was_not_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    LedgerFile(path).write("try", "k1", [[["a"]]])
    with path.open("a") as file:
        file.write('["done", "k1", 1.0, [')  # killed here
    ledger = LedgerFile(path)
    assert read_ledger(path)["k1"].ids is None
    ledger.write("done", "k1", [2])
    ledger.write("try", "k2", [[]])
    ledger.write("refused", "k2", "400")
    found = read_ledger(path)
    assert (found["k1"].ids, found["k1"].facts) == ([2], [[["a"]]])
    assert (found["k2"].ids, found["k2"].refused) == (None, "400")


@pytest.mark.parametrize("kind", ["lost", "twice", "diverged"])
def test_a_round_with_a_finding_has_failed_and_the_report_counts_it(kind: str) -> None:
    totals, findings = Totals(turns=1), Findings()
    findings.add(kind, "orders", ["a fact"])
    totals.kills["master"] = 3
    totals.add(Totals(findings=findings))
    assert not totals.good
    assert f"1 {kind}" in report(totals, 60.0)
    assert "3 kills" in report(totals, 60.0)
    assert Totals().good


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    totals = Totals(turns=2, slowest=1.5, errors=["late"], findings=Findings(lost=1, examples=["a"]))
    totals.kills["master"] += 1
    (tmp_path / "result").write_text(json.dumps(attrs.asdict(totals)))
    assert read_result(tmp_path / "result") == totals
