"""Skip tests that need Spark."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from replication.spark import job


def need_spark() -> None:
    """Skip the test if Spark is not installed; in tox's environment `spark`, fail."""
    missing = [name for name in job.NEEDED if find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} not installed: pip install '.[spark]' in the checkout"
        if os.environ.get("TOX_ENV_NAME") == "spark":
            pytest.fail(why)
        pytest.skip(why)
