"""Whether a connection pooler gives each transaction another server process (docs/operations.md#postgresql).

Advisory locks, settings and prepared statements belong to a server process.  Behind such a pooler, two daemons could
hold one lock, and other programs would get the settings of these sessions.
"""

from __future__ import annotations

import select
from contextlib import closing
from typing import TYPE_CHECKING, Final

import psycopg

if TYPE_CHECKING:
    from psycopg import Connection

POOLED: Final = (
    "a connection pooler gives each transaction another session of the server, so locks do not last: let it pool by "
    "session (PgBouncer: pool_mode = session), or name the server itself"
)

_PROCESS: Final = "SELECT pg_backend_pid()"
_ATTEMPTS: Final = 5  # another client of the pooler may have the process that the first session had
_PATIENCE: Final = 2_000  # ms; a pooler by session lets the second session wait if its pool is full


def pools_transactions(connection: Connection, conninfo: str) -> bool:
    """Return whether ``connection`` keeps its server process only until a transaction ends.

    At the start of a connection, a pooler sends a process number of its own.  If it is the number of the server
    process, there is no pooler.  Otherwise a second session begins a transaction.  The pooler pools by transaction if
    the second session gets the server process of the first, or if the first then gets another one.
    """
    ((process,),) = connection.execute(_PROCESS).fetchall()
    if process == connection.info.backend_pid:
        return False
    with closing(psycopg.connect(conninfo, autocommit=True)) as other:
        for _ in range(_ATTEMPTS):
            second = _begin(other)
            if second is None:
                return False
            if second == process:
                return True
            ((first,),) = connection.execute(_PROCESS).fetchall()
            if first != process:
                return True
            other.execute("ROLLBACK")
    return False


def _begin(connection: Connection) -> int | None:
    """Begin a transaction, and return its server process; None if the pooler lets it wait.

    A hot standby refuses statements of a serializable one, which may be the default.
    """
    connection.pgconn.send_query(f"BEGIN ISOLATION LEVEL READ COMMITTED; {_PROCESS}".encode())
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if not poll.poll(_PATIENCE):
        return None
    value, error = None, ""
    while (result := connection.pgconn.get_result()) is not None:
        value, error = result.get_value(0, 0), error or result.get_error_message()
    if value is None:
        raise psycopg.OperationalError(error)
    return int(value)
