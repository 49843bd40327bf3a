"""A master is a process that writes, and nothing else."""

from __future__ import annotations

from replication.master import Master
from replication.serving import Serving


def test_it_serves_under_its_role() -> None:
    """What it does is Serving's; its role is what status shows."""
    assert issubclass(Master, Serving)
    assert Master.role == "master"
