"""A master: a process that only writes, and that others follow."""

from __future__ import annotations

from replication.serving import Serving


class Master(Serving):
    """Streams over one database, and the connections that follow them; what it takes is what ``Serving`` does."""

    role = "master"
