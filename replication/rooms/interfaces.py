"""The tables that the room graph needs, as a protocol; all calls run in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.rooms.event import Event, StateKey, StateMap


@attrs.frozen
class EventMetadata:
    """A stored event without its content; ``stream_ordering`` is negative if it was backfilled."""

    event_id: str
    room_id: str
    depth: int
    stream_ordering: int
    outlier: bool = attrs.field(converter=bool)
    rejected: str | None
    soft_failed: bool = attrs.field(converter=bool)
    state_group: int | None

    @property
    def is_good(self) -> bool:
        """Whether the event may be a forward extremity."""
        return not self.outlier and self.rejected is None and not self.soft_failed


class Room(msgspec.Struct, frozen=True):
    """A room.

    ``tangled`` is set if some event is not deeper than one of its ``prev_events``.  Only then can there be a cycle that
    depths do not rule out.
    """

    room_version: str | None = None
    min_depth: int | None = None
    tangled: bool = False


class StateGroup(msgspec.Struct, frozen=True):
    """A state group: a ``delta`` on ``prev_group``, or the full state; ``chain`` counts the groups below it."""

    prev_group: int | None
    delta: StateMap
    chain: int


class PlacedEvent(msgspec.Struct, frozen=True):
    """An event to store, with its place in the graph."""

    event: Event
    depth: int
    stream_ordering: int
    state_group: int | None


class StateChange(msgspec.Struct, frozen=True):
    """A changed key of the current state; ``event_id`` is None if the key was removed, ``was`` None if it is new."""

    key: StateKey
    event_id: str | None
    was: str | None


class IRoomTables(Protocol):
    """The tables of rooms, used for one room at a time."""

    def room(self, room_id: str) -> Room | None:
        """Return a room, None if it is unknown, and lock it until the transaction ends."""
        ...

    def put_room(self, room_id: str, room: Room) -> None:
        """Store a room."""
        ...

    def metadata(self, event_ids: Collection[str]) -> dict[str, EventMetadata]:
        """Return the metadata of those events that are stored."""
        ...

    def events(self, event_ids: Collection[str]) -> dict[str, Event]:
        """Return those events that are stored."""
        ...

    def edges_from(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) for those events that are not outliers."""
        ...

    def edges_to(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) for the events that name these, outliers included."""
        ...

    def followed_by_good(self, event_ids: Collection[str]) -> set[str]:
        """Return those that a good event names: no outlier, not rejected, not soft-failed."""
        ...

    def forward(self, room_id: str) -> set[str]:
        """Return the forward extremities."""
        ...

    def set_forward(self, room_id: str, event_ids: Collection[str], at: int | None) -> None:
        """Replace the forward extremities, and log them at stream ordering ``at`` unless that is None."""
        ...

    def backward(self, room_id: str) -> set[str]:
        """Return the backward extremities."""
        ...

    def change_backward(self, room_id: str, add: Collection[str], remove: Collection[str]) -> None:
        """Add missing events, then remove those that have been stored."""
        ...

    def group(self, number: int) -> StateGroup:
        """Return a state group; UnknownRoomError if there is none."""
        ...

    def group_state(self, number: int) -> dict[StateKey, str]:
        """Return the full state of a group."""
        ...

    def resolved_group(self, groups: Sequence[int]) -> int | None:
        """Return the group that ``groups``, in ascending order, resolve to, None if that is not known."""
        ...

    def add_resolved_group(self, groups: Sequence[int], result: int) -> None:
        """Store the group that ``groups`` resolve to."""
        ...

    def add_group(self, room_id: str, prev_group: int | None, chain: int, rows: StateMap) -> int:
        """Store a state group and return its number."""
        ...

    def add_events(self, instance_name: str, placed: Sequence[PlacedEvent]) -> None:
        """Store new events."""
        ...

    def add_edges(self, edges: Iterable[tuple[str, str]], room_id: str) -> None:
        """Store (event, prev_event)."""
        ...

    def de_outlier(self, instance_name: str, placed: PlacedEvent) -> None:
        """De-outlier an event; ``placed`` has its new state group and the stream ID of the change."""
        ...

    def add_awaited_state(self, group: int, event_ids: Collection[str]) -> None:
        """Store which state events of a full group are missing."""
        ...

    def fill_awaited_state(self, keys: Mapping[str, StateKey]) -> None:
        """Add new state events, by their keys, to the groups that lack them."""
        ...

    def current_state(self, room_id: str) -> dict[StateKey, str]:
        """Return the current state."""
        ...

    def change_state(self, instance_name: str, room_id: str, at: int, changes: Sequence[StateChange]) -> None:
        """Change the current state, and log the changes at stream ordering ``at``."""
        ...

    def local_members(self, room_id: str) -> Mapping[str, str]:
        """Return the memberships of local users, by user ID."""
        ...

    def set_local_members(self, room_id: str, memberships: Mapping[str, str | None]) -> None:
        """Change memberships of local users; None removes one."""
        ...
