"""Sequences of stream IDs, and the claims of instance names: what processes share that write one database."""

# ruff: noqa: S608 - the names of sequences are quoted here or by the server

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

from replication.errors import SchemaError, StoreError
from replication.storage.contract import ClaimedError
from replication.storage.postgres.holder import HOLDER_KEY
from replication.storage.postgres.session import SessionLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replication.storage.postgres.generic import Table
    from replication.storage.postgres.session import PostgresSession
    from replication.wire.grammar import InstanceName, Token

_T = TypeVar("_T")

IDS_SETTINGS: Final[Mapping[str, str]] = {
    # No wait for the disk: a sequence that a crash takes back is moved forward again, and a durable fact or position
    # makes all smaller IDs durable.
    "synchronous_commit": "off",
    # If a holder's machine vanishes, its name is free after 30 s, not after hours.
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30000",  # ms; there are no keepalives while an answer is not acknowledged
}

# For the short session that takes over names.  It waits 2 s at most for the end of the former holder's sessions.
TAKE_OVER_SETTINGS: Final[Mapping[str, str]] = {**IDS_SETTINGS, "lock_timeout": "2s"}

# The holder in a claim that was taken over and not made again: no process.  No host name begins so.
NO_PROCESS: Final = "(none)"

_KEY: Final = "hashtextextended('replication writer ' || current_schema() || ' ' || %s, 0)"
LOCK: Final = f"SELECT pg_try_advisory_lock({_KEY})"
# Several processes may take over a name at once; meanwhile no process can claim it.
LOCK_SHARED: Final = f"SELECT pg_try_advisory_lock_shared({_KEY})"
UNLOCK_ALL: Final = "SELECT pg_advisory_unlock_all()"
HOLDER: Final = (
    "SELECT pid, application_name, coalesce(host(client_addr), 'a local socket') "
    "FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND mode = 'ExclusiveLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (classid::bigint << 32 | objid::bigint) = {_KEY}"
)
CLAIM: Final = (
    "INSERT INTO writer_claims (instance_name, holder, number) "
    "SELECT %s, %s, coalesce(max(number), 0) + 1 FROM writer_claims WHERE instance_name = %s "
    "ON CONFLICT (instance_name, holder) DO UPDATE SET number = excluded.number"
)
# Every session of a process holds its lock, so a process that has lost only the session with the claim is connected.
CLAIMS: Final = (
    "SELECT instance_name, bool_or(EXISTS (SELECT FROM pg_locks "
    "WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (classid::bigint << 32 | objid::bigint) = {HOLDER_KEY % 'holder'})) "
    f"FROM writer_claims WHERE instance_name = ANY(%s::text[]) AND holder <> '{NO_PROCESS}' GROUP BY instance_name"
)
FORMER: Final = "SELECT holder FROM writer_claims WHERE instance_name = %s AND holder <> %s"
END_SESSIONS: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (classid::bigint << 32 | objid::bigint) = {HOLDER_KEY}"
)
WAIT_FOR_END: Final = f"SELECT pg_advisory_xact_lock({HOLDER_KEY})"
DELETE_CLAIM: Final = "DELETE FROM writer_claims WHERE instance_name = %s AND holder = %s"
SYNCHRONOUS: Final = "SET LOCAL synchronous_commit = on"

