"""An application of a worker that stores every typed row of Synapse's streams in a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from replication.synapse import STREAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication import Worker
    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact
    from replication.streams.typed_rows import TypedStream


def register(worker: Worker) -> None:
    """Register a function for each stream."""
    for stream in STREAMS:
        _register(worker, stream)


def _register(worker: Worker, stream: TypedStream[Any]) -> None:
    @worker.on(stream.name)
    async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        await txn.execute("CREATE TABLE IF NOT EXISTS applied (stream, token, place, fields)")
        rows = [
            (stream.name, fact.token, place, json.dumps(row.named()))
            for fact in facts
            for place, row in enumerate(stream.read(fact))
        ]
        await txn.executemany("INSERT INTO applied VALUES (?, ?, ?, ?)", rows)
