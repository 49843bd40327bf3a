"""The status of a process: ``/v1/streams``, ``/v1/connections`` and ``/v1/users`` (docs/http.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from replication.errors import did_you_mean
from replication.web.request import Answer, RequestError, read_query

if TYPE_CHECKING:
    from replication.streams.interfaces import StreamStatus
    from replication.web.request import ApiRequest


async def list_streams(request: ApiRequest) -> Answer:
    """Answer with the status of all streams that the sender may see, and how many others there are."""
    read_query(request)
    found = request.api.served.stream_statuses()
    seen = [describe_stream(each) for each in found if request.rights.may_see(each.definition.name)]
    return Answer.json({"streams": seen, "hidden": len(found) - len(seen)})


async def read_stream(request: ApiRequest, name: str) -> Answer:
    """Answer with the status of one stream."""
    read_query(request)
    served = request.api.served
    if not served.stream_statuses(name):
        await served.check()  # before a process has started, no stream is known
    for status in served.stream_statuses(name):
        return Answer.json(describe_stream(status))
    near = did_you_mean(name, [each.definition.name for each in served.stream_statuses()])
    raise RequestError(404, f"no stream {name!r:.100} here{near or '; GET /v1/streams lists all'}")


async def list_connections(request: ApiRequest) -> Answer:
    """Answer with all connections; ``since`` is in seconds since 1970-01-01 UTC."""
    read_query(request)
    return Answer.json({"connections": [msgspec.structs.asdict(each) for each in request.api.served.peer_statuses()]})


async def list_users(request: ApiRequest) -> Answer:
    """Answer with the users that sync, and where."""
    read_query(request)
    places: dict[str, dict[str, int]] = {}
    for instance_id, syncing in request.api.served.users_syncing().items():
        for user_id, last_sync_ms in syncing.items():
            places.setdefault(user_id, {})[instance_id] = last_sync_ms
    return Answer.json({"users": [{"user_id": user_id, "syncing": places[user_id]} for user_id in sorted(places)]})


async def read_user(request: ApiRequest, user_id: str) -> Answer:
    """Answer with where a user syncs and was last seen."""
    read_query(request)
    users = request.api.served.users_syncing()
    syncing = {instance_id: there[user_id] for instance_id, there in users.items() if user_id in there}
    seen = [  # without the access tokens
        {"ip": each.ip, "user_agent": each.user_agent, "device_id": each.device_id, "last_seen": each.last_seen}
        for each in await request.api.served.places_of(user_id)
    ]
    return Answer.json({"user_id": user_id, "syncing": syncing, "seen": seen})


def describe_stream(status: StreamStatus) -> dict[str, Any]:
    """Return one stream as a JSON object: tokens are positive, ``lag`` is in tokens, ``age`` in seconds."""
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
                "announced": each.published,
                "lag": each.lag,
                "state": each.state,
                "error": each.error,
                "lost_and_found": each.lost_and_found,
                "failed": each.failed,
                "skipped": each.skipped,
                "audited": each.audited,
                "late": each.late,
                "gone": each.gone,
                "source": each.source,
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
        "in_memory": None if status.kept is None else msgspec.structs.asdict(status.kept),
    }
