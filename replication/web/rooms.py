"""Rooms: the calls below ``/v1/rooms`` (docs/http.md, Rooms)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from replication.errors import RoomError
from replication.web.request import Answer, RequestError, read_limit, read_query, read_token
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.rooms.ordering import Place
    from replication.rooms.views import EventView, RoomView, StateGroupView, StoredEvent
    from replication.web.request import ApiRequest
    from replication.wire.grammar import Token

PAGE: Final = 100  # events, unless the request has a limit


class IRooms(Protocol):
    """The rooms of a process: ``replication.Rooms``."""

    @property
    def streams(self) -> Collection[str]:
        """The streams whose facts are events of rooms, and nothing else."""
        ...

    async def persist(
        self, room_id: str, events: Sequence[Mapping[str, object]], *, backfilled: bool = False
    ) -> Sequence[Token]:
        """Store events, all or none, and return their IDs; RoomError names one that cannot be stored."""
        ...

    async def view(self, room_id: str) -> RoomView:
        """Return a room, else UnknownRoomError."""
        ...

    async def event(self, room_id: str, event_id: str) -> EventView:
        """Return an event, else UnknownRoomError."""
        ...

    async def state_group(self, number: int) -> StateGroupView:
        """Return a state group, else UnknownRoomError."""
        ...

    async def history(
        self, room_id: str, start: Place | None = None, limit: int = 100, *, backwards: bool = True, whole: bool = False
    ) -> Sequence[StoredEvent]:
        """Return a page of a room's history."""
        ...

    async def gaps(self, room_id: str, limit: int = 100) -> Sequence[tuple[str, int]]:
        """Return the events to backfill next, each with the depth of the event that follows it."""
        ...


async def refuse_rooms(*_: object) -> NoReturn:
    """Answer every call below ``/v1/rooms`` of a process that keeps no rooms."""
    raise RequestError(404, "this process keeps no rooms: start a master with --rooms, or with [rooms] in its file")


async def persist_events(request: ApiRequest, room: str) -> Answer:
    """Store events, and answer with their IDs."""
    read_query(request)
    grammar.check_values(request.body())
    try:
        body = json.loads(request.body(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    match body:
        case {"events": list(events), **rest} if not rest.keys() - {"backfilled"}:
            backfilled = rest.get("backfilled", False)
        case _:
            raise RequestError(400, 'the body is not {"backfilled": bool, "events": [{…}, …]}')
    if not isinstance(backfilled, bool):
        raise RequestError(400, "backfilled must be true or false")
    return Answer.json({"ids": list(await request.api.rooms.persist(room, events, backfilled=backfilled))})


async def read_room(request: ApiRequest, room: str) -> Answer:
    """Answer with a room's extremities, gaps and state."""
    read_query(request)
    view = await request.api.rooms.view(room)
    return Answer.json(view.to_json(await request.api.rooms.gaps(room)))


async def read_event(request: ApiRequest, room: str, event: str) -> Answer:
    """Answer with an event."""
    read_query(request)
    view = await request.api.rooms.event(room, event)
    return Answer.json(
        {
            **view.stored.to_json(),
            "next_event_ids": list(view.next_event_ids),
            "ex_outlier_stream_orderings": list(view.ex_outlier_stream_orderings),
        }
    )


async def read_state_group(request: ApiRequest, room: str, number: str) -> Answer:
    """Answer with a state group."""
    from replication.rooms.views import encode_state_map  # noqa: PLC0415 (few processes keep rooms)

    read_query(request)
    group = await request.api.rooms.state_group(read_token({"the state group": number}, "the state group"))
    if group.room_id != room:
        raise RequestError(404, f"room {room[:100]!r} has no state group {group.number}")
    return Answer.json(
        {
            "state_group": group.number,
            "prev_group": group.prev_group,
            "delta": encode_state_map(group.delta),
            "state": encode_state_map(group.state),
        }
    )


async def read_history(request: ApiRequest, room: str) -> Answer:
    """Answer with a page of a room's history."""
    from replication.rooms.ordering import Place  # noqa: PLC0415 (few processes keep rooms)

    query = read_query(request, [], ["from", "dir", "limit", "whole"])
    limit = read_limit(query, PAGE)
    direction, whole = query.get("dir", "b"), query.get("whole", "false")
    if direction not in ("b", "f") or whole not in ("true", "false"):
        raise RequestError(400, "dir is b or f, whole is true or false")
    try:
        start = Place.parse(query["from"]) if "from" in query else None
    except RoomError as error:
        raise RequestError(400, f"from: {error}") from error
    await request.api.rooms.view(room)
    backwards = direction == "b"
    nodes = await request.api.rooms.history(room, start, limit + 1, backwards=backwards, whole=whole == "true")
    page = nodes[:limit]
    end = (nodes[limit] if backwards else page[-1]).place.encode() if len(nodes) > limit else None
    return Answer.json({"events": [each.to_json() for each in page], "next": end})


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
