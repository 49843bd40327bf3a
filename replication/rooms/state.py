"""State groups: which state an event stands on, shared by all events that have the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from replication.errors import RoomError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from replication.rooms.event import Event, StateKey, StateMap
    from replication.rooms.resolution import Fetch, Resolver
    from replication.rooms.seams import IRoomTables

MAX_CHAIN: Final = 100  # deltas on top of each other (protocol H6)


@attrs.frozen
class Context:
    """The state around an event: its groups before and after, and how the latter differs from ``prev_group``."""

    before: int
    after: int
    prev_group: int | None = None
    delta: StateMap | None = None


class States:
    """The state groups of one room, read and added to within one transaction.

    ``fetch`` returns events, of what is stored and of what is about to be.
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
        """Return all of a group's state."""
        if group not in self._full:
            self._full[group] = self._tables.group_state(group)
        return self._full[group]

    def resolve(self, groups: Sequence[int]) -> tuple[StateMap, int | None]:
        """Return the one state of several groups, and a group that is known to have it."""
        known = self._tables.merge(sorted(groups))
        if known is not None:
            return self.full(known), known
        states = [self.full(each) for each in groups]
        state = self._resolver(states, self._fetch, self.room_version)
        return state, next((each for each in groups if self.full(each) == state), None)

    def around(self, event: Event, before: Context) -> Context:
        """Return the context of ``event``, where ``before`` tells of the group before it."""
        key = event.key
        if key is None:
            return before
        group = self._add(before.before, {key: event.event_id})
        return Context(before.before, group, before.before, {key: event.event_id})

    def given(self, event: Event) -> Context:
        """Return the group of the state that came along with an event.

        A state event that is not here yet counts from when it comes: until then nobody knows which key it sets.
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
                raise RoomError(f"event {event.event_id!r}: {event_id!r} of its state_before is no state event")
            if state.setdefault(key, event_id) != event_id:
                raise RoomError(f"event {event.event_id!r}: its state_before has two events for {key!r}")
        group = self._add(None, state)
        self._tables.await_state(group, awaited)
        return Context(group, group)

    def merged(self, groups: Sequence[int]) -> Context:
        """Return the group of the state where branches meet: the one they share, or that of their resolution."""
        groups = sorted(set(groups))
        if not groups:
            group = self._add(None, {})
            return Context(group, group)
        if len(groups) == 1:
            return self._known(groups[0])
        known = self._tables.merge(groups)
        if known is None:
            state, known = self.resolve(groups)
            known = known or self._nearest(set(groups), state)
            self._tables.add_merge(groups, known)
        return Context(known, known) if known in groups else self._known(known)

    def _known(self, number: int) -> Context:
        group = self._tables.group(number)
        if group.prev_group is None:
            return Context(number, number)
        return Context(number, number, group.prev_group, group.delta)

    def _nearest(self, groups: Collection[int], state: StateMap) -> int:
        """Add a group for ``state``, a delta on the group that it differs least from.

        A delta cannot take a key away (trap 50): a group that has more keys is no ground for one.  Of equally near
        ones any would do; the first of a set is the one that a Synapse takes.
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
