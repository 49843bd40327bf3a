"""Fixtures of the tests that do what a page says."""

from __future__ import annotations

import pytest

from tests.docs.performing import default_ports
from tests.spark.sessions import need_spark

__all__ = ["default_ports"]  # a fixture


@pytest.fixture
def spark_runs() -> None:
    """Skip a test, before it waits for ports, where Spark cannot run."""
    need_spark()
