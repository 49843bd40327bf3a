"""README.md is short, and its blocks do what they show."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from tests.docs.page_runner import PageRunner
from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_it_has_at_most_200_lines() -> None:
    assert len(README.splitlines()) <= 200


def test_every_block_does_what_it_shows(tmp_path: Path, default_ports: None) -> None:
    """The first command is typed without the virtual environment that it makes: tests have one."""
    first = re.search(r"venv/bin/(twistd .*)", README)
    assert first is not None
    with PageRunner(tmp_path) as runner:
        runner.run_command(first[1], [])
        runner.run(README)


def test_the_second_command_runs_all_tests() -> None:
    assert "`.ci/run`" in README
    assert (CHECKOUT / ".ci/run").stat().st_mode & 0o100


def test_this_machine_has_what_the_page_asks_for() -> None:
    assert shutil.which("curl"), "the tour uses curl: install it, as in `apt-get install curl`"
