"""The alerts and the board in ``conf/`` use metrics that exist, and docs/how-to/monitor.md explains each alert."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

from replication.web.metrics import METRICS
from tests.docs.pages import code, page, table
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, append, until
from tests.system.test_skips import HTTP, follow, order, writer_of

if TYPE_CHECKING:
    from pathlib import Path

PROMETHEUS = CHECKOUT / "conf/prometheus"
BOARD = CHECKOUT / "conf/grafana/replication.json"
LATER = {
    *("cache_hits_total", "cache_misses_total", "certificate_expires_seconds", "connections_refused_total"),
    *("facts_skipped_total", "faults_total", "lost_and_found_total", "tls_failures_total"),
}
METRIC = re.compile(r"\breplication_(\w+)")


def rules() -> list[dict[str, Any]]:
    """Return the alerts of the file."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is missing: pip install '.[test]'")
    (group,) = yaml.safe_load((PROMETHEUS / "rules.yml").read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def expressions() -> list[str]:
    """Return every expression of the board."""
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run it; on CI a missing one is a failure."""
    if shutil.which("promtool") is None:
        cure = "promtool is missing: install Prometheus, such as Debian's package prometheus"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(cure)
    command = ["promtool", *arguments]
    return subprocess.run(command, input=given, cwd=PROMETHEUS, capture_output=True, text=True, check=False)


def test_each_alert_is_on_the_page_with_what_to_do() -> None:
    rows = table(page("how-to/monitor.md"), "## The alerts")
    assert [code(row["alert"])[0] for row in rows] == [rule["alert"] for rule in rules()]
    assert all(row["meaning"] and row["what to do"] for row in rows)


def test_each_metric_of_an_alert_exists() -> None:
    for rule in rules():
        used = METRIC.findall(rule["expr"])
        assert set(used) <= {*METRICS}, rule["alert"]
        assert used or "up{" in rule["expr"]
        for name in used:
            counted = re.search(rf"(?:rate|increase)\(replication_{name}\b", rule["expr"]) is not None
            assert counted == name.endswith("_total"), rule["alert"]


def test_each_metric_of_the_board_exists_and_counters_are_shown_as_rates() -> None:
    assert len(expressions()) > 15
    for expression in expressions():
        used = METRIC.findall(expression)
        assert used, expression
        assert set(used) <= {*METRICS}, expression
        for name in used:
            counted = re.search(rf"(?:rate|increase)\(replication_{name}\b", expression) is not None
            assert counted == (name.endswith("_total") or name == "position"), expression


def test_the_panels_of_the_board_do_not_overlap() -> None:
    panels = json.loads(BOARD.read_text(encoding="utf-8"))["panels"]
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels]
    assert len({*places}) == len(places) == len({each["id"] for each in panels})
    assert all(each["gridPos"]["x"] + each["gridPos"]["w"] <= 24 for each in panels)


@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml"), ("check", "config", "scrape.yml")],
)
def test_promtool_accepts_the_files(arguments: tuple[str, ...]) -> None:
    ran = promtool(*arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_running_daemons_have_the_metrics_and_promtool_accepts_them(tmp_path: Path) -> None:
    """Metrics that count what goes wrong, and those of caches and certificates, are there once that happens."""
    found: set[str] = set()
    with (
        Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master,
        Daemon(tmp_path, "worker", *follow(master), HTTP) as worker,
    ):
        append(master.address("HTTP"), "orders", [order()])
        until(lambda: writer_of(worker.address("HTTP")).get("position") == 2, "the worker has it")
        for each in (master, worker):
            with urlopen(f"http://{each.address('HTTP')}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            found.update(re.findall(r"^replication_(\w+?)[{ ]", text, re.MULTILINE))
            ran = promtool("check", "metrics", given=text)
            assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    used = {name for each in (*(rule["expr"] for rule in rules()), *expressions()) for name in METRIC.findall(each)}
    assert used - found <= LATER
    assert not found & LATER
