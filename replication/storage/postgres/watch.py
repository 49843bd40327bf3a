"""Polls of the sequences of mapped tables, from which external writers allocate: the input of ``streams.horizon``.

A poll is one round trip to the server for all streams.  Only if an ID waits, it may be followed by one for the locks on
sequences, one for committed rows, and one that flushes the log.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace
from psycopg.errors import LockNotAvailable

from replication.errors import SchemaError, StoreError
from replication.storage.names import quoted
from replication.storage.postgres.checks import array_literal, literal, poll_rows, short_read
from replication.storage.postgres.ids import check_sequence, move_forward
from replication.storage.postgres.mapped import other_sequences
from replication.storage.postgres.sequence_locks import find_locked, name_blockers
from replication.storage.postgres.transaction_id_trigger import ASSIGN_IDS_FIRST
from replication.storage.postgres.truncations import get_reused, put_reused
from replication.streams.horizon import WAITS, Holder, SequenceHorizon, SequenceSnapshot
from replication.streams.interfaces import SequenceState
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.storage.postgres.generic import Table
    from replication.storage.postgres.session import PostgresSession
    from replication.wire.grammar import StreamName

WATCH_SETTINGS: Final[Mapping[str, str]] = {
    "default_transaction_isolation": "read committed",  # a snapshot for each statement
    "lock_timeout": "2s",  # a transaction that locks the sequence itself for longer is found
}
BLOCKERS_AFTER: Final = 1.0  # seconds of waiting after which ``blockers`` are named
CHECK_EVERY: Final = 30.0  # seconds between two checks for rows that no follower receives
RUN_LENGTH: Final = 1000  # IDs: one poll follows at most so many committed ones
LOCKED_RETRY: Final = 1.0  # seconds between two looks at sequences that are locked
COMMITTED_RETRY: Final = 1.0  # seconds until committed rows are read again after a table was locked

# The last value of each sequence.  If one differs from the last poll, also the poll's transaction ID, assigned after
# the values were read.  The place up to which the log is written.  And the files of the sequences and of the tables:
# TRUNCATE makes new ones.  A sequence that was never used has no last value, as after TRUNCATE … RESTART IDENTITY.
# A partitioned table has no file, but its partitions have: the sum of their numbers stands for them.
_FILES: Final = (
    "ARRAY(SELECT coalesce(pg_relation_filenode(to_regclass(name))::bigint, (WITH RECURSIVE tree (part) AS ("
    "SELECT to_regclass(name)::oid UNION ALL SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = part) "
    "SELECT sum(pg_relation_filenode(part)::bigint)::bigint FROM tree)) "
    "FROM unnest({}::text[]) WITH ORDINALITY AS each (name, place) ORDER BY place)"
)
LAST_VALUES: Final = (
    "SELECT last_values, CASE WHEN last_values IS DISTINCT FROM %s::bigint[] THEN pg_current_xact_id()::text END, "
    f"pg_current_wal_insert_lsn() - '0/0', {_FILES.format('sequences')}, {_FILES.format('%s')} FROM (SELECT sequences, "
    "ARRAY(SELECT CASE WHEN has_sequence_privilege(to_regclass(name), 'USAGE, SELECT') "
    "THEN coalesce(pg_sequence_last_value(to_regclass(name)), 0) END "
    "FROM unnest(sequences) WITH ORDINALITY AS each (name, place) ORDER BY place) AS last_values "
    "FROM (SELECT %s::text[]) AS given (sequences) OFFSET 0) AS read"
)
# What ALTER SEQUENCE and SET LOGGED change and TRUNCATE does not: all three give a sequence another file.  And the
# transaction of the last ALTER SEQUENCE, which may have changed no option.  A table that is written anew gets another
# TOAST table, if it has one; TRUNCATE keeps it.
OPTIONS: Final = (
    "SELECT (pg_sequence, own.relpersistence)::text, pg_sequence.xmin::text, coalesce(heap.reltoastrelid::bigint, 0) "
    "FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS each (name, source, place) "
    "LEFT JOIN pg_class AS own ON own.oid = to_regclass(name) LEFT JOIN pg_class AS heap ON heap.oid = "
    "to_regclass(source) LEFT JOIN pg_sequence ON seqrelid = own.oid ORDER BY place"
)
# The oldest transaction ID in progress, in a snapshot taken after that; and the place up to which the log is on disk.
IN_PROGRESS: Final = (
    f"SELECT pg_snapshot_xmin(pg_current_snapshot())::text, {ASSIGN_IDS_FIRST}, pg_current_wal_flush_lsn() - '0/0'"
)
# A transaction that allocates holds this lock until it ends, also if a savepoint is rolled back.
HOLDERS: Final = (
    "SELECT name, virtualtransaction, pid FROM pg_locks JOIN unnest(%s::text[]) AS each (name) "
    "ON relation = to_regclass(name) WHERE locktype = 'relation' AND granted AND mode = 'RowExclusiveLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
# A commit that is flushed, with all earlier allocations: neither an allocation nor a rollback flushes the log.
FLUSH: Final = "SELECT pg_logical_emit_message(true, 'replication', '')"
NAMELESS: Final = "/0"  # the end of a virtual transaction that has no name for a moment


class _Watched:
    """One stream: its table, its sequence and the horizon.

    ``durable`` is the horizon that no crash of the server takes back; only that is published.  ``logged`` are last
    values above it, each with a place of the log that is behind their allocation.

    ``files`` are those of the sequence and of the tables, None before the first poll.  ``options`` are the sequence's.
    If its file has changed, it is ``unchecked`` until these were checked; ``unfit`` is why it cannot be used.
    ``altered_by`` is the transaction that has altered it last; ``toast`` is the TOAST table of the first table.
    ``other`` is the sequence that the ID column has instead, if any.  ``locked``: why the sequence cannot be read now.

    After TRUNCATE … RESTART IDENTITY, ``reused`` is the ID up to which IDs were published and may have been allocated
    again; else 0.  ``stored_reused`` is what the database has of it.  ``has_reused``: rows have such IDs, so the
    stream stops until they have others.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.stream = table.definition.name
        self.sequence = table.sequence
        self.sources = [*table.sources]
        self.horizon = SequenceHorizon()
        self.durable: Token | None = None
        self.logged: deque[tuple[Token, int]] = deque()
        self.missing = False  # the sequence does not exist, or cannot be read
        self.has_rows_above = False  # the warning about rows above the sequence was given
        self.files: tuple[int | None, Sequence[int | None]] | None = None
        self.options, self.altered_by, self.toast = "", "", 0
        self.unchecked = self.has_reused = False
        self.unfit: str | None = None
        self.other: str | None = None
        self.locked: str | None = None
        self.emptied_in = -1  # the number of the poll that found another file of a table
        self.reused = self.stored_reused = Token(0)
        self.state = SequenceState(None, Token(0))

    def add_logged(self, last_value: Token, place: int) -> None:
        """Store that ``last_value`` was allocated before a place of the log."""
        if not self.logged or self.logged[-1][0] != last_value:
            if len(self.logged) == WAITS:
                self.logged.pop()
            self.logged.append((last_value, place))

    def is_flushed(self, place: int) -> bool:
        """Whether the allocation of the horizon is on disk, if the log is on disk up to a place."""
        while self.logged and self.logged[0][0] < (self.horizon.settled or 0):
            self.logged.popleft()
        return bool(self.logged) and self.logged[0][1] <= place

    def find_restart(self, files: tuple[int | None, Sequence[int | None]], poll: int) -> tuple[bool, bool]:
        """Return whether the sequence was restarted since the last poll, and whether a table has a new file."""
        before, self.files = self.files, files
        if before is None or None in (before[0], files[0]) or self.durable is None:
            return False, False
        has_new_file = None not in before[1] and before[1] != files[1]
        self.emptied_in = poll if has_new_file else self.emptied_in
        return before[0] != files[0], has_new_file

    def is_at_rest(self, last_value: int | None) -> bool:
        """Whether the last poll has published everything and nothing has changed since."""
        published = self.state.settled, self.state.last_value
        return (
            last_value is not None
            and (last_value, last_value) == published
            and last_value == self.horizon.last_value
            and not (self.missing or self.has_reused or self.unchecked or self.unfit or self.other or self.state.error)
        )


