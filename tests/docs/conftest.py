"""Fixtures of the tests that run the blocks of a page."""

from __future__ import annotations

import pytest

from tests.docs.page_runner import default_ports
from tests.spark.sessions import need_spark

__all__ = ["default_ports"]  # a fixture


@pytest.fixture
def spark_runs() -> None:
    """Skip a test, before it waits for ports, where Spark cannot run."""
    need_spark()
