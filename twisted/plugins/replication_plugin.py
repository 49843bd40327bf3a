"""Tells twistd that there is a ``replication`` command.  No ``__init__.py`` beside this file, ever."""

from twisted.application.service import ServiceMaker

replication = ServiceMaker(
    "replication",
    "replication.service",
    "Replicate streams of facts: run a master that writes, or a worker that follows.",
    "replication",
)