class PostgresWatch:
    """An IWatch over one session, blocking; it adds to the ``warnings`` of the store."""

    def __init__(
        self,
        session: PostgresSession,
        tables: Iterable[Table],
        warnings: list[str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self._watched = [_Watched(each) for each in tables]
        self._sources = [name for each in self._watched for name in each.sources]
        self._sequences = array_literal([each.sequence for each in self._watched])
        self._locked_at = 0.0  # when locked sequences were looked for
        self._tables = array_literal(self._sources)
        self._polls = 0
        self._polled_in = 0  # the number of the session
        self.streams: Sequence[StreamName] = [each.stream for each in self._watched]
        self._warnings, self._warn = warnings, warnings.append
        self._now = now
        self._check_at = now() + CHECK_EVERY
        self._committed_at = 0.0

    def close(self) -> None:
        """End the session."""
        self.session.close()

    def poll(self) -> Mapping[StreamName, SequenceState]:
        """Return the state of each stream's sequence."""
        ((last_values, transaction_id, written, *files),), ((oldest, assigned_first, flushed),) = self._read()
        now = self._now()
        self._find_truncated(last_values, *files, checks=now >= self._check_at)
        active = [
            (each, last)
            for each, last in zip(self._watched, last_values, strict=True)
            if each.locked is None and not each.is_at_rest(last)
        ]
        if active:
            by_table = dict(zip(self._sources, assigned_first, strict=True))
            own_id = None if transaction_id is None else int(transaction_id)
            for each, last in active:
                if self._check_sequence(each, last):
                    all_first = all(by_table[name] for name in each.sources)
                    snapshot = SequenceSnapshot(Token(last), int(oldest), all_first, own_id)
                    each.horizon.update(snapshot, now)
                    each.add_logged(snapshot.last_value, written)
            present = [each for each, _ in active if not each.missing]
            self._read_holders([each for each in present if each.horizon.wants_holders(now)])
            self._read_committed([each for each in present if each.horizon.wants_committed(now)], now)
            advanced = [each for each, _ in active if each.horizon.settled != each.durable and not each.has_reused]
            self._make_durable(advanced, flushed)
            for each, _ in active:
                each.state = self._state(each, now)
        if now >= self._check_at:
            self._check_at = now + CHECK_EVERY
            self._warn_of_rows(last_values)
        return {each.stream: each.state for each in self._watched}

    def _read(self) -> list[list[tuple[Any, ...]]]:
        locked = [each for each in self._watched if each.locked is not None]
        if locked and self._now() >= self._locked_at + LOCKED_RETRY:
            self._find_locked(locked)
        while True:
            known = [
                "NULL"
                if each.missing or each.locked is not None or each.horizon.last_value is None
                else str(each.horizon.last_value)
                for each in self._watched
            ]
            try:
                answers = self.session.run_in_turn(
                    (LAST_VALUES, (f"{{{','.join(known)}}}", self._tables, self._sequences)),
                    (IN_PROGRESS, (self._tables,)),
                )
            except StoreError as error:
                readable = [each for each in self._watched if each.locked is None]
                if not isinstance(error.__cause__, LockNotAvailable) or not self._find_locked(readable):
                    raise
                continue
            if self._polled_in == self.session.number:
                return answers
            self._polled_in = self.session.number
            for each in self._watched:
                each.horizon.reset()
                each.horizon.settled = each.durable
                each.logged.clear()

    def _find_locked(self, watched: Sequence[_Watched]) -> bool:
        """Find which of the sequences are locked, so that they are not read; the other streams do not wait."""
        found = find_locked(self.session, [each.sequence for each in watched])
        for each in watched:
            each.locked = found.get(each.sequence)
            if each.locked is not None:
                each.state = replace(each.state, error=each.locked)
        self._sequences = array_literal([None if each.locked else each.sequence for each in self._watched])
        self._locked_at = self._now()
        return bool(found)

    def _find_truncated(
        self,
        last_values: Sequence[int | None],
        sequence_files: Sequence[int | None],
        table_files: Sequence[int | None],
        *,
        checks: bool,
    ) -> None:
        """Find tables that were truncated.  With ``checks``, look for rows with reused IDs that were committed late."""
        if not self._polls:
            stored = get_reused(self.session)
            for each in self._watched:
                each.reused = each.stored_reused = stored.get(each.stream, Token(0))
                each.has_reused = each.reused > 0  # until its rows are read, below
            self._read_options(self._watched)
        self._polls += 1
        files, changed = iter(table_files), [each for each in self._watched if each.missing]
        for each, last, sequence_file in zip(self._watched, last_values, sequence_files, strict=True):
            found = sequence_file, [next(files) for _ in each.sources]
            if each.locked is not None:
                continue  # what its transaction has changed is found after it has ended
            restarted, has_new_file = each.find_restart(found, self._polls)
            if restarted or has_new_file:
                changed.append(each)
            each.unchecked = each.unchecked or restarted
            if each.unchecked:
                self._check_options(each)
            if restarted:
                restarted = self._is_restarted(each, last)
            if restarted and each.durable is not None:
                if last is not None and last >= each.durable:  # otherwise the warning of a sequence that went back
                    self._warn(
                        f"stream {each.stream!r}: sequence {each.sequence} was restarted, and {each.durable} was "
                        "published: rows inserted since then up to this ID are not published"
                    )
                if len(each.sources) == 1 and self._polls - each.emptied_in <= 1:
                    each.reused = each.durable
            if each.reused > each.stored_reused:
                put_reused(self.session, each.stream, each.reused)
                each.stored_reused = each.reused
            if has_new_file or each.has_reused or (each.reused and (restarted or checks)):
                self._look_for_rows(each, may_lack=has_new_file)
        self._read_options([each for each in self._watched if self._polls - each.emptied_in == 2])  # noqa: PLR2004
        self._find_other_sequences(self._watched if checks else changed)

    def _find_other_sequences(self, watched: Sequence[_Watched]) -> None:
        others = other_sequences(self.session, [each.table for each in watched])
        for each in watched:
            each.other = others.get(each.table)

    def _read_options(self, watched: Sequence[_Watched]) -> bool:
        """Read the options of sequences; return whether one of them has changed."""
        before = [each.options for each in watched]
        names = [each.sequence for each in watched], [each.sources[0] for each in watched]
        for each, found in zip(watched, self.session.ask(OPTIONS, names) if watched else (), strict=True):
            each.options, each.altered_by, each.toast = found
        return before != [each.options for each in watched]

    def _is_restarted(self, watched: _Watched, last_value: int | None) -> bool:
        """Whether a sequence with another file begins anew, as after TRUNCATE … RESTART IDENTITY."""
        before, toast = watched.altered_by, watched.toast
        has_other_options = self._read_options([watched])
        known = max(watched.horizon.last_value or 0, watched.durable or 0)
        goes_on = (last_value or 0) >= known or self._is_ahead(watched, last_value, known)
        is_truncated = self._polls - watched.emptied_in <= 1 and watched.toast == toast != 0
        return not has_other_options and (watched.altered_by == before or not goes_on or is_truncated)

    def _is_ahead(self, watched: _Watched, last_value: int | None, known: int) -> bool:
        """Whether the sequence has no last value because it was moved forward: ALTER SEQUENCE … RESTART WITH."""
        is_above = f"SELECT last_value > {known} FROM {watched.sequence}"
        return last_value == 0 and self.session.ask(is_above, prepare=False) == [(True,)]

    def _check_options(self, watched: _Watched) -> None:
        """Stop the stream while its sequence does not give IDs in ascending order to all sessions."""
        try:
            with short_read(self.session):
                check_sequence(self.session, watched.table)
        except SchemaError as error:
            watched.unchecked, watched.unfit = False, str(error)
        except StoreError:  # the sequence is locked: the next poll checks it
            return
        else:
            watched.unchecked, watched.unfit = False, None

    def _look_for_rows(self, watched: _Watched, *, may_lack: bool) -> None:
        """Look for rows with reused IDs.  With ``may_lack``, warn if no row is left up to the published position."""
        asked = watched.table.oldest()
        if not asked:  # without an index, that would read the whole table
            watched.has_reused = False
            return
        try:
            with short_read(self.session):
                oldest = [token for sql in asked for (token,) in self.session.run(sql, prepare=False)]
        except StoreError:  # a table is locked or gone: the next poll looks again
            watched.has_reused = watched.reused > 0
            return
        published = watched.durable or Token(0)
        watched.has_reused = any(token <= watched.reused for token in oldest)
        if may_lack and published > 1 and all(token > published for token in oldest):
            self._warn(
                f"stream {watched.stream!r}: table {', '.join(watched.sources)} was truncated: a follower that has not "
                f"received the rows up to ID {published} never receives them"
            )

    def _read_holders(self, wanted: Sequence[_Watched]) -> None:
        if wanted:
            holders = self._holders([each.sequence for each in wanted])
            if self._polled_in != self.session.number:
                return  # the session was lost, and the server may have crashed after the poll
            for each in wanted:
                # A transaction has no name for a moment while it ends; up to PostgreSQL 13.4, and in 14.0, also while
                # it is prepared.
                if not any(holder.transaction.endswith(NAMELESS) for holder in holders[each.sequence]):
                    each.horizon.update_holders(holders[each.sequence])

    def _holders(self, sequences: Sequence[str]) -> Mapping[str, frozenset[Holder]]:
        found: dict[str, set[Holder]] = {each: set() for each in sequences}
        for name, transaction, session in self.session.ask(HOLDERS, (sequences,)):
            found[name].add(Holder(transaction, session))
        return {name: frozenset(holders) for name, holders in found.items()}

    def _read_committed(self, wanted: Sequence[_Watched], now: float) -> None:
        """Read, in one statement, up to which ID each stream's tables have committed rows without a gap."""
        asked = [
            f"SELECT {place}, ({_end_of_run(each.sequence, each.horizon, has_rows)})"
            for place, each in enumerate(wanted)
            if (has_rows := each.table.has_rows("run.id"))
        ]
        if not asked or now < self._committed_at:
            return
        try:
            with short_read(self.session):
                ends = self.session.run(" UNION ALL ".join(asked), prepare=False)
        except StoreError:  # a table is locked or gone; the other rules still work
            self._committed_at = now + COMMITTED_RETRY
            return
        if self._polled_in == self.session.number:  # otherwise the server may have crashed after the poll
            for place, upto in ends:
                if upto is not None:
                    wanted[place].horizon.update_committed(Token(upto))

    def _make_durable(self, advanced: Sequence[_Watched], flushed: int) -> None:
        """Make sure that no crash of the server takes back an ID up to the horizon; its sequence would return it again.

        A committed row of an ID, or of a later one, has flushed the ID's allocation.
        """
        unsure = [each for each in advanced if not each.is_flushed(flushed)]
        asked = [
            f"SELECT {place} WHERE ({sql}) IS NOT NULL"
            for place, each in enumerate(unsure)
            for sql in each.table.newest_above(Token((each.horizon.settled or 0) - 1))
        ]
        kept: set[tuple[int]] = set()
        if asked:
            with suppress(StoreError), short_read(self.session):  # a table is locked or gone: flush instead
                kept.update(self.session.run(" UNION ".join(asked), prepare=False))
        if len(kept) < len(unsure):
            self.session.ask(FLUSH)
        if self._polled_in == self.session.number:  # otherwise the server may have crashed before
            for each in advanced:
                each.durable = each.horizon.settled

    def _warn_of_rows(self, last_values: Sequence[int | None]) -> None:
        """Warn, once, of streams with rows that no follower receives."""
        known = {each.table: last for each, last in zip(self._watched, last_values, strict=True) if last is not None}
        above, others = poll_rows(self.session, known)
        for each in self._watched:
            if each.table in above and not each.has_rows_above:  # the text has the newest ID: it changes
                self._warn(above[each.table])
            each.has_rows_above = each.table in above
            if each.table in others and others[each.table] not in self._warnings:
                self._warn(others[each.table])

    def _check_sequence(self, watched: _Watched, last_value: int | None) -> bool:
        """Whether a sequence is usable; one that went back, as after a restore, is moved forward."""
        settled = watched.durable
        watched.missing = last_value is None
        if last_value is not None and settled is not None and last_value < settled:
            self.session.verify()
            if not self._is_ahead(watched, last_value, settled):
                self._warn(
                    f"stream {watched.stream!r}: sequence {watched.sequence} went back to {last_value}, and {settled} "
                    "was published: moved forward again; rows inserted between these IDs are not published"
                )
            move_forward(self.session, watched.sequence, settled)
            return False
        return not (watched.missing or watched.unchecked or watched.unfit or watched.other)

    def _state(self, watched: _Watched, now: float) -> SequenceState:
        horizon = watched.horizon
        waits = 0.0 if horizon.since is None else now - horizon.since
        blockers: Sequence[str] = ()
        if horizon.blockers and waits >= BLOCKERS_AFTER:
            sessions = [each.session for each in horizon.blockers if each.session is not None]
            prepared = [each.transaction for each in horizon.blockers if each.session is None]
            blockers = [*name_blockers(self.session, sessions, prepared).values()]
        error = f"there is no sequence {watched.sequence}, or no reading it" if watched.missing else watched.unfit
        if watched.other is not None:
            error = _other_sequence(watched, watched.other)
        if watched.has_reused:
            error = _reused_ids(watched)
        return SequenceState(watched.durable, horizon.last_value or Token(0), waits, blockers, error)


def _other_sequence(watched: _Watched, other: str) -> str:
    """Return the error for an ID column that has another sequence, with the cure."""
    name, column = map(quoted, watched.table.default_id or ("", ""))
    if other == watched.sequence:
        return (
            f"another table is in the place of table {name}, with another sequence of the name {other}: restart this "
            f"process; then give new IDs to its rows with IDs up to {watched.durable or 0}, unless they are copies of "
            "the former table's rows: otherwise no follower receives them"
        )
    return (
        f"column {column} of table {name} takes its IDs from {other} now, not from {watched.sequence}: restart this "
        f"process; then give new IDs to rows that were inserted since the change with IDs up to {watched.durable or 0}"
        ": otherwise no follower receives them"
    )


def _reused_ids(watched: _Watched) -> str:
    """Return the error for rows with IDs that were published before, with the cure."""
    table, way = watched.table, watched.table.direction
    cure = f"give them new IDs, from {watched.sequence}"
    if table.default_id is not None:
        name, column = map(quoted, table.default_id)
        cure = f"UPDATE {name} SET {column} = DEFAULT WHERE {column} {way.upto} {way.sign * watched.reused}"
    return (
        f"its table was truncated with RESTART IDENTITY, and rows have IDs up to {watched.reused} again, which were "
        f"published before: {cure}"
    )


def _end_of_run(sequence: str, horizon: SequenceHorizon, has_rows: Sequence[str]) -> str:
    """Return SQL for the last of the IDs that follow ``settled`` in steps of the sequence and have committed rows."""
    settled, last_value = horizon.settled or 0, horizon.last_value or 0
    return (
        "WITH RECURSIVE run (id, step) AS ("
        f"SELECT {settled}::bigint, seqincrement FROM pg_sequence WHERE seqrelid = to_regclass({literal(sequence)}) "
        "UNION ALL SELECT id, step FROM (SELECT id + step, step FROM run) AS run (id, step) "
        f"WHERE id <= {min(last_value, settled + RUN_LENGTH)} AND ({' OR '.join(has_rows)})) SELECT max(id) FROM run"
    )
