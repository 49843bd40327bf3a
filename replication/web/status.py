"""Where things stand, as JSON objects: ``GET /v1/streams`` and ``GET /v1/connections``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from replication.streams.seams import PeerStatus, StreamStatus


def describe_stream(status: StreamStatus) -> dict[str, Any]:
    """Return one stream: tokens are positive, ``lag`` is in tokens, ``age`` in seconds."""
    definition, oldest = status.definition, status.oldest_open
    return {
        "name": definition.name,
        "row": definition.row,
        "table": definition.table,
        "negative": definition.negative,
        "writers": [
            {
                "instance": each.instance,
                "position": each.position,
                "announced": each.announced,
                "lag": each.lag,
                "state": each.state,
                "error": each.error,
            }
            for each in status.writers
        ],
        "positions": {each.instance: each.position for each in status.writers},
        "minimum": status.minimum,
        "maximum": status.maximum,
        "open": status.open_count,
        "oldest_open": None if oldest is None else {"id": oldest[0], "age": oldest[1]},
        "notes": [*status.notes],
        "shares": definition.shares,
        "in_memory": None if status.kept is None else attrs.asdict(status.kept),
    }


def describe_peer(status: PeerStatus) -> dict[str, Any]:
    """Return one connection: ``since`` in seconds of the epoch."""
    return attrs.asdict(status)
