"""docs/performance.md has every scenario of ``replication bench``, and figures of none that there is not."""

from __future__ import annotations

import re

from replication.bench import SCENARIOS
from tests.docs.pages import code, page, table, tables

PAGE = page("performance.md")


def test_every_scenario_is_described() -> None:
    assert [code(row["scenario"])[0] for row in table(PAGE, "## Scenarios")] == list(SCENARIOS)


def test_figures_are_of_scenarios_that_their_command_runs() -> None:
    run = {
        name
        for command in re.findall(r"^    replication bench --rounds \d (.*)$", PAGE, re.MULTILINE)
        for name in command.split()
    }
    shown = {code(row["scenario"])[0] for found in tables(PAGE) for row in found if "by the clock" in row}
    assert shown <= run <= {*SCENARIOS}
