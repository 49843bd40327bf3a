"""Rooms over a master: events become part of their rooms' graphs, and rows of the streams ``events`` and ``backfill``.

What waits while a transaction is under way shares the next one, whichever rooms it is for, as long as it is of one
kind, live or backfilled.  Each call is taken whole or refused whole.  Stream IDs are reserved when its turn comes.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
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
MOST_TOGETHER: Final = 10 * CHUNK  # events of calls that share a transaction


@attrs.define(eq=False)
class _Task:
    room_id: str
    events: Sequence[Event]
    backfilled: bool
    done: Deferred[Sequence[Token]] = attrs.field(factory=Deferred)


class Rooms:
    """The rooms of a master's database.

    Make it before the master starts.  ``resolver`` decides what the state is where branches meet; ``is_local`` tells
    our own users by their IDs, those that end in the server's name unless it is given.
    """

    log = Logger()
    streams = (EVENTS.name, BACKFILL.name)

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
        self._waiting: list[_Task] = []
        self._working = False
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
        some = [each if isinstance(each, Event) else Event.read(room_id, each) for each in events]
        for event in some:
            if event.room_id != room_id:
                raise RoomError(f"event {event.event_id!r}: its room is {event.room_id!r}, not {room_id!r}")
        await self.started()
        if not some:
            return []
        task = _Task(room_id, some, backfilled)
        self._waiting.append(task)
        if not self._working:
            Deferred.fromCoroutine(self._work()).addErrback(lambda failure: self.log.failure("rooms", failure))
        return await share(task.done)

    async def recalculate(self, room_id: str) -> None:
        """Resolve a room's current state again, as after a new resolver, or a state event that was long awaited."""
        await self.started()

        def work(database: IStatements) -> list[str]:
            tables = RoomTables(database)
            rows = recalculate(tables, self._rules(database), room_id, int(fact.token))
            return grammar.spell_rows(rows)

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

    async def _work(self) -> None:
        self._working = True
        while self._waiting:
            tasks, self._waiting = _next_tasks(self._waiting)
            await self._finish(tasks)
        self._working = False

    async def _finish(self, tasks: Sequence[_Task]) -> None:
        try:
            tokens = list(await self._write(tasks))
        except Exception as error:  # noqa: BLE001 (whoever handed the events in is told)
            if len(tasks) == 1:
                tasks[0].done.errback(error)
                return
            for task in tasks:  # one of them is at fault: each for itself
                await self._finish([task])
            return
        for task in tasks:
            mine, tokens = tokens[: len(task.events)], tokens[len(task.events) :]
            task.done.callback(mine)

    async def _write(self, tasks: Sequence[_Task]) -> Sequence[Token]:
        writer = self._master.stream((BACKFILL if tasks[0].backfilled else EVENTS).name)
        async with writer.reserve(sum(len(task.events) for task in tasks)) as facts:
            tokens = [fact.token for fact in facts]
            texts, changed = await facts[0].run(partial(self._persist, tasks, tokens))
            for fact, some in zip(facts, texts, strict=True):
                fact.texts.extend(some)
            for room_id, users in changed.items():
                for start in range(0, len(users) or 1, MOST_USERS):
                    await facts[0].invalidate(STATE_CHANGED, [room_id, *users[start : start + MOST_USERS]])
        return tokens

    def _persist(
        self, tasks: Sequence[_Task], tokens: Sequence[Token], database: IStatements
    ) -> tuple[list[list[str]], dict[str, list[str]]]:
        """Do it, on the database's thread.

        Returns the rows' texts per token and, per room whose state changed, the users whose memberships did.
        """
        tables, rules = RoomTables(database), self._rules(database)
        texts: list[list[str]] = []
        changed: dict[str, list[str]] = {}
        for room_id, together in groupby(tasks, lambda task: task.room_id):
            events = [event for task in together for event in task.events]
            mine = tokens[len(texts) : len(texts) + len(events)]
            for start in range(0, len(events), CHUNK):
                chunk = slice(start, start + CHUNK)
                rows = persist(tables, rules, room_id, events[chunk], mine[chunk], backfilled=tasks[0].backfilled)
                texts += [grammar.spell_rows(of_id) for of_id in rows]
                if not tasks[0].backfilled:
                    _note_changes(changed, room_id, rows)
        tables.flush()
        return texts, changed

    def _rules(self, database: IStatements) -> Rules:
        flag = int if database.dialect == "sqlite" else bool  # as a Synapse on that database spells it
        now = lambda: int(self._master.wall() * 1000)  # noqa: E731
        return Rules(self._master.instance_name, self._resolver, self._is_local, flag, now)

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


def _next_tasks(waiting: Sequence[_Task]) -> tuple[list[_Task], list[_Task]]:
    """Return the tasks that share the next transaction, by room, so that all writers lock in one order; and the rest.

    A room's tasks stay in order: once one of them has to wait, those behind it do too.
    """
    chosen: list[_Task] = []
    rest: list[_Task] = []
    count = 0
    for task in waiting:
        full = bool(chosen) and count + len(task.events) > MOST_TOGETHER
        stays = task.backfilled != waiting[0].backfilled or any(each.room_id == task.room_id for each in rest)
        if full or stays:
            rest.append(task)
        else:
            chosen.append(task)
            count += len(task.events)
    return sorted(chosen, key=lambda task: task.room_id), rest


def _note_changes(changed: dict[str, list[str]], room_id: str, rows: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Note from ``state`` rows that a room's state changed, and whose memberships."""
    states = [fields for of_id in rows for kind, fields in of_id if kind == "state"]
    if states:
        users = changed.setdefault(room_id, [])
        users += [key for _, kind, key, _ in states if kind == MEMBER and key not in users]
