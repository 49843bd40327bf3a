"""The numbers that stand for writers' names in a token's text, in a table that a Synapse has, too.

It is made when somebody first asks for a token with several writers in it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.streams.seams import IStatements, IStreamStore

CREATE: Final[Mapping[str, Sequence[str]]] = {
    "sqlite": (
        "CREATE TABLE IF NOT EXISTS instance_map (instance_id INTEGER PRIMARY KEY, instance_name TEXT NOT NULL)",
        "CREATE UNIQUE INDEX IF NOT EXISTS instance_map_idx ON instance_map (instance_name)",
    ),
    "postgresql": (
        "SELECT pg_advisory_xact_lock(hashtextextended('replication tables', 0))",  # two at once would fail
        "CREATE TABLE IF NOT EXISTS instance_map (instance_id serial PRIMARY KEY, instance_name text NOT NULL)",
        "CREATE UNIQUE INDEX IF NOT EXISTS instance_map_idx ON instance_map (instance_name)",
    ),
}
ADD: Final[Mapping[str, str]] = {
    "sqlite": "INSERT INTO instance_map (instance_name) VALUES (?) ON CONFLICT DO NOTHING",
    "postgresql": "INSERT INTO instance_map (instance_name) VALUES (%s) ON CONFLICT DO NOTHING",
}
ALL: Final = "SELECT instance_name, instance_id FROM instance_map"


async def number_instances(store: IStreamStore, names: Collection[InstanceName] = ()) -> dict[InstanceName, int]:
    """Return the numbers of all names that have one, ``names`` among them; StoreError if the database takes none."""
    transaction = store.transaction()
    try:
        numbers = await transaction.run(partial(_number, sorted(names)))
        await transaction.commit([])
    except BaseException:
        await transaction.rollback()
        raise
    return numbers


def _number(names: Sequence[InstanceName], database: IStatements) -> dict[InstanceName, int]:
    for statement in CREATE[database.dialect]:
        database.execute(statement)
    known = {InstanceName(name) for name, _ in database.execute(ALL)}
    if new := [(name,) for name in names if name not in known]:
        database.executemany(ADD[database.dialect], new)
    return {InstanceName(name): number for name, number in database.execute(ALL)}
