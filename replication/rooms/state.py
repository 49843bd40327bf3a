"""State groups: each event refers to the group of its state, and events with equal state share a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from replication.errors import RoomError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from replication.rooms.event import Event, StateKey, StateMap
    from replication.rooms.interfaces import IRoomTables
    from replication.rooms.resolution import Fetch, Resolver

MAX_CHAIN: Final = 100  # the longest chain of deltas (docs/protocol/rooms.md H6)


class Context(msgspec.Struct, frozen=True):
    """The groups of the state before and after an event, and the difference of the group after from ``prev_group``."""

    before: int
    after: int
    prev_group: int | None = None
    delta: StateMap | None = None


class States:
    """The state groups of one room, read and added to in one transaction.

    ``fetch`` returns events, stored ones and those that are being persisted.
    """

    def __init__(
        self, tables: IRoomTables, room_id: str, resolver: Resolver, fetch: Fetch, room_version: str | None
    ) -> None:
        self._tables = tables
        self._fetch = fetch
        self._room_id = room_id
        self._resolver = resolver
        self.room_version = room_version
        self._full: dict[int, StateMap] = {}

    def full(self, group: int) -> StateMap:
        """Return the full state of a group."""
        if group not in self._full:
            self._full[group] = self._tables.group_state(group)
        return self._full[group]

    def resolve(self, groups: Sequence[int]) -> tuple[StateMap, int | None]:
        """Return the resolved state of several groups, and the group with that state, None if none is stored."""
        known = self._tables.resolved_group(sorted(groups))
        if known is not None:
            return self.full(known), known
        states = [self.full(each) for each in groups]
        state = self._resolver(states, self._fetch, self.room_version)
        return state, next((each for each in groups if self.full(each) == state), None)

    def around(self, event: Event, before: Context) -> Context:
        """Return the context of ``event``; ``before`` is the context of the state before it."""
        key = event.key
        if key is None:
            return before
        group = self._add(before.before, {key: event.event_id})
        return Context(before.before, group, before.before, {key: event.event_id})

    def given(self, event: Event) -> Context:
        """Return the context of an event's ``state_before``.

        A state event that is not stored yet is added to the group when it is persisted: its key is not known before.
        """
        named = event.state_before or ()
        found = self._fetch([each for each in named if isinstance(each, str)])
        state: dict[StateKey, str] = {}
        awaited = []
        for each in named:
            if isinstance(each, str) and each not in found:
                awaited.append(each)
                continue
            key: StateKey | None
            if isinstance(each, str):
                key, event_id = found[each].key, each
                if found[each].room_id != self._room_id:
                    raise RoomError(f"event {event.event_id!r}: {each!r} of its state_before is in another room")
            else:
                key, event_id = (each[0], each[1]), each[2]
            if key is None:
                raise RoomError(f"event {event.event_id!r}: {event_id!r} of its state_before is not a state event")
            if state.setdefault(key, event_id) != event_id:
                raise RoomError(f"event {event.event_id!r}: its state_before has two events for {key!r}")
        group = self._add(None, state)
        self._tables.add_awaited_state(group, awaited)
        return Context(group, group)

    def merged(self, groups: Sequence[int]) -> Context:
        """Return the context where branches meet: their common group, or the group of the resolved state."""
        groups = sorted(set(groups))
        if not groups:
            group = self._add(None, {})
            return Context(group, group)
        if len(groups) == 1:
            return self._known(groups[0])
        known = self._tables.resolved_group(groups)
        if known is None:
            state, known = self.resolve(groups)
            known = known or self._nearest(set(groups), state)
            self._tables.add_resolved_group(groups, known)
        return Context(known, known) if known in groups else self._known(known)

    def _known(self, number: int) -> Context:
        group = self._tables.group(number)
        if group.prev_group is None:
            return Context(number, number)
        return Context(number, number, group.prev_group, group.delta)

    def _nearest(self, groups: Collection[int], state: StateMap) -> int:
        """Add a group for ``state``, as a delta on the group that differs least from it.

        A delta cannot remove a key (docs/protocol/traps.md 50), so groups with other keys are not considered.  Of
        equally near groups the first of the set is taken, as Synapse does.
        """
        deltas = [
            (each, {key: event_id for key, event_id in state.items() if self.full(each).get(key) != event_id})
            for each in groups
            if self.full(each).keys() <= state.keys()
        ]
        if not deltas:
            return self._add(None, state)
        return self._add(*min(deltas, key=lambda it: len(it[1])))

    def _add(self, prev_group: int | None, rows: StateMap) -> int:
        chain = 0
        if prev_group is not None:
            chain = self._tables.group(prev_group).chain + 1
            if chain > MAX_CHAIN:
                rows = {**self.full(prev_group), **rows}
                prev_group, chain = None, 0
        return self._tables.add_group(self._room_id, prev_group, chain, rows)
