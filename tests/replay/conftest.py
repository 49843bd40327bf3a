"""One Spark session for all tests that need one: small, quiet, and as unkind as it can be made."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import ConfigError
from replication.replay import job
from tests.replay.sessions import need_spark

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


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Yield a SparkSession."""
    need_spark()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
        patch.setattr(job, "SESSION", {**job.SESSION, **SETTINGS})
        session = job.open_session(MASTER)
        try:
            opened = session.__enter__()
        except ConfigError as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield opened
        session.__exit__(None, None, None)
