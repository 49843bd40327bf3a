"""``python -m replication`` is ``replication``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import replication

CHECKOUT = Path(__file__).parent.parent


def test_python_m_replication_runs_a_command() -> None:
    command = [sys.executable, "-m", "replication", "--version"]
    done = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True)
    assert done.stdout == f"replication {replication.__version__}\n"
