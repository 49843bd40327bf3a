"""JSON of room events: an event is stored whole or not at all, and what is stored can be read and published."""

from __future__ import annotations

import json
from typing import Any

from replication.errors import RoomError, StoreError
from replication.rooms.event import Event
from replication.rooms.graph import CHUNK
from replication.rooms.views import encode_state_map
from replication.storage.tables.room_queries import RoomReads
from replication.synapse.rooms import BACKFILL, EVENTS
from replication.wire import grammar
from tests.rooms.recorded import Keeper, in_memory

ROOM = "!r:far.test"
TEMPLATE = in_memory()
Keeper(statements=TEMPLATE)
TABLES = TEMPLATE.database.serialize()  # to make them takes longer than a check


def check(data: bytes) -> None:
    """Persist the events of ``{"events": […], "backfilled": bool}``, as a request of HTTP."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return  # answered before (the target http)
    sources = body.get("events") if isinstance(body, dict) else None
    if not isinstance(sources, list):
        return
    events = [event for each in sources[:CHUNK] if (event := read(each)) is not None]
    keeper = new_keeper()
    backfilled = body.get("backfilled") is True
    for chunk in (events[:1], events[1:2], events[2:]):
        persist(keeper, chunk, backfilled=backfilled)


def new_keeper() -> Keeper:
    """Return a keeper with empty tables."""
    session = in_memory()
    session.database.deserialize(TABLES)
    return Keeper(statements=session)


def read(source: object) -> Event | None:
    """Return an event, None if it is refused."""
    try:
        event = Event.read(ROOM, source)
    except RoomError as error:
        assert str(error)
        str(error).encode()  # an answer of HTTP has it
        return None
    again = Event.from_text(event.text, depth=event.depth or 0, rejected=event.rejected)
    assert again.text == event.text
    return event


def persist(keeper: Keeper, events: list[Event], *, backfilled: bool) -> None:
    """Store events; then read the room."""
    try:
        sent = keeper.take(ROOM, events, backfilled=backfilled)
    except (RoomError, StoreError) as error:
        assert str(error)
        return
    typed: Any = BACKFILL if backfilled else EVENTS
    for _, text in sent:
        grammar.row_text(text)
        typed.read_row(text)
    if not events:
        return
    reads = RoomReads(keeper.statements)
    grammar.encode_json(reads.view(ROOM).to_json(reads.gaps(ROOM, 10)))
    for stored in reads.history(ROOM, None, 10, backwards=True, whole=True):
        grammar.encode_json(stored.to_json())
    for each in events:
        view = reads.event_view(ROOM, each.event_id)
        grammar.encode_json(view.stored.to_json())
        if view.stored.state_group is not None:
            encode_state_map(reads.group(view.stored.state_group).state)
