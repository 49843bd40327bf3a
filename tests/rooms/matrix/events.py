"""Events of a Matrix room, for tests of its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.rooms.event import Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.rooms.event import StateKey

ROOM = "!r:here"
ALICE, BOB, CAROL = "@alice:here", "@bob:here", "@carol:there"

POWER = {"users": {ALICE: 100, BOB: 50}, "users_default": 0, "state_default": 50, "events_default": 0}


def event(kind: str, sender: str = ALICE, state_key: str | None = None, **more: Any) -> Event:
    """Return an event whose ID describes it."""
    more.setdefault("event_id", f"${kind}|{sender}|{state_key}|{more.get('content')}")
    more.setdefault("prev_event_ids", ["$before"] if kind != "m.room.create" else [])
    return Event.read(ROOM, {"type": kind, "sender": sender, "state_key": state_key, **more})


def member(user: str, membership: str, sender: str | None = None, **content: Any) -> Event:
    """Return a membership."""
    return event("m.room.member", sender or user, user, content={"membership": membership, **content})


def state(*events: Event) -> dict[StateKey, Event]:
    """Return a state of these events."""
    return {each.key: each for each in events if each.key is not None}


CREATE = event("m.room.create", ALICE, "", content={"creator": ALICE})
LEVELS = event("m.room.power_levels", ALICE, "", content=POWER)


def rules(name: str) -> Event:
    """Return join rules."""
    return event("m.room.join_rules", ALICE, "", content={"join_rule": name})


def usual(*more: Event) -> Mapping[StateKey, Event]:
    """Return the state of a public room with Alice (100) and Bob (50), and ``more``."""
    return state(CREATE, LEVELS, rules("public"), member(ALICE, "join"), member(BOB, "join"), *more)
