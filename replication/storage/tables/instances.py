"""The text of tokens of several writers, and the table ``instance_map`` with their numbers (docs/protocol/ids.md F6).

A Synapse has the same table.  It is created when a token with several writers is first encoded or parsed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from replication.errors import StreamError
from replication.storage.migrations import LOCK
from replication.storage.transactions import run_transaction
from replication.streams.positions import MultiWriterToken
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.streams.interfaces import ISqlExecutor, IStreamStore

CREATE: Final[Mapping[str, Sequence[str]]] = {
    "sqlite": (
        "CREATE TABLE IF NOT EXISTS instance_map (instance_id INTEGER PRIMARY KEY, instance_name TEXT NOT NULL)",
        "CREATE UNIQUE INDEX IF NOT EXISTS instance_map_idx ON instance_map (instance_name)",
    ),
    "postgresql": (
        LOCK,
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
    """Return the numbers of all instances that have one; each of ``names`` receives one if it has none."""
    return await run_transaction(store, partial(_number, sorted(names)))


def _number(names: Sequence[InstanceName], database: ISqlExecutor) -> dict[InstanceName, int]:
    for statement in CREATE[database.dialect]:
        database.execute(statement)
    known = {InstanceName(name) for name, _ in database.execute(ALL)}
    if new := [(name,) for name in names if name not in known]:
        database.executemany(ADD[database.dialect], new)
    return {InstanceName(name): number for name, number in database.execute(ALL)}


class TokenCodec:
    """Parses and encodes tokens: ``5``, or ``m5~1.7~2.9`` where some writers are ahead."""

    def __init__(self, store: IStreamStore) -> None:
        self._store = store
        self._numbers: dict[InstanceName, int] = {}  # a cache; a name keeps its number

    async def read(self, text: str) -> MultiWriterToken:
        """Return the token; StreamError if the text is no token, or has a number that no writer has."""
        try:
            return self._parse(text)
        except StreamError:
            if "." not in text:
                raise
        self._numbers = await number_instances(self._store)
        return self._parse(text)

    async def encode(self, token: MultiWriterToken) -> str:
        """Return the text; a writer that is ahead and has no number receives one."""
        if not token.ahead.keys() <= self._numbers.keys():
            self._numbers = await number_instances(self._store, token.ahead.keys())
        return token.encode(self._numbers)

    def _parse(self, text: str) -> MultiWriterToken:
        return MultiWriterToken.parse(text, {number: name for name, number in self._numbers.items()})
