"""Sequences of mapped tables that another session has locked: a poll that reads one of them would wait.

ALTER SEQUENCE and TRUNCATE … RESTART IDENTITY lock a sequence until their transaction ends.  While they wait for such a
lock, the server lets every later reader wait, too.
"""

# ruff: noqa: S608 - the names in SQL are constants

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.postgres.session import PostgresSession

# Those that hold a lock come first.
_LOCKED: Final = (
    "SELECT name, pid, virtualtransaction FROM pg_locks JOIN unnest(%s::text[]) AS each (name) "
    "ON relation = to_regclass(name) WHERE locktype = 'relation' "
    "AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock') "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY granted"
)
_SINCE: Final = """' since ' || to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"')"""
BLOCKERS: Final = (
    "SELECT pid::text, 'session ' || pid || coalesce(' of ' || usename, '') || coalesce(' (' || nullif("
    f"application_name, '') || ')', '') || coalesce({_SINCE.format('xact_start')}, '') "
    "FROM pg_stat_activity WHERE pid = ANY(%s) UNION ALL "
    f"SELECT virtualtransaction, 'prepared transaction ' || quote_literal(gid) || {_SINCE.format('prepared')} "
    "FROM pg_prepared_xacts JOIN pg_locks ON transactionid = transaction AND locktype = 'transactionid' "
    "WHERE pid IS NULL AND virtualtransaction = ANY(%s) ORDER BY 2"
)


def find_locked(session: PostgresSession, sequences: Sequence[str]) -> dict[str, str]:
    """Return those of ``sequences`` that cannot be read now, each with the reason and the cure."""
    found = {name: (pid, transaction) for name, pid, transaction in session.ask(_LOCKED, (list(sequences),))}
    names = name_blockers(
        session,
        [pid for pid, _ in found.values() if pid is not None],
        [transaction for pid, transaction in found.values() if pid is None],
    )
    return {
        name: f"sequence {name} is locked by {names.get(transaction if pid is None else str(pid), 'another session')}: "
        "end that transaction, such as one of ALTER SEQUENCE or TRUNCATE … RESTART IDENTITY"
        for name, (pid, transaction) in found.items()
    }


def name_blockers(session: PostgresSession, pids: Sequence[int], prepared: Sequence[str]) -> Mapping[str, str]:
    """Return texts for sessions and for prepared transactions, by process ID or by virtual transaction."""
    return dict(session.ask(BLOCKERS, ([*pids], [*prepared]))) if pids or prepared else {}
