"""Watching the sequences of mapped tables, from which any program may draw: what ``streams.gate`` has to be told.

A look is one trip to the server for all streams.  Only if somebody is waited for, and numbers do not tell for whom, the
locks of the server are looked at as well.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from replication.errors import StoreError
from replication.storage.postgres_ahead import briefly, look_ahead
from replication.storage.postgres_ids import move_forward
from replication.storage.postgres_numbering import IS_NUMBERED
from replication.streams.gate import MARKS, Gate, Holder, Look
from replication.streams.seams import Reach
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table
    from replication.wire.grammar import StreamName

WATCH_SETTINGS: Final[Mapping[str, str]] = {
    "default_transaction_isolation": "read committed",  # a snapshot a statement
    "lock_timeout": "2s",  # who holds a sequence for longer is to be seen
}
NAMES_AFTER: Final = 1.0  # seconds of waiting after which people may want to know for whom
AHEAD_EVERY: Final = 30.0  # seconds between two looks for rows whose IDs come from elsewhere

# What was drawn, and if that is another number than at the last look, a number of ours, taken after what it compares;
# and up to where the log was written then.
# A sequence that nobody has drawn from has no last value, as after TRUNCATE … RESTART IDENTITY.
DRAWN: Final = (
    "SELECT drawn, CASE WHEN drawn IS DISTINCT FROM %s::bigint[] THEN pg_current_xact_id()::text END, "
    "pg_current_wal_insert_lsn() - '0/0' FROM (SELECT "
    "ARRAY(SELECT CASE WHEN has_sequence_privilege(to_regclass(name), 'USAGE, SELECT') "
    "THEN coalesce(pg_sequence_last_value(to_regclass(name)), 0) END "
    "FROM unnest(%s::text[]) WITH ORDINALITY AS each (name, place) ORDER BY place) AS drawn OFFSET 0) AS seen"
)
# Who is under way, in a snapshot that is younger than that; and up to where the log is on the disk.
UNDER_WAY: Final = (
    f"SELECT pg_snapshot_xmin(pg_current_snapshot())::text, {IS_NUMBERED}, pg_current_wal_flush_lsn() - '0/0'"
)
# Who draws holds this lock to the end of the transaction, whatever becomes of its savepoints.
HOLDERS: Final = (
    "SELECT name, virtualtransaction, pid FROM pg_locks JOIN unnest(%s::text[]) AS each (name) "
    "ON relation = to_regclass(name) WHERE locktype = 'relation' AND granted AND mode = 'RowExclusiveLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
# A commit that is flushed, and with it all that was drawn before: drawing an ID is not of itself, nor is a rollback.
FLUSH: Final = "SELECT pg_logical_emit_message(true, 'replication', '')"
NAMELESS: Final = "/0"  # what its virtual transaction ends in
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
    """A stream: its sequence, the tables that draw from it, and its gate; what no crash takes back is ``durable``."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.stream = table.definition.name
        self.durable: Token | None = None
        self.written: deque[tuple[Token, int]] = (
            deque()
        )  # what was drawn by what place of the log, if above ``durable``
        self.sequence = table.sequence
        self.sources = [*table.sources]
        self.gate = Gate()
        self.gone = False
        self.ahead = False  # it was said that rows are above what was drawn
        self.reach = Reach(None, Token(0))

    def see_written(self, drawn: Token, place: int) -> None:
        """Learn that what was drawn is in the log before a place."""
        if not self.written or self.written[-1][0] != drawn:
            if len(self.written) == MARKS:
                self.written.pop()
            self.written.append((drawn, place))

    def is_flushed(self, place: int) -> bool:
        """Whether what is complete is on the disk, where the log is up to a place."""
        while self.written and self.written[0][0] < (self.gate.complete or 0):
            self.written.popleft()
        return bool(self.written) and self.written[0][1] <= place

    def rests(self, drawn: int | None) -> bool:
        """Whether all is as it was told at the last look, with nothing to wait for."""
        told = self.reach.complete, self.reach.drawn
        return drawn is not None and (drawn, drawn) == told and drawn == self.gate.drawn and not self.gone


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
        self._sources = [name for each in self._watched for name in each.sources]
        self._sequences = _array([each.sequence for each in self._watched])
        self._tables = _array(self._sources)
        self._asked_in = 0  # the number of the session
        self.streams: Sequence[StreamName] = [each.stream for each in self._watched]
        self._warn = warn
        self._now = now
        self._ahead_at = now() + AHEAD_EVERY

    def close(self) -> None:
        """End the session."""
        self.session.close()

    def look(self) -> Mapping[StreamName, Reach]:
        """Return how far each stream has come."""
        ((drawn, number, written),), ((oldest, numbered, flushed),) = self._ask()
        lively = [(each, last) for each, last in zip(self._watched, drawn, strict=True) if not each.rests(last)]
        now = self._now()
        if lively:
            is_numbered = dict(zip(self._sources, numbered, strict=True))
            for each, last in lively:
                if self._is_there(each, last):
                    all_are = all(is_numbered[name] for name in each.sources)
                    seen = Look(Token(last), int(oldest), all_are, None if number is None else int(number))
                    each.gate.see(seen, now)
                    each.see_written(seen.drawn, written)
            self._see_holders([each for each, _ in lively if not each.gone and each.gate.wants_holders(now)])
            self._make_durable([each for each, _ in lively if each.gate.complete != each.durable], flushed)
            for each, _ in lively:
                each.reach = self._reach(each, now)
        if now >= self._ahead_at:
            self._ahead_at = now + AHEAD_EVERY
            self._look_ahead(drawn)
        return {each.stream: each.reach for each in self._watched}

    def _ask(self) -> list[list[tuple[Any, ...]]]:
        while True:
            known = ["NULL" if each.gone or each.gate.drawn is None else str(each.gate.drawn) for each in self._watched]
            answers = self.session.run_in_turn(
                (DRAWN, (f"{{{','.join(known)}}}", self._sequences)), (UNDER_WAY, (self._tables,))
            )
            if self._asked_in == self.session.number:
                return answers
            self._asked_in = self.session.number
            for each in self._watched:
                each.gate.start_over()
                each.gate.complete = each.durable
                each.written.clear()

    def _see_holders(self, wanted: Sequence[_Watched]) -> None:
        if wanted:
            holders = self._holders([each.sequence for each in wanted])
            if self._asked_in != self.session.number:
                return  # it was lost, and the server may have crashed after the look
            for each in wanted:
                # Who ends has no name for a moment; up to 13.4 and in 14.0, so has who is being prepared, and is lost.
                if not any(holder.transaction.endswith(NAMELESS) for holder in holders[each.sequence]):
                    each.gate.see_holders(holders[each.sequence])

    def _holders(self, sequences: Sequence[str]) -> Mapping[str, frozenset[Holder]]:
        found: dict[str, set[Holder]] = {each: set() for each in sequences}
        for name, transaction, session in self.session.ask(HOLDERS, (sequences,)):
            found[name].add(Holder(transaction, session))
        return {name: frozenset(holders) for name, holders in found.items()}

    def _make_durable(self, advanced: Sequence[_Watched], flushed: int) -> None:
        """Let no crash of the server take back what is about to be told: its sequence would give the IDs again.

        Whoever committed the row of an ID, or of a later one, has flushed that it was drawn.
        """
        unsure = [each for each in advanced if not each.is_flushed(flushed)]
        asked = [
            f"SELECT {place} WHERE ({sql}) IS NOT NULL"
            for place, each in enumerate(unsure)
            for sql in each.table.beyond(Token((each.gate.complete or 0) - 1))
        ]
        kept: set[tuple[int]] = set()
        if asked:
            with suppress(StoreError), briefly(self.session):  # of a table that is locked or gone: let it be flushed
                kept.update(self.session.run(" UNION ".join(asked), prepare=False))
        if len(kept) < len(unsure):
            self.session.ask(FLUSH)
        if self._asked_in == self.session.number:  # else the server may have crashed before
            for each in advanced:
                each.durable = each.gate.complete

    def _look_ahead(self, drawn: Sequence[int | None]) -> None:
        """Say, once, of which streams others write rows whose IDs the sequence has not given."""
        known = {each.table: last for each, last in zip(self._watched, drawn, strict=True) if last is not None}
        said = look_ahead(self.session, known)
        for each in self._watched:
            if each.table in said and not each.ahead:
                self._warn(said[each.table])
            each.ahead = each.table in said

    def _is_there(self, watched: _Watched, drawn: int | None) -> bool:
        """Whether a sequence is where it was; one that went back, as after a restore, is moved forward again."""
        complete = watched.durable
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
        return Reach(watched.durable, gate.drawn or Token(0), waits, blockers, error)


def _array(names: Iterable[str]) -> str:
    """Return text[] as SQL spells it: the driver would do that anew at every look."""
    escaped = [name.replace("\\", "\\\\").replace('"', '\\"') for name in names]
    return "{" + ",".join(f'"{each}"' for each in escaped) + "}"
