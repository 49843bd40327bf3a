"""What all tests share: Hypothesis profiles, servers as fixtures, and which tests plain ``pytest`` leaves out.

Hypothesis profiles: dev by default, ci on CI, matrix where an example takes longer, mutants for `tox -e mutants`,
deep by hand.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings

from tests.postgres import postgres
from tests.redis import redis
from tests.slow import left_out, name_of

__all__ = ["postgres", "redis"]  # fixtures

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=30,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("matrix", settings.get_profile("ci"), max_examples=20)
settings.register_profile("mutants", settings.get_profile("matrix"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for what a contributor's loop leaves out."""
    parser.addoption("--all", action="store_true", help="run the slow tests too, without naming them")
    parser.addoption("--full", action="store_true", help="run the system tests at full size")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is slow, unless it is named."""
    return collection_path in left_out(config) or None


def pytest_collection_finish() -> None:
    """Leave thousands of tests out of each garbage collection: they stay until the end."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List what was left out, and the commands that run it."""
    if slow := left_out(config):
        terminalreporter.write_line(f"left out, because slow: {' '.join(map(name_of, slow))}")
        terminalreporter.write_line("run one by its name, all of them by `pytest --all`, everything by `.ci/run`")
