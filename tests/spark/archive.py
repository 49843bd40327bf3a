"""Write an archive of Spark's classes, with which Java starts Spark in half the CPU time: ``archive.py FILE``.

``tox.ini`` passes the archive to all tests of the environment ``spark``.  Java ignores an archive of another Java.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from replication.spark.job import open_session

if TYPE_CHECKING:
    from collections.abc import Iterable


def unchanged(batches: Iterable[object]) -> Iterable[object]:
    """Return the rows that come."""
    return batches


os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={sys.argv[1]} -Xlog:disable"
with open_session("local[1]") as spark:
    spark.range(9).mapInArrow(unchanged, "id long").selectExpr("id % 3 AS a").groupBy("a").count().collect()
