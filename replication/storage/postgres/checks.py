"""Checks of mapped tables on PostgreSQL: warnings about rows that are lost or a table that is slow, each with its cure.

A check of rows reads the ``NEWEST``, so that each start stays quick; older rows were published before.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from replication.errors import SchemaError, StoreError
from replication.storage.contract import MASTER, Direction
from replication.storage.names import quoted
from replication.storage.postgres.transaction_id_trigger import have_trigger
from replication.wire.grammar import StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from replication.storage.postgres.generic import Table
    from replication.storage.postgres.session import PostgresSession
    from replication.streams.definitions import StreamDefinition

HAS_POSITIONS: Final = "SELECT to_regclass('stream_positions') IS NOT NULL"
HAVE_POSITIONS: Final = "SELECT stream_name, instance_name FROM stream_positions"
NEWEST: Final = 10_000  # rows

_HAS_DEFAULT: Final = (  # an identity column has one of its own kind
    "SELECT atthasdef OR attidentity <> '' FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = %s"
)
_PAIR: Final = (
    "SELECT true FROM pg_index JOIN pg_attribute AS first ON first.attrelid = indrelid AND first.attnum = indkey[0] "
    "JOIN pg_attribute AS second ON second.attrelid = indrelid AND second.attnum = indkey[1] "
    "WHERE indrelid = to_regclass(%s) AND first.attname = %s AND second.attname = %s AND indisvalid LIMIT 1"
)
_UNLOGGED: Final = (  # the table, or one of its partitions
    "WITH RECURSIVE tree (part) AS (SELECT to_regclass(%s)::oid "
    "UNION ALL SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = part) "
    "SELECT oid::regclass::text FROM pg_class JOIN tree ON oid = part WHERE relpersistence <> 'p' ORDER BY 1 LIMIT 1"
)
_STEPS: Final = "SELECT seqincrement FROM pg_sequence WHERE seqrelid = to_regclass(%s) AND seqincrement > 1"
_SHORT_TIMEOUTS: Final = "SELECT set_config('lock_timeout', '50ms', true), set_config('statement_timeout', '1s', true)"


def warnings_about(session: PostgresSession, definition: StreamDefinition, table: str, sequence: str) -> list[str]:
    """Return the warnings about ``table`` and its ``sequence``, both quoted."""
    column = f'"{definition.id_column}"'
    warnings = []
    if session.run(f"SELECT true FROM {table} WHERE {column} IS NULL LIMIT 1"):
        cure = f"set one, then ALTER TABLE {table} ALTER {column} SET NOT NULL"
        warnings.append(f"has rows without an ID, which no follower receives: {cure}")
    for (name,) in session.run(_UNLOGGED, (table,)):
        warnings.append(
            "is UNLOGGED, so a crash of the server empties it, and rows then have IDs again that were published, which "
            f"no follower receives: ALTER TABLE {name} SET LOGGED"
        )
    for (steps,) in session.run(_STEPS, (sequence,)):
        warnings.append(
            f"takes its IDs from sequence {sequence} in steps of {steps}, and a program that gives the IDs between "
            "them, as object-relational mappers do, may give one below a published one, which no follower receives: "
            f"let it request each ID (JPA: allocationSize = 1), and ALTER SEQUENCE {sequence} INCREMENT 1"
        )
    warnings += _about_rows(session, definition, table, column)
    if definition.instance_column is not None and not has_pair(session, definition, table):
        pair = f'("{definition.instance_column}", {column})'
        warnings.append(f"has no index on {pair}, so a start reads all of it: CREATE INDEX ON {table} {pair}")
    if has_default_id(session, table, definition.id_column) and not all(have_trigger(session, [table])):
        warnings.append(
            "hands out IDs to any program, and transactions in progress are found by the server's locks, which costs "
            "more than by transaction IDs: replication streams install --config FILE"
        )
    return [f"stream {definition.name!r}: table {definition.table!r} {each}" for each in warnings]


def has_default_id(session: PostgresSession, table: str, column: str) -> bool:
    """Whether the ID column of a table, quoted, has a DEFAULT, so that any program may insert without an ID."""
    return (True,) in session.run(_HAS_DEFAULT, (table, column))


def refuse_shared(table: Table, definitions: Iterable[StreamDefinition]) -> None:
    """Raise SchemaError if a table whose ID column has a DEFAULT shares its sequence with another stream.

    The writers of this package order their IDs among several streams; the IDs of external writers are polled for one
    stream only.
    """
    mine = table.definition
    sharing = sorted({each.name for each in definitions if each.generator == mine.generator} - {mine.name})
    if table.default_id is not None and sharing:
        name, column = map(quoted, table.default_id)
        raise SchemaError(
            f"streams {', '.join(map(repr, [mine.name, *sharing]))} share their IDs, but table {name} hands them out "
            "to any program, and no follower would receive rows of external writers: give each stream IDs of its own; "
            f"or, if all rows are written by reserve(), ALTER TABLE {name} ALTER {column} DROP IDENTITY IF EXISTS, "
            f"ALTER {column} DROP DEFAULT"
        )


def has_pair(session: PostgresSession, definition: StreamDefinition, table: str) -> bool:
    """Whether there is an index on instance and ID."""
    return bool(session.run(_PAIR, (table, definition.instance_column, definition.id_column)))


def _about_rows(session: PostgresSession, definition: StreamDefinition, table: str, column: str) -> list[str]:
    name, way = definition.instance_column, Direction.of(definition)
    instance = f"coalesce(source.\"{name}\"::text, '{MASTER}')" if name is not None else f"'{MASTER}'"
    newest = (
        f"SELECT source.{column} AS id, {instance} AS writer, source.xmin::text AS transaction FROM {table} AS source "
        f"{_followed(definition, column)} "
        f"ORDER BY source.{column} {'DESC' if way.sign > 0 else 'ASC'} LIMIT {NEWEST}"
    )
    warnings = []
    by_id = f"FROM ({newest}) AS newest GROUP BY id HAVING"
    for id_, one, other in session.run(
        f"SELECT id, min(writer), max(writer) {by_id} min(writer) <> max(writer) ORDER BY 1 LIMIT 1"
    ):
        warnings.append(f"has rows of {one!r} and of {other!r} under the ID {id_}: each fact needs an ID of its own")
    for (id_,) in session.run(f"SELECT id {by_id} count(DISTINCT transaction) > 1 ORDER BY 1 LIMIT 1"):
        warnings.append(
            f"has rows under the ID {id_} that different transactions have written or changed; a follower that reads "
            "between them misses the later rows: write all rows of an ID in one transaction, or use another ID"
        )
    return [*warnings, *rows_of_others(session, [definition]).values()]


# ---- rows of a name that is not among the writers


def rows_of_others(session: PostgresSession, definitions: Sequence[StreamDefinition]) -> dict[StreamName, str]:
    """Return a warning for each mapped stream with newest rows of other names than its writers; one statement for all.

    A row whose name is corrected later keeps its ID, which followers have passed: it needs a new one, too.  The rows of
    a former writer are published: it has a stored position.
    """
    asked = []
    for place, each in enumerate(definitions):
        if each.table is None or each.instance_column is None or not each.writers:
            continue
        instance, column = f"coalesce(source.\"{each.instance_column}\"::text, '{MASTER}')", f'"{each.id_column}"'
        order = f"ORDER BY source.{column} {'' if each.negative else 'DESC'} LIMIT {NEWEST}"
        newest = f"SELECT {instance} AS writer FROM {quoted(each.table)} AS source {_followed(each, column)} {order}"
        known = ", ".join(map(literal, each.writers))
        others = f"SELECT DISTINCT writer FROM ({newest}) AS newest WHERE writer NOT IN ({known}) ORDER BY 1 LIMIT 5"
        asked.append(f"SELECT {place}, writer FROM ({others}) AS others")
    rows = session.run(" UNION ALL ".join(asked), prepare=False) if asked else []
    former = _former(session) if rows else ()
    found: dict[int, list[str]] = {}
    for place, writer in rows:
        if (definitions[place].name, writer) not in former:
            found.setdefault(place, []).append(writer)
    return {definitions[place].name: _of_others(definitions[place], others) for place, others in found.items()}


def _former(session: PostgresSession) -> set[tuple[str, str]]:
    """Return the streams and writers with a stored position; none in a database that no process has served."""
    if not session.run(HAS_POSITIONS)[0][0]:
        return set()
    return {(stream, writer) for stream, writer in session.run(HAVE_POSITIONS)}


def _of_others(definition: StreamDefinition, others: Sequence[str]) -> str:
    table, name = quoted(definition.table or ""), f'"{definition.instance_column}"'
    rows = f"{name} IN ({', '.join(map(literal, others))})" + (f" OR {name} IS NULL" if MASTER in others else "")
    cure = (
        f'UPDATE {table} SET {name} = {literal(definition.writers[0])}, "{definition.id_column}" = DEFAULT WHERE {rows}'
    )
    return (
        f"has rows of {', '.join(map(repr, others))}, not among the stream's writers, so they are not published (NULL "
        f"is {MASTER!r}): add the names to writers, and start a process with each name; or give the rows a name and "
        f"new IDs, because followers have passed theirs: {cure}"
    )


def _followed(definition: StreamDefinition, column: str) -> str:
    """Return the WHERE clause of the rows that are followed."""
    where = f" AND ({definition.where})" if definition.where else ""
    return f"WHERE source.{column} {Direction.of(definition).above} 0{where}"


# ---- rows above the last value of the sequence: their IDs come from elsewhere


def rows_above_sequence(session: PostgresSession, last_value: Mapping[Table, int]) -> dict[Table, str]:
    """Return a warning for each table with rows above the last value of its sequence; one statement for all.

    Such rows are published only at a start, which moves the sequence past them.  ``last_value`` is an earlier value of
    each sequence.  The statement reads the rows before the sequences' values.  A writer allocates an ID before it
    inserts the row, so no row with an ID of the sequence is above the value.
    """
    tables = [*last_value]
    asked = [
        f"SELECT {place}, ({sql}), coalesce(pg_sequence_last_value(to_regclass({literal(table.sequence)})), 0)"
        for place, table in enumerate(tables)
        for sql in table.newest_above(Token(max(1, last_value[table])))  # ID 1 counts as used
    ]
    warnings: dict[Table, str] = {}
    for place, newest, last in session.run(" UNION ALL ".join(asked), prepare=False) if asked else ():
        if newest is not None and newest > last:
            warnings[tables[place]] = (
                f"stream {tables[place].definition.name!r}: has rows up to ID {newest}, but sequence "
                f"{tables[place].sequence} has given {last}: rows whose IDs come from elsewhere are not published "
                "before the next start, which finds the column's sequence again: let all IDs come from that one, or "
                "name another one as sequence in [[streams]]"
            )
    return warnings


# ---- while a process runs


def poll_rows(session: PostgresSession, last_value: Mapping[Table, int]) -> tuple[dict[Table, str], dict[Table, str]]:
    """Return the warnings about rows above the sequences, and about rows of other names, without waiting for locks.

    A table that is locked or gone is left out.
    """
    tables = [*last_value]
    try:
        with short_read(session):
            found = rows_of_others(session, [each.definition for each in tables])
            others = {
                each: f"stream {each.definition.name!r}: table {each.definition.table!r} {found[each.definition.name]}"
                for each in tables
                if each.definition.name in found
            }
            return rows_above_sequence(session, last_value), others
    except StoreError:
        if len(tables) <= 1:
            return {}, {}
        # A table is locked or gone.  Each half alone leaves out only its own tables.
    halves = tables[: len(tables) // 2], tables[len(tables) // 2 :]
    (above, of_others), (more, more_of_others) = (
        poll_rows(session, {each: last_value[each] for each in half}) for half in halves
    )
    return above | more, of_others | more_of_others


@contextmanager
def short_read(session: PostgresSession) -> Iterator[None]:
    """Run statements that only read, and that fail after 50 ms at a locked table, or after 1 s."""
    session.begin("READ ONLY", bounded=True)
    try:
        session.add(_SHORT_TIMEOUTS, ())
        yield
    finally:
        session.rollback()


def literal(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def array_literal(names: Iterable[str | None]) -> str:
    """Return text[] as SQL has it; the driver would make it anew at each poll."""
    escaped = [each if each is None else each.replace("\\", "\\\\").replace('"', '\\"') for each in names]
    return "{" + ",".join("NULL" if each is None else f'"{each}"' for each in escaped) + "}"
