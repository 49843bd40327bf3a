"""Rooms over a master: events become part of their rooms' graphs, and rows of the streams ``events`` and ``backfill``.

A room has a queue: one transaction at a time writes to it, and tasks that wait and are of one kind share it.  Each task
is taken whole or refused whole.  Stream IDs are reserved when its turn comes.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import RoomError
from replication.rooms.event import MAX_OWN_PREV_EVENTS, MEMBER, Event
from replication.rooms.graph import CHUNK, Rules, persist, recalculate
from replication.rooms.resolution import resolve
from replication.storage.roomreads import RoomReads
from replication.storage.rooms import RoomTables, declare_rooms
from replication.streams.registry import StreamDefinition
from replication.waiting import share
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.master import Master
    from replication.rooms.event import StateKey
    from replication.rooms.ordering import Between, Place
    from replication.rooms.resolution import Resolver
    from replication.rooms.views import Card, GroupView, Node, RoomView
    from replication.streams.positions import MultiWriterToken
    from replication.streams.seams import IStatements
    from replication.wire.grammar import Token

    T = TypeVar("T")

EVENTS: Final = StreamDefinition("events")
BACKFILL: Final = StreamDefinition("backfill", negative=True)
STATE_CHANGED: Final = "cs_cache_fake"  # the caches row that says so (protocol C4)
MOST_USERS: Final = 50  # in one such row
MOST_MERGED: Final = 5 * CHUNK  # events of tasks that share a transaction


@attrs.define(eq=False)
class _Task:
    events: Sequence[Event]
    backfilled: bool
    done: Deferred[Sequence[Token]] = attrs.field(factory=Deferred)


class Rooms:
    """The rooms of a master's database.

    Make it before the master starts.  ``resolver`` decides what the state is where branches meet; ``is_local`` tells
    our own users by their IDs, those that end in the server's name unless it is given.
    """

    log = Logger()

    def __init__(
        self,
        master: Master,
        *,
        resolver: Resolver = resolve,
        is_local: Callable[[str], bool] | None = None,
    ) -> None:
        self._master = master
        self._resolver = resolver
        ending = f":{master.server_name}"
        self._is_local = is_local or (lambda user: user.endswith(ending))
        self._queues: dict[str, deque[_Task]] = {}
        self._declared: Deferred[Exception | None] | None = None
        for definition in (EVENTS, BACKFILL):
            master.registry.declare(definition)

    # ---- writing

    async def persist(
        self, room_id: str, events: Sequence[Event | Mapping[str, object]], *, backfilled: bool = False
    ) -> Sequence[Token]:
        """Store events of one room, all or none, and return the ID that each was given, once all are durable.

        ``backfilled`` events are of the past: their IDs are those of the stream ``backfill``.  RoomError names the
        event that cannot be, and says why.
        """
        task = _Task([each if isinstance(each, Event) else Event.read(room_id, each) for each in events], backfilled)
        for event in task.events:
            if event.room_id != room_id:
                raise RoomError(f"event {event.event_id!r}: its room is {event.room_id!r}, not {room_id!r}")
        await self.started()
        if not task.events:
            return []
        queue = self._queues.setdefault(room_id, deque())
        queue.append(task)
        if len(queue) == 1:
            Deferred.fromCoroutine(self._work(room_id, queue)).addErrback(
                lambda failure: self.log.failure("room {room} is stuck", failure, room=room_id)
            )
        return await share(task.done)

    async def recalculate(self, room_id: str) -> None:
        """Resolve a room's current state again, as after a new resolver, or a state event that was long awaited."""
        await self.started()

        def work(database: IStatements) -> list[str]:
            tables = RoomTables(database)
            rows = recalculate(tables, self._rules(database), room_id, int(fact.token))
            return [grammar.spell_row(row) for row in rows]

        async with self._master.stream(EVENTS.name).reserve() as fact:
            fact.texts.extend(await fact.run(work))

    async def started(self) -> None:
        """Return once the master has started and the rooms' tables are there."""
        await self._master.started()
        if self._declared is None:
            self._declared = Deferred.fromCoroutine(self._declare())
        error = await share(self._declared)
        if error is not None:
            self._declared = None
            raise error

    async def _declare(self) -> Exception | None:
        transaction = self._master.store.transaction()
        try:
            await transaction.run(declare_rooms)
            await transaction.commit([])
        except Exception as error:  # noqa: BLE001 (whoever waits for the start is told)
            await transaction.rollback()
            return error
        return None

    async def _work(self, room_id: str, queue: deque[_Task]) -> None:
        while queue:
            tasks = _next_tasks(queue)
            await self._finish(room_id, tasks)
            for _ in tasks:
                queue.popleft()
        del self._queues[room_id]

    async def _finish(self, room_id: str, tasks: Sequence[_Task]) -> None:
        try:
            tokens = list(await self._write(room_id, tasks))
        except Exception as error:  # noqa: BLE001 (whoever handed the events in is told)
            if len(tasks) == 1:
                tasks[0].done.errback(error)
                return
            for task in tasks:  # one of them is at fault: each for itself
                await self._finish(room_id, [task])
            return
        for task in tasks:
            mine, tokens = tokens[: len(task.events)], tokens[len(task.events) :]
            task.done.callback(mine)

    async def _write(self, room_id: str, tasks: Sequence[_Task]) -> Sequence[Token]:
        events, backfilled = [event for task in tasks for event in task.events], tasks[0].backfilled
        writer = self._master.stream((BACKFILL if backfilled else EVENTS).name)
        async with writer.reserve(len(events)) as facts:
            tokens = [fact.token for fact in facts]
            rows, changed = await facts[0].run(partial(self._persist, room_id, events, tokens, backfilled=backfilled))
            for fact, texts in zip(facts, rows, strict=True):
                fact.texts.extend(texts)
            if changed is not None:
                for start in range(0, len(changed) or 1, MOST_USERS):
                    await facts[0].invalidate(STATE_CHANGED, [room_id, *changed[start : start + MOST_USERS]])
        return tokens

    def _persist(
        self, room_id: str, events: Sequence[Event], tokens: Sequence[Token], database: IStatements, *, backfilled: bool
    ) -> tuple[list[list[str]], list[str] | None]:
        """Do it, on the database's thread; returns the rows' texts, and whose memberships changed if the state did."""
        tables = RoomTables(database)
        rules = self._rules(database)
        rows: list[list[list[Any]]] = []
        for start in range(0, len(events), CHUNK):
            chunk = slice(start, start + CHUNK)
            rows += persist(tables, rules, room_id, events[chunk], tokens[chunk], backfilled=backfilled)
        tables.flush()
        changes = [fields for of_id in rows for kind, fields, *_ in of_id if kind == "state"] if not backfilled else []
        users = [key for _, kind, key, _ in changes if kind == MEMBER]
        return [[grammar.spell_row(row) for row in of_id] for of_id in rows], users if changes else None

    def _rules(self, database: IStatements) -> Rules:
        flag = int if database.dialect == "sqlite" else bool  # as a Synapse on that database spells it
        return Rules(self._master.instance_name, self._resolver, self._is_local, flag)

    # ---- reading

    async def read(self, ask: Callable[[RoomReads], T]) -> T:
        """Ask on one snapshot, on the database's thread; the questions are ``RoomReads``'."""
        await self.started()
        return await self._master.store.read(lambda database: ask(RoomReads(database)))

    async def view(self, room_id: str) -> RoomView:
        """Return a room: extremities, least depth, current state; UnknownRoomError if nothing of it is stored."""
        return await self.read(lambda rooms: rooms.view(room_id))

    async def event(self, room_id: str, event_id: str) -> Card:
        """Return an event with its place and what is around it; UnknownRoomError if it is not stored."""
        return await self.read(lambda rooms: rooms.card(room_id, event_id))

    async def state_group(self, number: int) -> GroupView:
        """Return a state group; UnknownRoomError if there is none."""
        return await self.read(lambda rooms: rooms.group(number))

    async def state_at(self, room_id: str, event_id: str) -> Mapping[StateKey, str]:
        """Return the state after an event; UnknownRoomError if nobody knows it."""
        return await self.read(lambda rooms: rooms.state_at(room_id, event_id))

    async def since(
        self, after: MultiWriterToken, upto: MultiWriterToken, limit: int, room_id: str | None = None
    ) -> Sequence[Node]:
        """Return what is new after one token, up to another: what ``/sync`` shows."""
        return await self.read(lambda rooms: rooms.since(after, upto, limit, room_id))

    async def history(
        self, room_id: str, start: Place | None = None, limit: int = 100, *, backwards: bool = True, whole: bool = False
    ) -> Sequence[Node]:
        """Return a page of a room's history: what ``/messages`` shows, or, ``whole``, everything.

        Backwards it has what lies at or before ``start`` (None: the end), forwards what lies after it.
        """
        return await self.read(lambda rooms: rooms.history(room_id, start, limit, backwards=backwards, whole=whole))

    async def gaps(self, room_id: str, limit: int = 100) -> Sequence[tuple[str, int]]:
        """Return the events to backfill next, and how deep what follows them is."""
        return await self.read(lambda rooms: rooms.gaps(room_id, limit))

    async def between(
        self, room_id: str, have: Sequence[str], want: Sequence[str] | None = None, limit: int = 1_000
    ) -> Between:
        """Return what somebody lacks who has ``have`` to have ``want``, our forward extremities unless said."""

        def ask(rooms: RoomReads) -> Between:
            ends = rooms.view(room_id).forward_extremities if want is None else want
            return rooms.between(room_id, have, ends, limit)

        return await self.read(ask)

    async def next_place(self, room_id: str) -> tuple[Sequence[str], int]:
        """Return ``prev_event_ids`` and depth of a new event: it follows the ten deepest extremities."""
        return await self.read(lambda rooms: rooms.next_place(room_id, MAX_OWN_PREV_EVENTS))


def _next_tasks(queue: Sequence[_Task]) -> list[_Task]:
    """Return the tasks that come next and can share a transaction."""
    first, count = queue[0], 0
    tasks: list[_Task] = []
    for task in queue:
        count += len(task.events)
        if task.backfilled != first.backfilled or (tasks and count > MOST_MERGED):
            break
        tasks.append(task)
    return tasks
