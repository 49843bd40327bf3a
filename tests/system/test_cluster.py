"""The replay on a cluster with separate executors, by the commands of docs/spark.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.spark import job
from replication.spark.java import find_java
from tests.segments.histories import MASTER, OTHER, fact, write_database
from tests.spark.sessions import need_spark
from tests.system.daemons import CHECKOUT, environment
from tests.system.test_replay import contents

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = "local-cluster[1,1,1024]"  # one executor with one core
FACTS = [fact(token, *[["row", token, index] for index in range(token % 4 + 1)]) for token in range(2, 2_000)]


def commands() -> str:
    """Return the commands of the page."""
    page = (CHECKOUT / "docs" / "spark.md").read_text()
    found = re.search(r"```sh\n([^`]*spark-submit[^`]*)```", page)
    assert found is not None
    return found[1]


@pytest.mark.timeout(1200)
def test_the_commands_of_the_page_run_the_replay_on_a_cluster(tmp_path: Path) -> None:
    """Driver and executors find the package only in the zip."""
    need_spark()
    url = write_database(tmp_path / "m.db", {MASTER: FACTS[::2], OTHER: FACTS[1::2]})
    run_in_process(ReplayRequest(url, str(tmp_path / "here"), options=SegmentOptions(500)))
    (tmp_path / "replication").symlink_to(CHECKOUT / "replication")
    (tmp_path / "shims").mkdir()
    script = commands().replace("spark://HOST:7077", f"'{CLUSTER}'")
    script = script.replace("postgresql://USER@HOST/NAME", url).replace(
        "/mnt/shared/segments", "out --segment-rows 500"
    )
    settings = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""}
    java = {
        "JAVA_HOME": str(find_java(os.environ, tmp_path / "shims")),
        "JDK_JAVA_OPTIONS": " ".join(
            [job.SESSION["spark.driver.extraJavaOptions"], os.environ.get("SPARK_SUBMIT_OPTS", "")]
        ),
    }
    process = subprocess.Popen(
        ["bash", "-ec", script],
        cwd=tmp_path,
        env={**environment(), **settings, **java},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    *progress, last = out.splitlines()  # spark-submit sends the driver's standard error there, too
    assert re.fullmatch(r"out: \d+ rows in \d+ new segments, [\d.]+ s", last)
    assert all(line.startswith("replication replay: ") for line in progress)
    assert err.count(" INFO ") < 10, err  # Spark logs some lines before it reads its configuration
    assert contents(tmp_path / "out") == contents(tmp_path / "here")
