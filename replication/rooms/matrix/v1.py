"""State resolution of room version 1 (Matrix specification, "Room version 1", state resolution).

Conflicts are resolved in the order power levels, join rules, members, all others.  Of the first three, the events of a
key are checked in ascending depth, and the last one before the first that is not allowed wins.  Of the others they are
checked in descending depth, and the first that is allowed wins.  Equal depths are ordered by the SHA-1 of the event ID.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from replication.rooms.event import MEMBER
from replication.rooms.matrix.auth import JOIN_RULES, POWER_LEVELS, auth_keys, is_allowed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.rooms.event import Event, StateKey, StateMap
    from replication.rooms.resolution import Fetch

_VERSION: Final = "1"


def resolve_v1(states: Sequence[StateMap], fetch: Fetch) -> StateMap:
    """Return the resolved state; a key that only some states have is not a conflict."""
    agreed, candidates = split(states)
    events = fetch({each for ids in candidates.values() for each in ids})
    disputed = {key: [events[each] for each in ids if each in events] for key, ids in candidates.items()}
    needed = {key for some in disputed.values() for event in some for key in auth_keys(event, _VERSION)}
    found = fetch({agreed[key] for key in needed if key in agreed})
    auth = {key: found[agreed[key]] for key in needed if agreed.get(key) in found}
    resolved = dict(agreed)
    for kind in (POWER_LEVELS, JOIN_RULES, MEMBER):
        winners = {key: _last_allowed(some, auth) for key, some in disputed.items() if some and key[0] == kind}
        auth.update(winners)
        resolved.update({key: event.event_id for key, event in winners.items()})
    for key, some in disputed.items():
        if some and key not in resolved:
            resolved[key] = _deepest_allowed(some, auth).event_id
    return resolved


def split(states: Sequence[StateMap]) -> tuple[dict[StateKey, str], dict[StateKey, set[str]]]:
    """Return the keys whose states agree, and the candidates for the other keys."""
    found: dict[StateKey, set[str]] = {}
    for state in states:
        for key, event_id in state.items():
            found.setdefault(key, set()).add(event_id)
    agreed = {key: next(iter(candidates)) for key, candidates in found.items() if len(candidates) == 1}
    return agreed, {key: candidates for key, candidates in found.items() if len(candidates) > 1}


def _deepest_first(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda it: (-(it.depth or 0), hashlib.sha1(it.event_id.encode()).hexdigest()))  # noqa: S324


def _last_allowed(events: Sequence[Event], auth: Mapping[StateKey, Event]) -> Event:
    first, *others = reversed(_deepest_first(events))
    state, winner = dict(auth), first
    for event in others:
        if winner.key is not None:
            state[winner.key] = winner
        if not is_allowed(event, state, _VERSION):
            break
        winner = event
    return winner


def _deepest_allowed(events: Sequence[Event], auth: Mapping[StateKey, Event]) -> Event:
    ordered = _deepest_first(events)
    return next((event for event in ordered if is_allowed(event, auth, _VERSION)), ordered[-1])
