"""What all sessions of one process share: the names it has claimed, and how a lost commit is noticed.

Every transaction stores a mark, the next number of its session, in the table ``commit_marks``.

- If a session is lost at COMMIT, the mark shows the outcome.  pg_xact_status() would not do: after a crash, the server
  assigns transaction IDs again.
- A new session looks for the last mark of each session of its process.  If one is missing, the database has lost
  commits that were acknowledged: a failover lost them, or a backup was restored.
- A transaction whose ``commit_marks`` is another table than before fails: a dump was restored while sessions lasted.
"""

from __future__ import annotations

import os
import socket
from threading import Lock
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from psycopg import errors

from replication.errors import CommitsLostError, StoreError
from replication.storage.postgres.pooling import POOLED, pools_transactions

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from replication.storage.postgres.address import Address
    from replication.wire.grammar import InstanceName

MARKS: Final = """
    CREATE TABLE commit_marks (
        session text NOT NULL PRIMARY KEY, mark bigint NOT NULL, marked_at timestamptz NOT NULL DEFAULT now()
    )
"""
# Marks of a process that may still look for them are kept.
DELETE_MARKS: Final = (
    "DELETE FROM commit_marks WHERE marked_at < now() - interval '30 days' "
    "AND NOT EXISTS (SELECT FROM writer_claims WHERE starts_with(session, holder))"
)
# In another table than that of the last mark, the value is NULL, which the table refuses.
MARK: Final = (
    "INSERT INTO commit_marks (session, mark) SELECT %s::text, "
    "CASE WHEN 'commit_marks'::regclass::oid = %s::oid OR %s::oid = 0 THEN %s::bigint END "
    "WHERE pg_current_xact_id_if_assigned() IS NOT NULL "  # otherwise nothing was written
    "AND CASE WHEN current_setting('synchronous_commit') = 'off' "  # by a function of the application
    "THEN set_config('synchronous_commit', 'on', true) = 'on' ELSE true END "
    "ON CONFLICT (session) DO UPDATE SET mark = excluded.mark, marked_at = now() RETURNING tableoid"
)
# Waits until the transaction in doubt has ended.
MARKED: Final = (
    "INSERT INTO commit_marks AS kept (session, mark) VALUES (%s, 0) "
    "ON CONFLICT (session) DO UPDATE SET mark = kept.mark RETURNING mark"
)
MISSING_MARKS: Final = (
    "SELECT count(*) FILTER (WHERE kept.mark IS NULL), 'commit_marks'::regclass::oid "
    "FROM unnest(%s::text[], %s::bigint[]) AS known (session, mark) "
    "LEFT JOIN commit_marks AS kept ON kept.session = known.session AND kept.mark >= known.mark"
)

HOLDER_KEY: Final = "hashtextextended('replication holder ' || %s, 0)"
HOLD: Final = f"SELECT pg_advisory_lock_shared({HOLDER_KEY})"
LOST_NAMES: Final = (
    "SELECT name FROM unnest(%s::text[]) AS name WHERE %s IS DISTINCT FROM "
    "(SELECT holder FROM writer_claims WHERE instance_name = name ORDER BY number DESC LIMIT 1)"
)


class Holder:
    """A process, for other processes that write the same database: its ``id``, and the instance names it has claimed.

    All its sessions hold a shared lock on ``id``.  A process that takes over one of the names ends all sessions with
    that lock.  A session that begins later finds that the name has another holder.

    ``server`` is the run of the server that the newest session has reached; sessions of another run end themselves.
    ``marks`` has the last mark of each session, ``table`` the OID of ``commit_marks``, 0 before the first mark.
    ``lost`` is the error of every call once commits, or a name, are lost; ``on_lost`` is called with it then, once, on
    any thread.
    """

    def __init__(self, on_lost: Callable[[CommitsLostError], object] = lambda _: None) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()} {uuid4().hex}"
        self.names: list[InstanceName] = []
        self.connected = False  # whether a server has let this process in: its URL is right
        self.server = ""
        self._keeps_sessions = False
        self.marks: dict[str, int] = {}
        self.table = 0
        self.lost: CommitsLostError | None = None
        self._on_lost = on_lost
        self._losing = Lock()

    def refuse_transaction_pooling(self, connection: psycopg.Connection, address: Address) -> None:
        """Raise StoreError if a connection pooler gives each transaction another session of the server.

        It is checked once, and again after ``doubt_pooler``.
        """
        if not self._keeps_sessions:
            if pools_transactions(connection, address.conninfo):
                self.server = ""  # every open session is replaced: its locks do not last
                raise StoreError(f"database {address.name!r}: {POOLED}")
            self._keeps_sessions = True

    def doubt_pooler(self) -> None:
        """Let the next session check its pooler: a prepared statement is missing, as after a change of its mode."""
        self._keeps_sessions = False

    def lose(self, why: str) -> CommitsLostError:
        """Note that this process must be restarted, and return the error."""
        with self._losing:
            if self.lost is None:
                self.lost = CommitsLostError(why)
                self._on_lost(self.lost)
            return self.lost

    def verify(self, connection: psycopg.Connection, database: str) -> None:
        """Raise CommitsLostError if the database has lost commits of this process."""
        marks = self.marks.copy()
        if not marks:
            return
        lost = f"database {database!r} has lost commits of this process: restart it"
        try:
            found = connection.execute(MISSING_MARKS, ([*marks], [*marks.values()])).fetchone()
        except errors.UndefinedTable as error:
            raise self.lose(lost) from error
        if found is None or found[0]:
            raise self.lose(lost)
        self.table = found[1]