SEQUENCE: Final = (
    "SELECT seqincrement, seqcache, seqcycle, (SELECT string_agg(each, ', ') FROM unnest(ARRAY['SELECT', 'UPDATE']) "
    "AS each WHERE NOT has_sequence_privilege(seqrelid, each)), quote_ident(current_user) "
    "FROM pg_sequence WHERE seqrelid = to_regclass(%s)"
)
# Of generic tables and their sequences: whether neither exists, nor a position; whether both are as this package makes
# them, and may be used; and the last value.
STATES: Final = (
    "SELECT made IS NULL AND counts IS NULL AND NOT EXISTS (SELECT FROM stream_positions WHERE stream_name = stored), "
    "coalesce((SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute WHERE attrelid = made AND attnum > 0 "
    "AND NOT attisdropped) = '{stream_id,ord,instance_name,row}' "
    "AND (SELECT seqincrement > 0 AND seqcache = 1 AND NOT seqcycle AND has_sequence_privilege(seqrelid, 'SELECT') "
    "AND has_sequence_privilege(seqrelid, 'UPDATE') FROM pg_sequence WHERE seqrelid = counts), false), "
    "coalesce((SELECT CASE WHEN has_sequence_privilege(seqrelid, 'SELECT') THEN pg_sequence_last_value(seqrelid) END "
    "FROM pg_sequence WHERE seqrelid = counts), 0) "
    "FROM unnest(%s::text[], %s::text[], %s::text[]) WITH ORDINALITY AS given (name, sequence, stored, place), "
    "LATERAL (SELECT to_regclass(name)::oid, to_regclass(sequence)::oid) AS found (made, counts) ORDER BY place"
)
LAST: Final = "SELECT coalesce(pg_sequence_last_value(to_regclass(%s)), 0)"
EXISTS: Final = "SELECT to_regclass(%s) IS NOT NULL"
ALLOCATE: Final = "SELECT nextval(%s) FROM generate_series(1, %s)"


class Allocations:
    """What the sessions of this process have allocated, on several threads; ``warn`` receives warnings."""

    def __init__(self, warn: Callable[[str], object] = lambda _: None) -> None:
        self._warn = warn
        self._highest: dict[str, int] = {}  # by sequence
        self._lock = Lock()

    def allocate(self, session: PostgresSession, sequence: str, work: Callable[[], list[int]]) -> list[int]:
        """Return the IDs of ``work``, ascending; a sequence that went back is moved forward, with a warning."""
        highest = self._highest.get(sequence, 0)  # before: other threads allocate meanwhile
        ids = _twice_if_lost(work)
        if ids[0] <= highest:
            session.rollback()
            session.verify()
            self._warn(f"sequence {sequence} went back to {ids[0]} after {highest}: moved forward again")
            move_forward(session, sequence, highest)
            ids = _twice_if_lost(work)
        with self._lock:
            self._highest[sequence] = max(ids[-1], self._highest.get(sequence, 0))
        return ids


class PostgresIds:
    """Claims names, and allocates IDs outside transactions, over one session with the locks of the names.

    A process that has lost its name allocates no ID here; nor in a transaction, because its sessions were ended.
    """

    def __init__(self, session: PostgresSession, allocations: Allocations) -> None:
        self.session = session
        self._allocations = allocations
        self._held_in = 0  # the number of the session with the locks

    def close(self) -> None:
        """Release every name, and end the session."""
        self.session.close(last=UNLOCK_ALL)  # the server would do it too, but a little later

    def claim(self, name: InstanceName) -> None:
        """Make this process the only one that writes as ``name``; StoreError names the process that does.

        When this returns, former holders of the name have no transaction in progress.
        """
        _twice_if_lost(self.hold_names)
        if name in self.session.holder.names:
            return
        self._lock(name)
        try:
            self._take_over(name, self.session.holder.id)
        except BaseException:
            self.session.rollback()
            self.close()  # releases the lock too
            raise
        self.session.holder.names.append(name)

    def allocate(self, sequence: str, count: int) -> list[int]:
        """Return ``count`` IDs, ascending, which no other process receives."""

        def allocate() -> list[int]:
            self.hold_names()
            return [value for (value,) in self.session.run(ALLOCATE, (sequence, count))]

        return self._allocations.allocate(self.session, sequence, allocate)

    def hold_names(self) -> None:
        """Lock the names again after the session was lost."""
        self.session.refresh()
        if self._held_in != self.session.number:
            for name in self.session.holder.names:
                self._lock(name)
            self._held_in = self.session.number

    def take_over(self, name: InstanceName) -> bool:
        """End the claim of ``name`` if its process has no session; return whether a claim was ended.

        After that the former process has no transaction in progress, and each later one fails.  The name is locked
        until ``close``.
        """
        ((locked,),) = self.session.run(LOCK_SHARED, (name,))
        if not locked or self.session.run(CLAIMS, ([name],)) != [(name, False)]:
            return False
        self._take_over(name, NO_PROCESS)
        return True

    def _take_over(self, name: InstanceName, holder: str) -> None:
        """Store the claim, and end all sessions of former holders: one may be at its COMMIT."""
        session = self.session
        session.begin()
        session.run(SYNCHRONOUS)
        session.run(CLAIM, (name, holder, name))
        session.commit()
        for (former,) in session.run(FORMER, (name, holder)):
            session.run(END_SESSIONS, (former,))
            session.run(WAIT_FOR_END, (former,))
            session.run(DELETE_CLAIM, (name, former))

    def _lock(self, name: InstanceName) -> None:
        ((locked,),) = self.session.run(LOCK, (name,))
        if not locked:
            holder = ", ".join(
                f"{application!r} from {address} (session {pid})"
                for pid, application, address in self.session.run(HOLDER, (name,))
            )
            if not holder:
                raise StoreError(
                    f"database {self.session.name!r}: the process that writes as {name!r} has just ended: try again",
                    temporary=True,
                )
            raise ClaimedError(
                f"database {self.session.name!r}: another process writes as {name!r}: {holder}; "
                "give each process a name of its own; if the machine of that process has vanished, try again in 30 s",
                holder=holder,
            )


