"""One Spark session for all tests that need one, with settings that expose errors."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import ConfigError
from replication.spark import job
from tests.spark.sessions import need_spark

if TYPE_CHECKING:
    from collections.abc import Iterator

MASTER = "local[2,2]"  # two cores and two attempts per task; plain local[2] has one attempt
SETTINGS = {
    "spark.driver.memory": "512m",
    # Faster for a JVM that runs for a minute.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",  # else small data would be one partition
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
