"""State resolution of room versions 2 and later (Matrix specification, "Room version 2", state resolution).

The steps have the names of the specification.  ``fetch`` returns the stored events among the IDs that it receives.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from replication.rooms.event import CREATE, MEMBER
from replication.rooms.matrix.auth import (
    CREATOR_POWER,
    JOIN_RULES,
    POWER_LEVELS,
    auth_keys,
    creator_of,
    is_allowed,
    level_in,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from replication.rooms.event import Event, StateKey, StateMap
    from replication.rooms.resolution import Fetch


def resolve_v2(states: Sequence[StateMap], fetch: Fetch, room_version: str) -> StateMap:
    """Return the resolved state."""
    agreed, conflicted = _split(states)
    if not conflicted:
        return agreed
    events = _Events(fetch)
    full = events.stored(conflicted | _auth_difference(states, events))
    powerful = _power_events(full, events)
    state: dict[StateKey, str] = dict(agreed)
    _iterative_auth_checks(_power_order(powerful, events, room_version), state, events, room_version)
    rest = full - powerful
    _iterative_auth_checks(_mainline_order(rest, state.get((POWER_LEVELS, "")), events), state, events, room_version)
    return {**state, **agreed}


class _Events:
    """Events by ID; each is fetched once."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._known: dict[str, Event | None] = {}

    def get(self, event_id: str) -> Event | None:
        """Return the event, None if it is not stored."""
        self.load([event_id])
        return self._known[event_id]

    def load(self, event_ids: Iterable[str]) -> None:
        """Fetch many at once."""
        new = {each for each in event_ids if each not in self._known}
        if new:
            found = self._fetch(new)
            self._known.update({each: found.get(each) for each in new})

    def stored(self, event_ids: Collection[str]) -> set[str]:
        """Return those that are stored."""
        self.load(event_ids)
        return {each for each in event_ids if self._known[each] is not None}

    def auth_chain(self, event_ids: Collection[str]) -> set[str]:
        """Return the auth chain of the events: their auth events, the auth events of these, and so on."""
        chain: set[str] = set()
        edge = set(event_ids)
        while edge:
            self.load(edge)
            found = [event for each in edge if (event := self._known[each]) is not None]
            edge = {each for event in found for each in event.auth_event_ids} - chain
            chain |= edge
        return chain


def _split(states: Sequence[StateMap]) -> tuple[dict[StateKey, str], set[str]]:
    """Return the unconflicted state and the other events; a key that a state lacks is conflicted."""
    first, *others = states
    agreed = {key: each for key, each in first.items() if all(state.get(key) == each for state in others)}
    return agreed, {each for state in states for key, each in state.items() if key not in agreed}


def _auth_difference(states: Sequence[StateMap], events: _Events) -> set[str]:
    """Return the events that are in the full auth chain of some states, but not of all."""
    sets = [set(state.values()) for state in states]
    shared = sets[0].intersection(*sets[1:])
    base = events.auth_chain(shared)  # part of every chain
    chains = [events.auth_chain(each - shared) | base for each in sets]
    return chains[0].union(*chains[1:]) - chains[0].intersection(*chains[1:])


def _power_events(full: set[str], events: _Events) -> set[str]:
    """Return the power events of the full conflicted set, with their auth chains in that set."""
    powerful = {each for each in full if (event := events.get(each)) is not None and _is_power_event(event)}
    return powerful | (events.auth_chain(powerful) & full)


def _is_power_event(event: Event) -> bool:
    if event.key in ((POWER_LEVELS, ""), (JOIN_RULES, ""), (CREATE, "")):
        return True
    return event.type == MEMBER and event.membership in ("leave", "ban") and event.sender != event.state_key


def _power_order(event_ids: set[str], events: _Events, room_version: str) -> list[str]:
    """Return the reverse topological power ordering: auth events first; then by power, then by age."""
    weight = {each: _weight(each, events, room_version) for each in event_ids}
    auth_ids = {each: _auth_ids(each, events) & event_ids for each in event_ids}
    dependents: dict[str, list[str]] = {}
    for each, below in auth_ids.items():
        for lower in below:
            dependents.setdefault(lower, []).append(each)
    missing = {each: len(below) for each, below in auth_ids.items()}
    ready = [weight[each] for each, count in missing.items() if not count]
    heapify(ready)
    order = []
    while ready:
        event_id = heappop(ready)[-1]
        order.append(event_id)
        for each in dependents.get(event_id, ()):
            missing[each] -= 1
            if not missing[each]:
                heappush(ready, weight[each])
    return order


def _weight(event_id: str, events: _Events, room_version: str) -> tuple[int, int, str]:
    event = events.get(event_id)
    assert event is not None  # noqa: S101 - the caller has checked
    return (-_sender_power(event, events, room_version), event.origin_server_ts, event_id)


def _sender_power(event: Event, events: _Events, room_version: str) -> int:
    """Return the power level of an event's sender, by the event's auth events."""
    create = None
    events.load(event.auth_event_ids)
    for each in event.auth_event_ids:
        found = events.get(each)
        if found is not None and found.key == (POWER_LEVELS, ""):
            return level_in(found, event.sender)
        if found is not None and found.key == (CREATE, ""):
            create = found
    return CREATOR_POWER if create is not None and creator_of(create, room_version) == event.sender else 0


def _auth_ids(event_id: str, events: _Events) -> set[str]:
    event = events.get(event_id)
    return set() if event is None else set(event.auth_event_ids)


def _mainline_order(event_ids: set[str], power_levels: str | None, events: _Events) -> list[str]:
    """Return the events in mainline order: by the nearest mainline event in their chains of power levels."""
    mainline: dict[str, int] = {}
    at = power_levels
    while at is not None and at not in mainline:
        mainline[at] = len(mainline)
        at = _power_levels_below(at, events)

    def place(event_id: str) -> tuple[int, int, str]:
        event = events.get(event_id)
        assert event is not None  # noqa: S101 - only stored ones are ordered
        at: str | None = event_id
        seen: set[str] = set()
        while at is not None and at not in mainline and at not in seen:
            seen.add(at)
            at = _power_levels_below(at, events)
        depth = mainline.get(at, len(mainline)) if at is not None else len(mainline)
        return (-depth, event.origin_server_ts, event_id)

    return sorted(event_ids, key=place)


def _power_levels_below(event_id: str, events: _Events) -> str | None:
    ids = events.get(event_id)
    if ids is None:
        return None
    events.load(ids.auth_event_ids)
    for each in ids.auth_event_ids:
        event = events.get(each)
        if event is not None and event.key == (POWER_LEVELS, ""):
            return each
    return None


def _iterative_auth_checks(
    event_ids: Iterable[str], state: dict[StateKey, str], events: _Events, room_version: str
) -> None:
    """Apply the iterative auth checks: add each event to ``state`` that the state so far allows."""
    for event_id in event_ids:
        event = events.get(event_id)
        if event is None or event.key is None:
            continue
        auth: dict[StateKey, Event] = {}
        needed = auth_keys(event, room_version)
        events.load([*event.auth_event_ids, *(state[each] for each in needed if each in state)])
        for each in event.auth_event_ids:
            found = events.get(each)
            if found is not None and found.key is not None and found.rejected is None:
                auth[found.key] = found
        for key in needed & state.keys():
            found = events.get(state[key])
            if found is not None and found.rejected is None:
                auth[key] = found
        if is_allowed(event, auth, room_version):
            state[event.key] = event_id