def _twice_if_lost(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except SessionLostError:
        return work()


def prepare_sequence(session: PostgresSession, table: Table, used: Token) -> list[str]:
    """Create the sequence, or move it past every used ID, so that it returns 2 first; returns warnings.

    The value 1 is consumed, because with START WITH 2 PostgreSQL reports 2 as the last value before any use
    (docs/protocol/traps.md 39).
    """
    name, sequence = table.definition.name, table.sequence
    increment = check_sequence(session, table)
    if increment is None:
        create_sequence(session, table)
        increment = 1
    ((last, called),) = session.run(f"SELECT last_value, is_called FROM {sequence}")
    last_value = last if called else last - increment
    if last_value >= max(1, used):
        return []
    move_forward(session, sequence, max(1, used))
    if used <= 1:
        return []
    return [
        f"stream {name!r}: sequence {sequence} was at {last_value}, behind ID {used}, which is stored: moved forward"
    ]


def create_sequence(session: PostgresSession, table: Table) -> None:
    """Create the sequence of a table, with the value 1 consumed, before the next statement of the transaction."""
    session.add(f"CREATE SEQUENCE {table.sequence}", ())
    session.add("SELECT setval(%s, 1)", (table.sequence,))


def check_sequence(session: PostgresSession, table: Table) -> int | None:
    """Return the increment of a table's sequence, or None if there is no sequence; SchemaError if it does not fit."""
    name, sequence = table.definition.name, table.sequence
    ((exists,),) = session.run(EXISTS, (sequence,))
    if not exists:
        return None
    kind = session.run(SEQUENCE, (sequence,))
    if not kind:
        raise SchemaError(f"{sequence} is not a sequence, but stream {name!r} needs a sequence of that name: rename it")
    ((increment, cache, cycles, lacking, user),) = kind
    if increment < 1 or cache != 1 or cycles:
        cure = f"ALTER SEQUENCE {sequence} INCREMENT 1 CACHE 1 NO CYCLE"
        if increment < 1 and table.definition.negative:
            cure = (
                "create an ascending sequence that starts above the largest absolute ID, name it in the option "
                "sequence, and set the column's DEFAULT to -nextval('NAME')"
            )
        raise SchemaError(f"sequence {sequence} of stream {name!r} does not hand out IDs in ascending order: {cure}")
    if lacking:
        raise SchemaError(
            f"sequence {sequence} of stream {name!r} cannot be read and moved forward by {user}: "
            f"GRANT {lacking} ON SEQUENCE {sequence} TO {user}"
        )
    return int(increment)


def read_last_value(session: PostgresSession, sequence: str) -> int:
    """Return the last value of a sequence; 0 if it was never used, or does not exist."""
    ((last,),) = session.run(LAST, (sequence,))
    return int(last)


def move_forward(session: PostgresSession, sequence: str, used: int) -> None:
    """Move a sequence forward to ``used``, unless other processes have moved it further.

    Others may allocate while the statement runs, so setval() never has the value that was read: it would take back what
    they have allocated since.  After ALTER SEQUENCE … RESTART WITH, a sequence has no last value before its next use.
    """
    session.run(
        f"SELECT CASE WHEN last_value < %s THEN setval(%s, %s) WHEN NOT is_called THEN nextval(%s) END FROM {sequence}",
        (used, sequence, used, sequence),
    )
