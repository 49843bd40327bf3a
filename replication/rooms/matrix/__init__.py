"""State resolution as the Matrix specification has it: version 1, and 2 for room versions 2 and up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.rooms.matrix.v1 import resolve_v1
from replication.rooms.matrix.v2 import resolve_v2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.rooms.event import Event, StateMap


def resolve(
    states: Sequence[StateMap], fetch: Callable[[Collection[str]], Mapping[str, Event]], room_version: str
) -> StateMap:
    """Return the one state of several, as a room of that version says."""
    if room_version == "1":
        return resolve_v1(states, fetch)
    return resolve_v2(states, fetch, room_version)
