"""What the graph needs from outside: its tables, as a protocol.  Everything runs inside one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.rooms.event import Event, StateKey, StateMap


@attrs.frozen
class Stored:
    """What is held of an event that is stored; ``stream_ordering`` is below zero if it was backfilled."""

    event_id: str
    room_id: str
    depth: int
    stream_ordering: int
    outlier: bool
    rejected: str | None
    soft_failed: bool
    state_group: int | None

    @property
    def is_good(self) -> bool:
        """Whether it may be a forward extremity."""
        return not self.outlier and self.rejected is None and not self.soft_failed


@attrs.frozen
class Room:
    """What is held of a room as a whole.

    ``tangled`` says that some event is not deeper than one of its ``prev_events``: only then can there be a cycle that
    depths do not show.
    """

    room_version: str | None = None
    min_depth: int | None = None
    tangled: bool = False


@attrs.frozen
class Group:
    """A state group: ``delta`` on top of ``prev_group``, or all of the state; ``chain`` counts the groups below it."""

    prev_group: int | None
    delta: StateMap
    chain: int


@attrs.frozen
class Placed:
    """An event with its place in the graph, as it is to be stored."""

    event: Event
    depth: int
    stream_ordering: int
    state_group: int | None


@attrs.frozen
class Change:
    """One key of the current state that changed; ``event_id`` None: it is gone."""

    key: StateKey
    event_id: str | None
    was: str | None


class IRoomTables(Protocol):
    """The rooms' tables, for one room at a time."""

    def room(self, room_id: str) -> Room | None:
        """Return a room, None if nothing of it is stored; nobody else writes to it until the transaction ends."""
        ...

    def put_room(self, room_id: str, room: Room) -> None:
        """Store what is held of a room."""
        ...

    def stored(self, event_ids: Collection[str]) -> dict[str, Stored]:
        """Return those of the events that are stored."""
        ...

    def events(self, event_ids: Collection[str]) -> dict[str, Event]:
        """Return those of the events that are stored, whole."""
        ...

    def edges_from(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) for those of the events that are not outliers."""
        ...

    def edges_to(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) where the prev_event is one of those given, outliers' edges too."""
        ...

    def behind_good(self, event_ids: Collection[str]) -> set[str]:
        """Return those that are a ``prev_event`` of a good event: no outlier, not rejected, not soft-failed."""
        ...

    def forward(self, room_id: str) -> set[str]:
        """Return the forward extremities."""
        ...

    def set_forward(self, room_id: str, event_ids: Collection[str], at: int | None) -> None:
        """Replace the forward extremities, and log them at a stream ordering unless that is None."""
        ...

    def backward(self, room_id: str) -> set[str]:
        """Return the backward extremities."""
        ...

    def change_backward(self, room_id: str, add: Collection[str], remove: Collection[str]) -> None:
        """Add events that are missing, then remove those that are not any more."""
        ...

    def group(self, number: int) -> Group:
        """Return a state group; UnknownRoomError if there is none."""
        ...

    def group_state(self, number: int) -> dict[StateKey, str]:
        """Return the full state of a group."""
        ...

    def merge(self, groups: Sequence[int]) -> int | None:
        """Return the group that ascending ``groups`` were found to resolve to, None if nobody has asked yet."""
        ...

    def add_merge(self, groups: Sequence[int], result: int) -> None:
        """Remember what groups resolve to."""
        ...

    def add_group(self, room_id: str, prev_group: int | None, chain: int, rows: StateMap) -> int:
        """Store a state group and return its number."""
        ...

    def add_events(self, instance_name: str, placed: Sequence[Placed]) -> None:
        """Store events that were not."""
        ...

    def add_edges(self, edges: Iterable[tuple[str, str]], room_id: str) -> None:
        """Store (event, prev_event)."""
        ...

    def de_outlier(self, instance_name: str, placed: Placed) -> None:
        """Make an ordinary event of an outlier; ``placed`` has its new state group, and the ID that says so."""
        ...

    def await_state(self, group: int, event_ids: Collection[str]) -> None:
        """Remember state events of a full group that are not here yet."""
        ...

    def state_came(self, keys: Mapping[str, StateKey]) -> None:
        """Put events, each with the key that it sets, into the groups that await them."""
        ...

    def current_state(self, room_id: str) -> dict[StateKey, str]:
        """Return the current state."""
        ...

    def change_state(self, instance_name: str, room_id: str, at: int, changes: Sequence[Change]) -> None:
        """Change the current state, and log the changes at a stream ordering."""
        ...

    def local_members(self, room_id: str) -> Mapping[str, str]:
        """Return the memberships of our own users, by user."""
        ...

    def set_local_members(self, room_id: str, memberships: Mapping[str, str | None]) -> None:
        """Change memberships of our own users; None forgets one."""
        ...
