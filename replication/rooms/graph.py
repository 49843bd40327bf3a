"""Persist events: add a chunk of events to a room's graph, and make the rows of its stream (docs/protocol/rooms.md H).

``persist`` runs in one transaction.  If it raises, the caller must roll the transaction back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import msgspec
from msgspec.structs import replace

from replication.errors import RoomError, UnknownRoomError
from replication.rooms.event import CREATE, MAX_DEPTH, MEMBER, Event, encode_backfill, encode_ev, encode_state
from replication.rooms.extremities import are_stuck, missing, new_forward
from replication.rooms.interfaces import PlacedEvent, Room, StateChange
from replication.rooms.resolution import version_of
from replication.rooms.state import Context, States

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from replication.rooms.event import StateKey, StateMap
    from replication.rooms.interfaces import EventMetadata, IRoomTables
    from replication.rooms.resolution import Resolver

CHUNK: Final = 100  # the most events of a room that are persisted together (docs/protocol/rooms.md H1)


class Rules(msgspec.Struct, frozen=True):
    """How a server persists events.

    Attributes:
        instance_name: the writer of the events.
        resolver: resolves the state where branches meet.
        is_local: whether a user ID belongs to this server.
        flag: encodes a boolean in a row, as Synapse's database would.
        now: returns Unix time in milliseconds.

    """

    instance_name: str
    resolver: Resolver
    is_local: Callable[[str], bool]
    flag: Callable[[bool], object]
    now: Callable[[], int]


def persist(
    tables: IRoomTables, rules: Rules, room_id: str, events: Sequence[Event], ids: Sequence[int], *, backfilled: bool
) -> list[list[list[object]]]:
    """Store a chunk of one room's events and return the rows of each ID.

    Args:
        tables: the tables of rooms.
        rules: how this server persists events.
        room_id: the room of all events.
        events: at most CHUNK events.
        ids: one reserved stream ID for each event: positive, ascending; stored negative if ``backfilled``.
        backfilled: whether the events are of the past.

    Raises:
        RoomError: an event cannot be part of the graph; the message names it.

    """
    return _Persisting(tables, rules, room_id, events, backfilled=backfilled).run(ids)


def recalculate(tables: IRoomTables, rules: Rules, room_id: str, number: int) -> list[list[object]]:
    """Resolve the current state again, without a new event, and return the rows of the changes.

    ``number`` is the stream ID of the changes.  UnknownRoomError if the room has no state.
    """
    return _Persisting(tables, rules, room_id, (), backfilled=False).recalculate(number)


class _Persisting:
    def __init__(
        self, tables: IRoomTables, rules: Rules, room_id: str, events: Sequence[Event], *, backfilled: bool
    ) -> None:
        self._tables, self._rules, self._room_id, self._backfilled = tables, rules, room_id, backfilled
        self._room = tables.room(room_id) or Room()
        named = {each for event in events for each in (event.event_id, *event.prev_event_ids)}
        self._known: dict[str, EventMetadata] = tables.metadata(named)
        self._events = events
        self._batch = _first_copies(events)
        self._depths = self._find_depths()
        self._rows: dict[int, list[list[object]]] = {}

    def run(self, ids: Sequence[int]) -> list[list[list[object]]]:
        self._check()
        version = self._version()
        new = {each: event.key for each, event in self._batch.items() if event.key and each not in self._known}
        if new:
            self._tables.fill_awaited_state(new)
        self._states = States(self._tables, self._room_id, self._rules.resolver, self._fetch, version)
        contexts = self._contexts()
        self._store(ids, contexts)
        depths = [self._depths[each] for each, it in self._batch.items() if not it.outlier and it.rejected is None]
        lowest = [each for each in (self._room.min_depth, max(depths, default=None)) if each is not None]
        self._tables.put_room(
            self._room_id,
            replace(self._room, room_version=version, min_depth=min(lowest, default=None)),
        )
        if not self._backfilled:
            self._move_forward(ids, contexts)
        return [self._rows.get(each, []) for each in ids]

    def recalculate(self, number: int) -> list[list[object]]:
        version = self._room.room_version
        self._states = States(self._tables, self._room_id, self._rules.resolver, self._fetch, version)
        ends = self._tables.metadata(self._tables.forward(self._room_id)).values()
        groups = sorted({each.state_group for each in ends if each.state_group is not None})
        if not groups:
            raise UnknownRoomError(f"no room {self._room_id[:100]!r} with a state is stored here")
        self._change_state(number, self._changes_to(groups, None))
        return self._rows.get(number, [])

    def _fetch(self, event_ids: Collection[str]) -> dict[str, Event]:
        """Return events, stored ones and those of this chunk."""
        found = self._tables.events([each for each in event_ids if each not in self._batch])
        for each in event_ids:
            if each in self._batch:
                found[each] = attrs.evolve(self._batch[each], depth=self._depths[each])
        return found

    # ---- checks

    def _find_depths(self) -> dict[str, int]:
        """Return all depths; RoomError if a local event is less deep than one that it follows."""
        depths = {each: stored.depth for each, stored in self._known.items()}
        for event in self._events:
            if event.depth is not None and depths.setdefault(event.event_id, event.depth) != event.depth:
                raise RoomError(
                    f"event {event.event_id!r} has another depth in a copy that is stored or in this request"
                )
        unplaced = [event for event in self._batch.values() if event.event_id not in depths]
        while unplaced:
            left = []
            for event in unplaced:
                below = [depths.get(each) for each in event.prev_event_ids]
                if None in below:
                    left.append(event)
                else:
                    depths[event.event_id] = min(max([each or 0 for each in below], default=0) + 1, MAX_DEPTH)
            if len(left) == len(unplaced):
                raise _depthless(left, depths)
            unplaced = left[::-1]  # events usually are in order, or in reverse order
        for event in self._events:
            deepest = max([depths[each] for each in event.prev_event_ids if each in depths], default=0)
            if depths[event.event_id] < deepest and (not event.sender or self._rules.is_local(event.sender)):
                raise RoomError(
                    f"event {event.event_id!r} is local and has depth {event.depth}, less than depth {deepest} of an "
                    f"event that it follows; leave depth out to have it computed"
                )
        return depths

    def _check(self) -> None:
        """RoomError for an event of another room, a different event with the same ID, or a cycle."""
        for event in self._events:
            first = self._batch[event.event_id]
            if event is not first and event.text != first.text:
                raise RoomError(f"event {event.event_id!r} is in this request twice, with different content")
        again = [each for each in self._batch if each in self._known]
        for event_id, stored in self._tables.events(again).items() if again else ():
            if stored.room_id != self._room_id:
                raise RoomError(f"event {event_id!r} is an event of room {stored.room_id!r}")
            if stored.text != self._batch[event_id].text:
                raise RoomError(f"event {event_id!r} is stored already, with different content")
        for event in self._batch.values():
            for each in event.prev_event_ids:
                if each in self._known and self._known[each].room_id != self._room_id:
                    raise RoomError(f"event {event.event_id!r} follows {each!r}, which is in another room")
        self._check_cycles()

    def _check_cycles(self) -> None:
        """RoomError for an event that precedes itself.

        That is impossible while every event is deeper than those that it follows; only other rooms are walked.
        """
        depths = self._depths
        new = [event for each, event in self._batch.items() if each not in self._known]
        tangled = any(depths.get(each, -1) >= depths[event.event_id] for event in new for each in event.prev_event_ids)
        above = self._tables.edges_to([event.event_id for event in new]) if new else []
        if above and not tangled:
            children = self._tables.metadata({child for child, _ in above})
            tangled = any(children[child].depth <= depths[prev] for child, prev in above if child in children)
        if not tangled and not self._room.tangled:
            return
        self._room = replace(self._room, tangled=True)
        for event in new:
            self._walk(event)

    def _walk(self, event: Event) -> None:
        seen: set[str] = set()
        edge = set(event.prev_event_ids)
        while edge:
            if event.event_id in edge:
                raise RoomError(f"event {event.event_id!r} would precede itself: that is a cycle")
            seen |= edge
            inside = {prev for each in edge if each in self._batch for prev in self._batch[each].prev_event_ids}
            edge = (inside | {prev for _, prev in self._tables.edges_from(edge)}) - seen

    def _version(self) -> str | None:
        for event in self._batch.values():
            if event.type == CREATE and event.state_key == "":
                return self._room.room_version or version_of(event)
            if event.room_version is not None:
                return self._room.room_version or event.room_version
        return self._room.room_version

    # ---- state

    def _contexts(self) -> dict[str, Context]:
        """Return the context of each event that is not an outlier; the first such copy of an event counts."""
        found: dict[str, Context] = {}
        for event in self._events:
            if not event.outlier and not (event.event_id in found and event is self._batch[event.event_id]):
                found.setdefault(event.event_id, self._context(event, found, []))
        return found

    def _context(self, event: Event, found: dict[str, Context], path: list[str]) -> Context:
        if event.state_before is not None:
            return self._states.around(event, self._states.given(event))
        groups = []
        for each in event.prev_event_ids:
            inside = self._batch.get(each)
            if each in self._known and (group := self._known[each].state_group) is not None:
                groups.append(group)
            elif each in found:
                groups.append(_group_of(self._batch[each], found[each]))
            elif inside is not None and not inside.outlier and each not in path:
                found[each] = self._context(inside, found, [*path, event.event_id])
                groups.append(_group_of(inside, found[each]))
            else:
                raise RoomError(
                    f"event {event.event_id!r}: the state before it is not known, because {each!r} is missing; give "
                    f"state_before, or make it an outlier"
                )
        return self._states.around(event, self._states.merged(groups))

    # ---- storing

    def _store(self, ids: Sequence[int], contexts: Mapping[str, Context]) -> None:
        tables, instance = self._tables, self._rules.instance_name
        sign = -1 if self._backfilled else 1
        places = {}
        for number, event in zip(ids, self._events, strict=True):
            if event is self._batch[event.event_id]:
                places[event.event_id] = number
        placed = {
            each: PlacedEvent(event, self._depths[each], sign * places[each], _group_or_none(event, contexts.get(each)))
            for each, event in self._batch.items()
        }
        for each in placed.values():
            if each.event.event_id in self._known:
                self._store_again(each)
        fresh = [each for event_id, each in placed.items() if event_id not in self._known]
        if not fresh:
            return
        tables.add_events(instance, fresh)
        kept = [each.event for each in fresh if each.event.rejected is None]
        tables.add_edges([(event.event_id, prev) for event in kept for prev in event.prev_event_ids], self._room_id)
        ordinary = [event for event in kept if not event.outlier]
        if ordinary:
            self._change_backward(ordinary)
        for each in fresh:
            self._add_row(each, each.event.rejected)
        if not self._backfilled:
            self._set_invitations(kept)

    def _store_again(self, placed: PlacedEvent) -> None:
        """De-outlier a stored event; any other copy of a stored event changes nothing."""
        event, stored = placed.event, self._known[placed.event.event_id]
        if event.rejected is not None or event.outlier or not stored.outlier:
            return
        if stored.rejected is not None:  # it had no edges
            self._tables.add_edges([(event.event_id, each) for each in event.prev_event_ids], self._room_id)
        self._tables.de_outlier(self._rules.instance_name, placed)
        self._change_backward([event])
        self._add_row(placed, None)

    def _change_backward(self, events: Sequence[Event]) -> None:
        add = missing(self._tables, events)
        self._tables.change_backward(self._room_id, add, [event.event_id for event in events])

    def _add_row(self, placed: PlacedEvent, rejected: str | None) -> None:
        if self._backfilled:
            row = encode_backfill(placed.event, rejected=rejected)
        else:
            row = encode_ev(placed.event, rejected=rejected, flag=self._rules.flag)
        self._rows.setdefault(abs(placed.stream_ordering), []).append(row)

    def _set_invitations(self, events: Iterable[Event]) -> None:
        changes = {
            event.state_key: event.membership
            for event in events
            if event.out_of_band_membership and event.outlier and event.type == MEMBER
            if event.state_key is not None and self._rules.is_local(event.state_key)
        }
        if changes:
            self._tables.set_local_members(self._room_id, changes)

    # ---- extremities and current state

    def _move_forward(self, ids: Sequence[int], contexts: Mapping[str, Context]) -> None:
        """Change the forward extremities and the current state."""
        good = [
            event
            for event in self._batch.values()
            if event.is_good and (event.event_id not in self._known or self._was_outlier_or_good(event.event_id))
        ]
        old = self._tables.forward(self._room_id)
        new = new_forward(self._tables, old, good)
        if new == old:
            return
        changes = self._state_changes(old, new, contexts)
        self._tables.set_forward(self._room_id, new, ids[-1])
        self._change_state(ids[0], changes)

    def _change_state(self, at: int, changes: Sequence[StateChange]) -> None:
        if changes:
            self._tables.change_state(self._rules.instance_name, self._room_id, at, changes)
            rows = [encode_state(self._room_id, each.key, each.event_id) for each in changes]
            self._rows.setdefault(at, []).extend(rows)

    def _was_outlier_or_good(self, event_id: str) -> bool:
        stored = self._known[event_id]
        return stored.outlier or stored.is_good

    def _state_changes(self, old: set[str], new: set[str], contexts: Mapping[str, Context]) -> list[StateChange]:
        """Return the changes of the current state; remove stuck extremities from ``new``."""
        stored = self._tables.metadata(old | new)
        before, now = ({stored[each].state_group for each in ends} for ends in (old, new))
        if before == now:
            return []
        known = None
        if len(before) == len(now) == 1:
            step = (*before, *now)
            known = next((it.delta for it in contexts.values() if (it.prev_group, it.after) == step), None)
        groups = sorted(each for each in now if each is not None)
        if len(groups) > 1 and self._states.room_version is not None:
            _, same = self._states.resolve(groups)
            idle = {each for each in new if stored[each].state_group != same}
            if same in groups and are_stuck(
                idle, self._events, self._fetch, is_local=self._rules.is_local, now=self._rules.now()
            ):
                new -= idle
        return self._changes_to(groups, known)

    def _changes_to(self, groups: Sequence[int], known: StateMap | None) -> list[StateChange]:
        """Return the changes to the resolved state of ``groups``; ``known`` are all changed keys, or None."""
        current = self._tables.current_state(self._room_id)
        if known is not None:
            wanted = {**current, **known}
            set_to = known
        else:
            wanted = dict(self._states.full(groups[0]) if len(groups) == 1 else self._states.resolve(groups)[0])
            set_to = {key: each for key, each in wanted.items() if current.get(key) != each}
        gone = [key for key in current if key not in wanted]
        if not gone and not set_to:
            return []
        if not self._still_joined([*gone, *set_to], set_to):
            return [StateChange(key, None, each) for key, each in current.items()]
        changes = [StateChange(key, None, current[key]) for key in gone]
        return changes + [StateChange(key, each, current.get(key)) for key, each in set_to.items()]

    def _still_joined(self, changed: Iterable[StateKey], set_to: StateMap) -> bool:
        """Store how memberships of local users change; return whether a local user is still joined."""
        mine = [key for key in changed if key[0] == MEMBER and self._rules.is_local(key[1])]
        if not mine:
            return True
        events = self._tables.events([set_to[key] for key in mine if key in set_to])
        memberships = {key[1]: events[set_to[key]].membership if set_to.get(key) in events else None for key in mine}
        self._tables.set_local_members(self._room_id, memberships)
        return "join" in self._tables.local_members(self._room_id).values()


def _first_copies(events: Iterable[Event]) -> dict[str, Event]:
    """Return the first copy of each event that is not an outlier, or else the first copy."""
    found: dict[str, Event] = {}
    for event in events:
        known = found.get(event.event_id)
        if known is None or (known.outlier and not event.outlier):
            found[event.event_id] = event
    return found


def _depthless(events: Sequence[Event], depths: Mapping[str, int]) -> RoomError:
    """Return the error for events whose depths cannot be computed."""
    event = events[0]
    prev = next(each for each in event.prev_event_ids if each not in depths)
    inside = prev in {each.event_id for each in events}
    why = "follows it: that is a cycle" if inside else "is missing"
    return RoomError(f"event {event.event_id!r} has no depth, and {prev!r}, which it follows, {why}")


def _group_of(event: Event, context: Context) -> int:
    """Return the group of the state after an event; that is the one before it if the event is rejected."""
    return context.before if event.rejected is not None else context.after


def _group_or_none(event: Event, context: Context | None) -> int | None:
    """Return the group of the state after an event; None for an outlier, which has no context."""
    return None if context is None else _group_of(event, context)
