"""What processes that write one database share: the sequences of stream IDs, and the names under which they write."""

# ruff: noqa: S608 - the names of sequences are quoted by us, or spelt by the server

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from replication.errors import SchemaError, StoreError
from replication.storage.postgres_session import HOLDER_KEY, SessionLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table
    from replication.wire.grammar import InstanceName, Token

_T = TypeVar("_T")

IDS_SETTINGS: Final[Mapping[str, str]] = {
    # A sequence that a crash takes back a little is moved forward again; a fact or a position that is durable makes all
    # IDs up to it durable.  So nobody waits for the disk here.
    "synchronous_commit": "off",
    # The machine of a holder that vanished without a word: its name is free after 30 s, not after hours.
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}

_KEY: Final = "hashtextextended('replication writer ' || current_schema() || ' ' || %s, 0)"
LOCK: Final = f"SELECT pg_try_advisory_lock({_KEY})"
UNLOCK: Final = f"SELECT pg_advisory_unlock({_KEY})"
UNLOCK_ALL: Final = "SELECT pg_advisory_unlock_all()"
HOLDER: Final = (
    "SELECT pid, application_name, coalesce(host(client_addr), 'a local socket') "
    "FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (classid::bigint << 32 | objid::bigint) = {_KEY}"
)
CLAIM: Final = (
    "INSERT INTO writer_claims (instance_name, holder, number) "
    "SELECT %s, %s, coalesce(max(number), 0) + 1 FROM writer_claims WHERE instance_name = %s "
    "ON CONFLICT (instance_name, holder) DO UPDATE SET number = excluded.number"
)
# Every session of a process has its lock: it is still there if only the one that claimed the name is lost.
PRESENT: Final = (
    "SELECT instance_name FROM writer_claims WHERE instance_name = ANY(%s::text[]) AND EXISTS (SELECT FROM pg_locks "
    "WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (classid::bigint << 32 | objid::bigint) = {HOLDER_KEY % 'holder'})"
)
FORMER: Final = "SELECT holder FROM writer_claims WHERE instance_name = %s AND holder <> %s"
END_SESSIONS: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    f"AND (classid::bigint << 32 | objid::bigint) = {HOLDER_KEY}"
)
WAIT_FOR_END: Final = f"SELECT pg_advisory_xact_lock({HOLDER_KEY})"
FORGET: Final = "DELETE FROM writer_claims WHERE instance_name = %s AND holder = %s"
DURABLY: Final = "SET LOCAL synchronous_commit = on"

SEQUENCE: Final = (
    "SELECT seqincrement, seqcache, seqcycle, (SELECT string_agg(each, ', ') FROM unnest(ARRAY['SELECT', 'UPDATE']) "
    "AS each WHERE NOT has_sequence_privilege(seqrelid, each)), quote_ident(current_user) "
    "FROM pg_sequence WHERE seqrelid = to_regclass(%s)"
)
LAST: Final = "SELECT coalesce(pg_sequence_last_value(to_regclass(%s)), 0)"
EXISTS: Final = "SELECT to_regclass(%s) IS NOT NULL"
DRAW: Final = "SELECT nextval(%s) FROM generate_series(1, %s)"


