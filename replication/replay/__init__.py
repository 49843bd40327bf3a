"""The public names of replay and Spark source (docs/spark.md); ``python -m replication.replay`` is the command."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replication.spark.datasource import ReplicationDataSource
    from replication.spark.job import open_session, replay

__all__ = ["ReplicationDataSource", "open_session", "replay"]

_MODULES = {
    "ReplicationDataSource": "replication.spark.datasource",
    "open_session": "replication.spark.job",
    "replay": "replication.spark.job",
}


def __getattr__(name: str) -> object:
    """Import a public name at its first use: workers that only read segments have no Spark."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
