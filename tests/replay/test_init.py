"""Tests of what the package imports, and what must be installed for it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import replication.replay


@pytest.mark.parametrize(
    "module", ["segments.files", "segments.archive", "segments.run", "segments.export", "spark.job", "spark.datasource"]
)
def test_modules_that_spark_workers_import_do_not_import_twisted(module: str) -> None:
    code = f"import sys, replication.{module}; print('twisted' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if re.search("No module named '(numpy|py)", run.stderr):
        pytest.skip("pip install '.[spark]' in the checkout")
    assert run.stdout == "False\n", run.stderr


def test_segments_are_readable_without_any_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('pyspark', 'pyarrow', 'numpy', 'zstandard', 'adbc_driver_sqlite'): sys.modules[name] = None\n"
        "import replication.segments.archive, replication.segments.run, replication.spark.job, replication.replay"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'replication\.replay' has no attribute 'nothing'"):
        replication.replay.nothing  # noqa: B018
