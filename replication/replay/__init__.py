"""History as RDATA: segments written by Spark, read for catch-up, and streams as a Spark source."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replication.replay.datasource import ReplicationDataSource
    from replication.replay.job import open_session, replay

__all__ = ["ReplicationDataSource", "open_session", "replay"]

_ELSEWHERE = {
    "ReplicationDataSource": "replication.replay.datasource",
    "open_session": "replication.replay.job",
    "replay": "replication.replay.job",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module when it is first used: workers that only catch up have no Spark."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE[name]), name)
