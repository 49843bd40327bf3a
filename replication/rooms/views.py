"""What is shown of a room, its events and its state groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from replication.rooms.ordering import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.rooms.event import Event, StateKey, StateMap


@attrs.frozen
class Node:
    """An event and its place."""

    event: Event
    depth: int
    stream_ordering: int
    instance_name: str
    outlier: bool
    rejected: str | None
    soft_failed: bool
    out_of_band_membership: bool
    state_group: int | None

    @property
    def place(self) -> Place:
        """Where it is in its room's history."""
        return Place(self.depth, self.stream_ordering)

    def describe(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        event = self.event
        return {
            "event_id": event.event_id,
            "room_id": event.room_id,
            "type": event.type,
            "state_key": event.state_key,
            "sender": event.sender,
            "redacts": event.redacts,
            "content": event.content,
            "origin_server_ts": event.origin_server_ts,
            "depth": self.depth,
            "topological_ordering": self.depth,
            "stream_ordering": self.stream_ordering,
            "instance_name": self.instance_name,
            "prev_event_ids": list(event.prev_event_ids),
            "auth_event_ids": list(event.auth_event_ids),
            "outlier": self.outlier,
            "rejected": self.rejected,
            "soft_failed": self.soft_failed,
            "out_of_band_membership": self.out_of_band_membership,
            "state_group": self.state_group,
        }


@attrs.frozen
class RoomView:
    """A room as a whole."""

    room_id: str
    room_version: str | None
    forward_extremities: tuple[str, ...]
    backward_extremities: tuple[str, ...]
    min_depth: int | None
    current_state: dict[StateKey, str]

    def describe(self, gaps: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """Return it, and the gaps to backfill next, as JSON has them."""
        return {
            "room_id": self.room_id,
            "room_version": self.room_version,
            "forward_extremities": list(self.forward_extremities),
            "backward_extremities": list(self.backward_extremities),
            "min_depth": self.min_depth,
            "current_state": spell_state_map(self.current_state),
            "gaps": [{"event_id": event_id, "depth": depth} for event_id, depth in gaps],
        }


@attrs.frozen
class GroupView:
    """A state group: its delta on ``prev_group``, and all of its state."""

    number: int
    room_id: str
    prev_group: int | None
    delta: dict[StateKey, str]
    state: dict[StateKey, str]


@attrs.frozen
class Card:
    """One event, the events that follow it directly, and the numbers under which it was told of again."""

    node: Node
    next_event_ids: tuple[str, ...]
    told_again: tuple[int, ...]


def spell_state_map(state: StateMap) -> list[list[str]]:
    """Return a state as a sorted list of [type, state_key, event_id]."""
    return sorted([*key, event_id] for key, event_id in state.items())
