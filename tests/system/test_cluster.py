"""The batch on a cluster, by the very commands that the README gives: executors are processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from replication.replay.history import Shape
from replication.replay.java import find_java
from replication.replay.run import Request, run_here
from tests.replay.histories import MASTER, OTHER, fact, write_database
from tests.replay.sessions import need_spark
from tests.system.daemons import CHECKOUT, environment
from tests.system.test_replay import contents

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = "local-cluster[2,1,1024]"  # two executors with a core each
FACTS = [fact(token, *[["row", token, index] for index in range(token % 4 + 1)]) for token in range(2, 2_000)]


def commands() -> str:
    """Return the README's."""
    page = (CHECKOUT / "README.md").read_text()
    found = re.search(r"```sh\n([^`]*spark-submit[^`]*)```", page)
    assert found is not None
    return found[1]


@pytest.mark.timeout(1200)
def test_the_readmes_commands_run_the_batch_on_a_cluster(tmp_path: Path) -> None:
    """Neither the driver nor an executor finds the package but in the zip."""
    need_spark()
    url = write_database(tmp_path / "m.db", {MASTER: FACTS[::2], OTHER: FACTS[1::2]})
    run_here(Request(url, str(tmp_path / "here"), shape=Shape(500)))
    (tmp_path / "replication").symlink_to(CHECKOUT / "replication")
    (tmp_path / "shims").mkdir()
    script = commands().replace("spark://HOST:7077", f"'{CLUSTER}'")
    script = script.replace("postgresql://USER@HOST/NAME", url).replace(
        "/mnt/shared/segments", "out --segment-rows 500"
    )
    settings = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": ""}
    java = {"JAVA_HOME": str(find_java(os.environ, tmp_path / "shims"))}
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
    assert re.fullmatch(r"out: \d+ rows in \d+ new segments, [\d.]+ s\n", out)
    assert err.count(" INFO ") < 10, err  # Spark says some lines before it reads its configuration
    assert contents(tmp_path / "out") == contents(tmp_path / "here")
