"""Whether Spark can run here."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from replication.replay import job


def need_spark() -> None:
    """Skip the test where Spark cannot run; fail where it must: in tox's `spark`, and without Java on CI."""
    missing = [name for name in job.NEEDED if find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} not installed: pip install '.[spark]' in the checkout"
        if os.environ.get("TOX_ENV_NAME") == "spark":
            pytest.fail(why)
        pytest.skip(why)
