"""Tests of the package's door."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["segments", "archive", "run", "history", "job", "datasource"])
def test_what_sparks_workers_import_brings_no_twisted(module: str) -> None:
    code = f"import sys, replication.replay.{module}; print('twisted' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "No module named 'py" in said.stderr:
        pytest.skip("pip install '.[spark]' in the checkout")
    assert said.stdout == "False\n", said.stderr


def test_segments_can_be_read_where_nothing_is_installed_but_ourselves() -> None:
    code = (
        "import sys\n"
        "for name in ('pyspark', 'pyarrow', 'numpy', 'zstandard', 'adbc_driver_sqlite'): sys.modules[name] = None\n"
        "import replication.replay.segments, replication.replay.run, replication.replay.job"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
