"""Tests of ``python -m replication.replay``."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_runs_the_command_replay() -> None:
    command = [sys.executable, "-m", "replication.replay", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "replication replay" in run.stdout
    assert "--segment-rows" in run.stdout
    refused = subprocess.run(command[:-1], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
