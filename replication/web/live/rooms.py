"""A room as a picture: its graph up to one event, with the extremities and the state there; each event is a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from replication.errors import ReplicationError
from replication.rooms.drawing import encode_svg, mark_of, with_missing
from replication.web.live.tables import table, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.rooms.event import StateMap
    from replication.rooms.ordering import Place
    from replication.rooms.views import StoredEvent
    from replication.web.rooms import IRooms

DRAWN: Final = 40  # events
STATE: Final = 100  # rows of the state


async def room_section(rooms: IRooms, room: str, at: Place | None) -> str:
    """Return a room after the event at a place, or as it is now; or the reason why it cannot be shown."""
    try:
        return await _read_section(rooms, room, at)
    except ReplicationError as error:
        return f"<p>{text(error)}</p>"


async def _read_section(rooms: IRooms, room: str, at: Place | None) -> str:
    view = await rooms.view(room)
    events = await rooms.history(room, at, DRAWN + 1, backwards=True, whole=True)
    if not events:
        return f"<p>Room {text(room)} has no event at or before {text(at and at.encode())}.</p>"
    later = [] if at is None else await rooms.history(room, at, 1, backwards=False, whole=True)
    drawn, older = events[:DRAWN], events[1:2]
    forward = _ends(drawn) if later else view.forward_extremities
    marks = with_missing(map(mark_of, [each.to_json() for each in drawn]), view.backward_extremities)
    name = text(f"graph of {room}")
    steps = [
        _step(room, older[0].place if older else None, "one event back"),
        _step(room, later[0].place if later else None, "one event on"),
        f'<a href="?room={_query(room)}">now</a>' if later else "<span>now</span>",
    ]
    facts = [
        f"version {text(view.room_version or 'unknown')}",
        f"{len(view.forward_extremities)} forward and {len(view.backward_extremities)} backward extremities",
    ]
    return (
        f'<h2>Room {text(room)}</h2><p>{", ".join(facts)}</p><nav aria-label="steps">{" · ".join(steps)}</nav>'
        f'<div class="wide picture" tabindex="0" role="region" aria-label="{name}">'
        f"{encode_svg(room, marks, forward)}</div>"
        + _events_table(room, drawn)
        + await _state_table(rooms, view.current_state, drawn[0], now=not later)
    )


def _ends(events: Sequence[StoredEvent]) -> set[str]:
    """Return the forward extremities of a graph that ends with these events."""
    good = [each for each in events if not (each.outlier or each.rejected or each.soft_failed)]
    followed = {prev for each in good for prev in each.event.prev_event_ids}
    return {each.event.event_id for each in good} - followed


def _events_table(room: str, events: Sequence[StoredEvent]) -> str:
    rows = [
        [
            f'<a href="?room={_query(room)}&amp;at={each.place.encode()}">{text(each.event.event_id)}</a>',
            text(each.event.type),
            "" if each.event.state_key is None else text(repr(each.event.state_key)),
            text(each.event.sender or "-"),
            f"{each.depth:,}",
            ", ".join(
                name
                for name, has in (
                    ("outlier", each.outlier),
                    ("soft-failed", each.soft_failed),
                    ("rejected", each.rejected),
                )
                if has
            ),
        ]
        for each in events
    ]
    return table("Events", ("event", "type", "state key", "sender", "#depth", "flags"), rows, "None.")


async def _state_table(rooms: IRooms, current: StateMap, last: StoredEvent, *, now: bool) -> str:
    """Return the current state, or that after an event."""
    state, caption = current, "Current state"
    if not now:
        state, caption = {}, f"State after {text(last.event.event_id)}"
        if last.state_group is not None:
            state = (await rooms.state_group(last.state_group)).state
    rows = [[text(kind), text(repr(key)), text(event)] for (kind, key), event in sorted(state.items())]
    more = f"<p>{len(rows) - STATE:,} more rows.</p>" if len(rows) > STATE else ""
    return table(caption, ("type", "state key", "event"), rows[:STATE], "The state is empty, or not known.") + more


def _step(room: str, place: Place | None, label: str) -> str:
    if place is None:
        return f"<span>{label}</span>"
    return f'<a href="?room={_query(room)}&amp;at={place.encode()}">{label}</a>'


def _query(room: str) -> str:
    return text(quote(room, safe=""))
