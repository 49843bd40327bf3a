"""Adds the command ``replication`` to twistd.  There must be no ``__init__.py`` beside this file."""

from twisted.application.service import ServiceMaker

replication = ServiceMaker(
    "replication",
    "replication.service",
    "Replicate streams of facts: run a master, which writes, or a worker, which follows.",
    "replication",
)
