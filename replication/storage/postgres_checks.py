"""What is amiss in a mapped table of PostgreSQL though a stream can be made of it: a sentence each, with the cure.

Rows are looked at from the newest on, as many as can be at every start: what was written long ago has been told.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import SchemaError
from replication.storage.postgres_numbering import are_numbered
from replication.storage.postgres_tables import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Table
    from replication.streams.registry import StreamDefinition

NEWEST: Final = 10_000  # rows
MASTER: Final = "master"

_HAS_DEFAULT: Final = (  # an identity has one of its own
    "SELECT atthasdef OR attidentity <> '' FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = %s"
)
_PAIR: Final = (
    "SELECT true FROM pg_index JOIN pg_attribute AS first ON first.attrelid = indrelid AND first.attnum = indkey[0] "
    "JOIN pg_attribute AS second ON second.attrelid = indrelid AND second.attnum = indkey[1] "
    "WHERE indrelid = to_regclass(%s) AND first.attname = %s AND second.attname = %s AND indisvalid LIMIT 1"
)


def what_is_amiss(session: PostgresSession, definition: StreamDefinition, table: str) -> list[str]:
    """Return sentences about ``table``, quoted, for whoever starts a process over it."""
    column = f'"{definition.id_column}"'
    said = []
    if session.run(f"SELECT true FROM {table} WHERE {column} IS NULL LIMIT 1"):
        cure = f"give them one, then ALTER TABLE {table} ALTER {column} SET NOT NULL"
        said.append(f"has rows without an ID, which reach nobody: {cure}")
    said += _rows_amiss(session, definition, table, column)
    if definition.instance_column is not None and not has_pair(session, definition, table):
        pair = f'("{definition.instance_column}", {column})'
        said.append(f"has no index on {pair}, so a start reads all of it: CREATE INDEX ON {table} {pair}")
    if gives_ids(session, table, definition.id_column) and not all(are_numbered(session, [table])):
        said.append(
            "hands out IDs to anybody, and who is under way is told from the locks of the server, which costs more "
            "than numbering transactions first: replication streams install --config FILE"
        )
    return [f"stream {definition.name!r}: table {definition.table!r} {each}" for each in said]


def gives_ids(session: PostgresSession, table: str, column: str) -> bool:
    """Whether a table, quoted, has IDs for whoever inserts without one."""
    return (True,) in session.run(_HAS_DEFAULT, (table, column))


def refuse_shared(table: Table, definitions: Iterable[StreamDefinition]) -> None:
    """Raise SchemaError if a table that gives IDs to anybody shares them with another one of the streams.

    Several of ours draw them, and keep their order among themselves; nobody watches what others draw.
    """
    mine = table.definition
    sharing = sorted({each.name for each in definitions if each.generator == mine.generator} - {mine.name})
    if table.gives_ids is not None and sharing:
        name, column = map(quoted, table.gives_ids)
        raise SchemaError(
            f"streams {', '.join(map(repr, [mine.name, *sharing]))} share their IDs, but table {name} hands them out "
            "to anybody, and what others insert there would reach nobody: let each stream have IDs of its own; or, "
            f"if all is written by reserve(), ALTER TABLE {name} ALTER {column} DROP IDENTITY IF EXISTS, "
            f"ALTER {column} DROP DEFAULT"
        )


def has_pair(session: PostgresSession, definition: StreamDefinition, table: str) -> bool:
    """Whether an index leads to each writer's newest row."""
    return bool(session.run(_PAIR, (table, definition.instance_column, definition.id_column)))


def _rows_amiss(session: PostgresSession, definition: StreamDefinition, table: str, column: str) -> list[str]:
    name, way = definition.instance_column, ("<", "ASC") if definition.negative else (">", "DESC")
    instance = f"coalesce(source.\"{name}\", '{MASTER}')" if name is not None else f"'{MASTER}'"
    where = f" AND ({definition.where})" if definition.where else ""
    newest = (
        f"SELECT source.{column} AS id, {instance} AS writer, source.xmin::text AS transaction FROM {table} AS source "
        f"WHERE source.{column} {way[0]} 0{where} ORDER BY source.{column} {way[1]} LIMIT {NEWEST}"
    )
    said = []
    by_id = f"FROM ({newest}) AS newest GROUP BY id HAVING"
    for id_, one, other in session.run(
        f"SELECT id, min(writer), max(writer) {by_id} min(writer) <> max(writer) ORDER BY 1 LIMIT 1"
    ):
        said.append(f"has rows of {one!r} and of {other!r} under the ID {id_}: each fact needs an ID of its own")
    for (id_,) in session.run(f"SELECT id {by_id} count(DISTINCT transaction) > 1 ORDER BY 1 LIMIT 1"):
        said.append(
            f"has rows under the ID {id_} that different transactions have written or changed, and whoever reads "
            "between them misses the later ones: write all rows of an ID in one transaction, or draw another ID"
        )
    if name is not None and definition.writers:
        names = [writer for (writer,) in session.run(f"SELECT DISTINCT writer FROM ({newest}) AS newest ORDER BY 1")]
        if others := [each for each in names if each not in definition.writers][:5]:
            said.append(
                f"has rows of {', '.join(map(repr, others))}, not among the stream's writers, so nobody announces them "
                f"(NULL is {MASTER!r}): add them to writers, or set {name!r} right"
            )
    return said