class PostgresIds:
    """Holds names and draws IDs over one session, so that no ID is drawn by a process that has lost its name.

    ``warn`` is told of a sequence that went back.
    """

    def __init__(self, session: PostgresSession, warn: Callable[[str], object]) -> None:
        self.session = session
        self._warn = warn
        self._held_in = 0  # the number of the session that has the locks
        self._highest: dict[str, int] = {}  # by sequence

    def close(self) -> None:
        """Let every name go, and end the session."""
        self.session.close(last=UNLOCK_ALL)  # else the server would do it, but a little later

    def claim(self, name: InstanceName) -> None:
        """Make this process the only one that writes as ``name``; StoreError says which one does.

        Nothing is under way any more, when this returns, of those that did before.
        """
        _again_if_lost(self._hold_names)
        if name in self.session.holder.names:
            return
        self._lock(name)
        try:
            self._take_over(name)
        except BaseException:
            self.session.close()  # lets go of the lock as well
            raise
        self.session.holder.names.append(name)

    def draw(self, sequence: str, count: int) -> list[int]:
        """Return so many IDs that nobody else gets, in ascending order."""

        def draw() -> list[int]:
            self._hold_names()
            return [value for (value,) in self.session.run(DRAW, (sequence, count))]

        ids = _again_if_lost(draw)
        highest = self._highest.get(sequence, 0)
        if ids[0] <= highest:
            self._warn(f"sequence {sequence} went back to {ids[0]} after {highest}: moved forward again")
            move_forward(self.session, sequence, highest)
            ids = _again_if_lost(draw)
        self._highest[sequence] = ids[-1]
        return ids

    def _hold_names(self) -> None:
        """Take the locks again after the session was lost."""
        self.session.refresh()
        if self._held_in != self.session.number:
            for name in self.session.holder.names:
                self._lock(name)
            self._held_in = self.session.number

    def _take_over(self, name: InstanceName) -> None:
        """Write down whose the name is, and end all sessions of those whose it was: one may be amid a COMMIT."""
        session, me = self.session, self.session.holder.id
        session.begin()
        session.run(DURABLY)
        session.run(CLAIM, (name, me, name))
        session.commit()
        for (former,) in session.run(FORMER, (name, me)):
            session.run(END_SESSIONS, (former,))
            session.run(WAIT_FOR_END, (former,))
            session.run(FORGET, (name, former))

    def _lock(self, name: InstanceName) -> None:
        ((locked,),) = self.session.run(LOCK, (name,))
        if not locked:
            holders = self.session.run(HOLDER, (name,))
            who = ", ".join(f"{application!r} from {address} (session {pid})" for pid, application, address in holders)
            raise StoreError(
                f"database {self.session.address.name!r}: another process writes as {name!r}: "
                f"{who or 'it has just ended'}; give each process a name of its own"
            )


def _again_if_lost(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except SessionLostError:
        return work()


def prepare_sequence(session: PostgresSession, table: Table, used: Token) -> list[str]:
    """Make sure that the sequence is there and past every used ID, so that it hands out 2 first; returns warnings.

    It consumes 1 instead of starting with 2, which PostgreSQL would report as used before anybody used it.
    """
    name, sequence = table.definition.name, table.sequence
    increment = check_sequence(session, table)
    if increment is None:
        session.run(f"CREATE SEQUENCE {sequence}")
        increment = 1
    ((last, called),) = session.run(f"SELECT last_value, is_called FROM {sequence}")
    drawn = last if called else last - increment
    if drawn >= max(1, used):
        return []
    move_forward(session, sequence, max(1, used))
    if used <= 1:
        return []
    return [f"stream {name!r}: sequence {sequence} was at {drawn}, behind ID {used}, which is stored: moved forward"]


def check_sequence(session: PostgresSession, table: Table) -> int | None:
    """Return by how much the sequence of a table ascends; None if it is to be made, SchemaError if it is of no use."""
    name, sequence = table.definition.name, table.sequence
    ((exists,),) = session.run(EXISTS, (sequence,))
    if not exists:
        return None
    kind = session.run(SEQUENCE, (sequence,))
    if not kind:
        raise SchemaError(f"{sequence} is not a sequence, but stream {name!r} needs one of that name: rename it")
    ((increment, cache, cycles, lacking, user),) = kind
    if increment < 1 or cache != 1 or cycles:
        raise SchemaError(
            f"sequence {sequence} of stream {name!r} does not hand out IDs in ascending order: "
            f"ALTER SEQUENCE {sequence} INCREMENT 1 CACHE 1 NO CYCLE"
        )
    if lacking:
        raise SchemaError(
            f"sequence {sequence} of stream {name!r} cannot be read and moved forward by {user}: "
            f"GRANT {lacking} ON SEQUENCE {sequence} TO {user}"
        )
    return int(increment)


def last_drawn(session: PostgresSession, sequence: str) -> int:
    """Return the last ID that a sequence has given; 0 if there is none, or no sequence."""
    ((last,),) = session.run(LAST, (sequence,))
    return int(last)


def move_forward(session: PostgresSession, sequence: str, used: int) -> None:
    """Let a sequence go on after ``used``, or after what others have drawn meanwhile if that is more."""
    session.run(f"SELECT setval(%s, greatest(%s, last_value)) FROM {sequence}", (sequence, used))
