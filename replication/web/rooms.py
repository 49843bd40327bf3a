"""Rooms over HTTP (``interfaces``, section 8)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol

from replication.errors import RoomError
from replication.rooms.ordering import Place
from replication.rooms.views import spell_state_map
from replication.web.exchange import Answer, Exchange, refuse, say
from replication.web.query import read_query, read_token

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Coroutine, Mapping, Sequence

    from replication.rooms.views import Card, GroupView, Node, RoomView
    from replication.wire.grammar import Token

    Call = Callable[[Exchange], Coroutine[Any, Any, Answer]]

PAGE: Final = 100  # events, unless the caller says
MAX_PAGE: Final = 10_000


class IRooms(Protocol):
    """The rooms that are shown: a ``roomkeeper.Rooms``."""

    @property
    def streams(self) -> Container[str]:
        """Streams whose facts are the events of rooms, and nothing else."""
        ...

    async def persist(
        self, room_id: str, events: Sequence[Mapping[str, object]], *, backfilled: bool = False
    ) -> Sequence[Token]:
        """Store events, all or none, and return their IDs; RoomError says which cannot be, and why."""
        ...

    async def view(self, room_id: str) -> RoomView:
        """Return a room, else UnknownRoomError."""
        ...

    async def event(self, room_id: str, event_id: str) -> Card:
        """Return an event, else UnknownRoomError."""
        ...

    async def state_group(self, number: int) -> GroupView:
        """Return a state group, else UnknownRoomError."""
        ...

    async def history(
        self, room_id: str, start: Place | None = None, limit: int = 100, *, backwards: bool = True, whole: bool = False
    ) -> Sequence[Node]:
        """Return a page of a room's history."""
        ...

    async def gaps(self, room_id: str, limit: int = 100) -> Sequence[tuple[str, int]]:
        """Return the events to backfill next, and how deep what follows them is."""
        ...


class RoomCalls:
    """What answers the calls below ``/v1/rooms``."""

    def __init__(self, rooms: IRooms) -> None:
        self.streams = rooms.streams
        self._rooms = rooms

    def find(self, path: Sequence[str], method: str) -> tuple[str, str, Call] | None:
        """Return what a path (after ``v1/rooms``) is called in metrics, its method and what answers it, or None."""
        match path:
            case [room]:
                return "room", "GET", lambda request: self._view(room, request)
            case [room, "events"] if method == "POST":
                return "room events", "POST", lambda request: self._persist(room, request)
            case [room, "events"]:
                return "room history", "GET", lambda request: self._history(room, request)
            case [room, "events", event]:
                return "room event", "GET", lambda request: self._event(room, event, request)
            case [room, "state_groups", number]:
                return "room state group", "GET", lambda request: self._state_group(room, number, request)
        return None

    async def _persist(self, room: str, request: Exchange) -> Answer:
        read_query(request)
        try:
            asked = json.loads(request.body(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise refuse(400, f"the body is not JSON: {error}") from error
        match asked:
            case {"events": list(events), **rest} if not rest.keys() - {"backfilled"}:
                backfilled = rest.get("backfilled", False)
            case _:
                raise refuse(400, 'the body is not {"backfilled": bool, "events": [{…}, …]}')
        if not isinstance(backfilled, bool):
            raise refuse(400, "backfilled must be true or false")
        return say({"ids": list(await self._rooms.persist(room, events, backfilled=backfilled))})

    async def _view(self, room: str, request: Exchange) -> Answer:
        read_query(request)
        view = await self._rooms.view(room)
        return say(view.describe(await self._rooms.gaps(room)))

    async def _event(self, room: str, event: str, request: Exchange) -> Answer:
        read_query(request)
        card = await self._rooms.event(room, event)
        return say(
            {
                **card.node.describe(),
                "next_event_ids": list(card.next_event_ids),
                "ex_outlier_stream_orderings": list(card.told_again),
            }
        )

    async def _state_group(self, room: str, number: str, request: Exchange) -> Answer:
        read_query(request)
        group = await self._rooms.state_group(read_token({"the state group": number}, "the state group"))
        if group.room_id != room:
            raise refuse(404, f"room {room[:100]!r} has no state group {group.number}")
        return say(
            {
                "state_group": group.number,
                "prev_group": group.prev_group,
                "delta": spell_state_map(group.delta),
                "state": spell_state_map(group.state),
            }
        )

    async def _history(self, room: str, request: Exchange) -> Answer:
        query = read_query(request, [], ["from", "dir", "limit", "whole"])
        limit = read_token(query, "limit") if "limit" in query else PAGE
        if not 1 <= limit <= MAX_PAGE:
            raise refuse(400, f"limit: {limit} is not between 1 and {MAX_PAGE}")
        direction, whole = query.get("dir", "b"), query.get("whole", "false")
        if direction not in ("b", "f") or whole not in ("true", "false"):
            raise refuse(400, "dir is b or f, whole is true or false")
        try:
            start = Place.parse(query["from"]) if "from" in query else None
        except RoomError as error:
            raise refuse(400, f"from: {error}") from error
        await self._rooms.view(room)
        backwards = direction == "b"
        nodes = await self._rooms.history(room, start, limit + 1, backwards=backwards, whole=whole == "true")
        shown = nodes[:limit]
        end = None
        if len(nodes) > limit:
            end = (nodes[limit] if backwards else shown[-1]).place.spell()
        return say({"events": [each.describe() for each in shown], "next": end})


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
