"""Watching the sequences of mapped tables, from which any program may draw: what ``streams.gate`` has to be told.

A look is one statement for all streams.  Only if somebody is waited for, and numbers do not tell for whom, the locks of
the server are looked at as well.
"""

# ruff: noqa: S608 - all in SQL is constant

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from replication.storage.postgres_ids import move_forward
from replication.storage.postgres_numbering import IS_THERE
from replication.streams.gate import Gate, Holder, Look
from replication.streams.seams import Reach
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table
    from replication.wire.grammar import StreamName

NAMES_AFTER: Final = 1.0  # seconds of waiting after which people may want to know for whom

# Its snapshot is older than what it reads of the sequences, as Look says.  One that nobody has drawn from has no last
# value, as after TRUNCATE … RESTART IDENTITY.
LOOK: Final = (
    "SELECT pg_snapshot_xmin(snapshot)::text, CASE WHEN %s THEN pg_current_xact_id()::text END, "
    "ARRAY(SELECT CASE WHEN has_sequence_privilege(to_regclass(name), 'USAGE, SELECT') "
    "THEN coalesce(pg_sequence_last_value(to_regclass(name)), 0) END "
    "FROM unnest(%s::text[]) WITH ORDINALITY AS each (name, place) ORDER BY place), "
    f"{IS_THERE} "
    "FROM pg_current_snapshot() AS snapshot"
)
# Who draws holds this lock to the end of the transaction, whatever becomes of its savepoints.
HOLDERS: Final = (
    "SELECT name, virtualtransaction, pid FROM pg_locks JOIN unnest(%s::text[]) AS each (name) "
    "ON relation = to_regclass(name) WHERE locktype = 'relation' AND granted AND mode = 'RowExclusiveLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_SINCE: Final = """' since ' || to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"')"""
WHO: Final = (
    "SELECT pid::text, 'session ' || pid || coalesce(' of ' || usename, '') || coalesce(' (' || nullif("
    f"application_name, '') || ')', '') || coalesce({_SINCE.format('xact_start')}, '') "
    "FROM pg_stat_activity WHERE pid = ANY(%s) UNION ALL "
    f"SELECT virtualtransaction, 'prepared transaction ' || quote_literal(gid) || {_SINCE.format('prepared')} "
    "FROM pg_prepared_xacts JOIN pg_locks ON transactionid = transaction AND locktype = 'transactionid' "
    "WHERE pid IS NULL AND virtualtransaction = ANY(%s) ORDER BY 2"
)


class _Watched:
    """A stream: its sequence, the tables that draw from it, and its gate."""

    def __init__(self, table: Table) -> None:
        self.stream = table.definition.name
        self.sequence = table.sequence
        self.sources = [*table.sources]
        self.gate = Gate()
        self.gone = False


class PostgresWatch:
    """The gates of all mapped streams, fed over one session; ``warn`` is told of a sequence that goes back."""

    def __init__(
        self,
        session: PostgresSession,
        tables: Iterable[Table],
        warn: Callable[[str], object],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self._watched = [_Watched(each) for each in tables]
        self.streams: Sequence[StreamName] = [each.stream for each in self._watched]
        self._warn = warn
        self._now = now

    def close(self) -> None:
        """End the session."""
        self.session.close()

    def look(self) -> Mapping[StreamName, Reach]:
        """Return how far each stream has come."""
        sequences = [each.sequence for each in self._watched]
        sources = [name for each in self._watched for name in each.sources]
        wants_number = any(each.gate.wants_number for each in self._watched)
        ((oldest, number, drawn, numbered),) = self.session.ask(LOOK, (wants_number, sequences, sources))
        is_numbered = dict(zip(sources, numbered, strict=True))
        now = self._now()
        wanted = [each.sequence for each in self._watched if each.gate.wants_holders(now)]
        holders = self._holders(wanted) if wanted else {}
        for each, last in zip(self._watched, drawn, strict=True):
            if self._is_there(each, last):
                seen = Look(
                    Token(last),
                    int(oldest),
                    all(is_numbered[name] for name in each.sources),
                    None if number is None else int(number),
                    holders.get(each.sequence),
                )
                each.gate.see(seen, now)
        return {each.stream: self._reach(each, now) for each in self._watched}

    def _holders(self, sequences: Sequence[str]) -> Mapping[str, frozenset[Holder]]:
        found: dict[str, set[Holder]] = {each: set() for each in sequences}
        for name, transaction, session in self.session.ask(HOLDERS, (sequences,)):
            found[name].add(Holder(transaction, session))
        return {name: frozenset(holders) for name, holders in found.items()}

    def _is_there(self, watched: _Watched, drawn: int | None) -> bool:
        """Whether a sequence is where it was; one that went back, as after a restore, is moved forward again."""
        complete = watched.gate.complete
        watched.gone = drawn is None
        if drawn is not None and complete is not None and drawn < complete:
            self._warn(
                f"stream {watched.stream!r}: sequence {watched.sequence} went back to {drawn}, and {complete} was "
                "announced: moved forward again; rows that were inserted between are not announced"
            )
            move_forward(self.session, watched.sequence, complete)
            return False
        return not watched.gone

    def _reach(self, watched: _Watched, now: float) -> Reach:
        gate = watched.gate
        waits = 0.0 if gate.since is None else now - gate.since
        blockers: Sequence[str] = ()
        if gate.blockers and waits >= NAMES_AFTER:
            sessions = [each.session for each in gate.blockers if each.session is not None]
            prepared = [each.transaction for each in gate.blockers if each.session is None]
            blockers = [words for _, words in self.session.ask(WHO, (sessions, prepared))]
        error = f"there is no sequence {watched.sequence}, or no reading it" if watched.gone else None
        return Reach(gate.complete, gate.drawn, waits, blockers, error)
