"""State resolution of room version 1 (Matrix specification, "Room version 1", state resolution).

Conflicts are settled in the order power levels, join rules, members, all others.  In the first three the events of one
key are tried from the least deep on: the last one before somebody is refused wins.  In the others they are tried from
the deepest on, and the first that is allowed wins.  Among equally deep ones the SHA-1 of the ID decides.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from replication.rooms.event import MEMBER
from replication.rooms.matrix.auth import JOIN_RULES, POWER_LEVELS, auth_keys, is_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.rooms.event import Event, StateKey, StateMap

_VERSION: Final = "1"


def resolve_v1(states: Sequence[StateMap], fetch: Callable[[Collection[str]], Mapping[str, Event]]) -> StateMap:
    """Return the resolution of several states; a key that some lack is no conflict."""
    candidates: dict[StateKey, set[str]] = {}
    for state in states:
        for key, event_id in state.items():
            candidates.setdefault(key, set()).add(event_id)
    agreed = {key: next(iter(ids)) for key, ids in candidates.items() if len(ids) == 1}
    events = fetch({each for ids in candidates.values() if len(ids) > 1 for each in ids})
    disputed = {
        key: [events[each] for each in ids if each in events] for key, ids in candidates.items() if len(ids) > 1
    }
    needed = {key for some in disputed.values() for event in some for key in auth_keys(event, _VERSION)}
    found = fetch({agreed[key] for key in needed if key in agreed})
    auth = {key: found[agreed[key]] for key in needed if agreed.get(key) in found}
    resolved = dict(agreed)
    for stage in (_is_power_levels, _is_join_rules, _is_member):
        settled = {key: _last_allowed(some, auth) for key, some in disputed.items() if some and stage(key)}
        auth.update(settled)
        resolved.update({key: event.event_id for key, event in settled.items()})
    for key, some in disputed.items():
        if some and key not in resolved:
            resolved[key] = _deepest_allowed(some, auth).event_id
    return resolved


def _is_power_levels(key: StateKey) -> bool:
    return key[0] == POWER_LEVELS


def _is_join_rules(key: StateKey) -> bool:
    return key[0] == JOIN_RULES


def _is_member(key: StateKey) -> bool:
    return key[0] == MEMBER


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
