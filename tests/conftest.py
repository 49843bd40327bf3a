"""Hypothesis profiles: dev by default, ci on CI, matrix for each further Python, deep by hand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

from tests.postgres import postgres

__all__ = ["postgres"]  # a fixture

if TYPE_CHECKING:
    import pytest

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("matrix", settings.get_profile("ci"), max_examples=20)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the long tests be run at full size."""
    parser.addoption("--full", action="store_true", help="run the system tests at full size")
