"""Rooms, events and state groups as callers read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from replication.rooms.ordering import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.rooms.event import Event, StateKey, StateMap


@attrs.frozen
class StoredEvent:
    """An event with its place in the room and its flags."""

    event: Event
    depth: int
    stream_ordering: int
    instance_name: str
    outlier: bool = attrs.field(converter=bool)
    rejected: str | None
    soft_failed: bool = attrs.field(converter=bool)
    out_of_band_membership: bool = attrs.field(converter=bool)
    state_group: int | None

    @property
    def place(self) -> Place:
        """Its place in the room's history."""
        return Place(self.depth, self.stream_ordering)

    def to_json(self) -> dict[str, Any]:
        """Return the event's JSON object."""
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


class RoomView(msgspec.Struct, frozen=True):
    """A room: extremities, smallest depth and current state."""

    room_id: str
    room_version: str | None
    forward_extremities: tuple[str, ...]
    backward_extremities: tuple[str, ...]
    min_depth: int | None
    current_state: dict[StateKey, str]

    def to_json(self, gaps: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """Return the room's JSON object; ``gaps`` are missing events and the depths of the events that follow."""
        return {
            "room_id": self.room_id,
            "room_version": self.room_version,
            "forward_extremities": list(self.forward_extremities),
            "backward_extremities": list(self.backward_extremities),
            "min_depth": self.min_depth,
            "current_state": encode_state_map(self.current_state),
            "gaps": [{"event_id": event_id, "depth": depth} for event_id, depth in gaps],
        }


class StateGroupView(msgspec.Struct, frozen=True):
    """A state group: its full state, and ``delta``, its difference from ``prev_group``."""

    number: int
    room_id: str
    prev_group: int | None
    delta: dict[StateKey, str]
    state: dict[StateKey, str]


class EventView(msgspec.Struct, frozen=True):
    """An event, the events that follow it directly, and the stream IDs under which it was de-outliered."""

    stored: StoredEvent
    next_event_ids: tuple[str, ...]
    ex_outlier_stream_orderings: tuple[int, ...]


def encode_state_map(state: StateMap) -> list[list[str]]:
    """Return a state as a sorted list of [type, state_key, event_id]."""
    return sorted([*key, event_id] for key, event_id in state.items())
