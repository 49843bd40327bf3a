"""One Spark session for all tests that need one: small, quiet, and as unkind as it can be made."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import ConfigError
from replication.replay import job

if TYPE_CHECKING:
    from collections.abc import Iterator

MASTER = "local[2,2]"  # two cores, and each task is tried twice: plain local[2] never tries again
SETTINGS = {
    "spark.driver.memory": "512m",
    # A JVM that lives for a minute need not compile well.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",  # it would make one partition of small data
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2",
}


def need_spark() -> None:
    """Skip the test where Spark cannot run; fail where it must: in tox's `spark`, and without Java on CI."""
    missing = [name for name in job.NEEDED if find_spec(name) is None]
    if missing:
        why = f"{', '.join(missing)} not installed: pip install 'replication[spark]'"
        if os.environ.get("TOX_ENV_NAME") == "spark":
            pytest.fail(why)
        pytest.skip(why)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Yield a SparkSession."""
    need_spark()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
        patch.setattr(job, "QUIET", {**job.QUIET, **SETTINGS})
        session = job.open_session(MASTER)
        try:
            opened = session.__enter__()
        except ConfigError as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield opened
        session.__exit__(None, None, None)
