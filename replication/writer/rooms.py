"""The rooms of a master: persist events into room graphs, and into the streams ``events`` and ``backfill``.

Calls that arrive during a transaction share the next one, for any rooms, as long as all are live or all backfilled.
Each call succeeds or fails as a whole.  Its stream IDs are reserved when its transaction begins.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.deferreds import Lock, share, start_alone
from replication.errors import RoomError
from replication.rooms.event import MAX_OWN_PREV_EVENTS, MEMBER, Event, StateKey
from replication.rooms.graph import CHUNK, Rules, persist, recalculate
from replication.rooms.resolution import resolve
from replication.storage.tables.room_queries import RoomReads
from replication.storage.tables.rooms import RoomTables, declare_rooms
from replication.storage.transactions import run_transaction
from replication.streams.definitions import StreamDefinition
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.rooms.ordering import Between, Place
    from replication.rooms.resolution import Resolver
    from replication.rooms.views import EventView, RoomView, StateGroupView, StoredEvent
    from replication.streams.interfaces import ISqlExecutor
    from replication.streams.positions import MultiWriterToken
    from replication.wire.grammar import Token
    from replication.writer.master import Master

    T = TypeVar("T")

EVENTS: Final = StreamDefinition("events")
BACKFILL: Final = StreamDefinition("backfill", negative=True)
STATE_CHANGED: Final = (
    "cs_cache_fake"  # the function in the caches row of a changed state (docs/protocol/streams.md C4)
)
MAX_USERS: Final = 50  # in one such row
MAX_EVENTS: Final = 10 * CHUNK  # of calls that share a transaction


@attrs.define(eq=False)
class _Task:
    room_id: str
    events: Sequence[Event]
    backfilled: bool
    done: Deferred[Sequence[Token]] = attrs.field(factory=Deferred)


class Rooms:
    """The rooms of a master's database; make it before the master starts (docs/protocol/rooms.md H).

    Args:
        master: the process that writes the streams ``events`` and ``backfill``.
        resolver: resolves the state where branches of a graph meet; by default as the Matrix specification does.
        is_local: whether a user ID belongs to this server; by default if it ends with the server name.

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
        self._declared = False
        self._declaring = Lock()
        for definition in (EVENTS, BACKFILL):
            master.registry.declare(definition)

    # ---- writing

    async def persist(
        self, room_id: str, events: Sequence[Event | Mapping[str, object]], *, backfilled: bool = False
    ) -> Sequence[Token]:
        """Store events of one room, all or none, and return their stream IDs once they are durable.

        Args:
            room_id: the room of all events.
            events: events, or JSON objects with the fields of docs/http.md.
            backfilled: whether the events are of the past; their IDs are then those of the stream ``backfill``.

        Raises:
            RoomError: an event is invalid or cannot be part of the graph; the message names it.

        """
        parsed = [each if isinstance(each, Event) else Event.read(room_id, each) for each in events]
        for event in parsed:
            if event.room_id != room_id:
                raise RoomError(f"event {event.event_id!r}: its room is {event.room_id!r}, not {room_id!r}")
        await self.started()
        if not parsed:
            return []
        task = _Task(room_id, parsed, backfilled)
        self._waiting.append(task)
        if not self._working:
            start_alone(self._work())
        return await share(task.done)

    async def recalculate(self, room_id: str) -> None:
        """Resolve a room's current state again, for example after a change of the resolver."""
        await self.started()

        def work(database: ISqlExecutor) -> list[str]:
            tables = RoomTables(database)
            rows = recalculate(tables, self._rules(database), room_id, int(fact.token))
            return grammar.encode_rows(rows)

        async with self._master.stream(EVENTS.name).reserve() as fact:
            fact.texts.extend(await fact.run(work))

    async def started(self) -> None:
        """Return once the master has started and the tables of rooms exist."""
        await self._master.started()
        if not self._declared:
            async with self._declaring:
                if not self._declared:
                    await run_transaction(self._master.store, declare_rooms)
                    self._declared = True

    async def _work(self) -> None:
        self._working = True
        while self._waiting:
            tasks, self._waiting = _next_tasks(self._waiting)
            await self._finish(tasks)
        self._working = False

    async def _finish(self, tasks: Sequence[_Task]) -> None:
        try:
            tokens = list(await self._write(tasks))
        except Exception:  # noqa: BLE001 (raised in the call)
            if len(tasks) == 1:
                tasks[0].done.errback()
                return
            for task in tasks:  # one of them is at fault: retry each in a transaction of its own
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
                for start in range(0, len(users) or 1, MAX_USERS):
                    await facts[0].invalidate(STATE_CHANGED, [room_id, *users[start : start + MAX_USERS]])
        return tokens

    def _persist(
        self, tasks: Sequence[_Task], tokens: Sequence[Token], database: ISqlExecutor
    ) -> tuple[list[list[str]], dict[str, list[str]]]:
        """Persist the events of ``tasks``, on the database's thread.

        Returns the texts of the rows of each token and, for each room whose state changed, the users whose membership
        changed.
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
                texts += [grammar.encode_rows(of_id) for of_id in rows]
                if not tasks[0].backfilled:
                    _note_changes(changed, room_id, rows)
        tables.flush()
        return texts, changed

    def _rules(self, database: ISqlExecutor) -> Rules:
        flag = int if database.dialect == "sqlite" else bool  # as a Synapse on that database encodes a boolean
        now = lambda: int(self._master.wall() * 1000)  # noqa: E731
        return Rules(self._master.instance_name, self._resolver, self._is_local, flag, now)

    # ---- reading

    async def read(self, ask: Callable[[RoomReads], T]) -> T:
        """Call ``ask`` with a :class:`RoomReads` of one snapshot, on the database's thread."""
        await self.started()
        return await self._master.store.read(lambda database: ask(RoomReads(database)))

    async def view(self, room_id: str) -> RoomView:
        """Return a room: extremities, smallest depth, current state; UnknownRoomError if it is not stored."""
        return await self.read(lambda rooms: rooms.view(room_id))

    async def event(self, room_id: str, event_id: str) -> EventView:
        """Return an event with its place and the events that follow it; UnknownRoomError if it is not stored."""
        return await self.read(lambda rooms: rooms.event_view(room_id, event_id))

    async def state_group(self, number: int) -> StateGroupView:
        """Return a state group; UnknownRoomError if there is none."""
        return await self.read(lambda rooms: rooms.group(number))

    async def state_at(self, room_id: str, event_id: str) -> Mapping[StateKey, str]:
        """Return the state after an event; UnknownRoomError if it is not known."""
        return await self.read(lambda rooms: rooms.state_at(room_id, event_id))

    async def since(
        self, after: MultiWriterToken, upto: MultiWriterToken, limit: int, room_id: str | None = None
    ) -> Sequence[StoredEvent]:
        """Return the events after one token up to another, as ``/sync`` shows them."""
        return await self.read(lambda rooms: rooms.since(after, upto, limit, room_id))

    async def history(
        self, room_id: str, start: Place | None = None, limit: int = 100, *, backwards: bool = True, whole: bool = False
    ) -> Sequence[StoredEvent]:
        """Return a page of a room's history.

        Args:
            room_id: the room.
            start: backwards, the page begins with the event at this place (None: the latest); forwards, after it.
            limit: the most events.
            backwards: whether the order is newest first.
            whole: also return outliers and other events that ``/messages`` does not show.

        """
        return await self.read(lambda rooms: rooms.history(room_id, start, limit, backwards=backwards, whole=whole))

    async def gaps(self, room_id: str, limit: int = 100) -> Sequence[tuple[str, int]]:
        """Return the missing events to backfill next, each with the depth of the event that follows it."""
        return await self.read(lambda rooms: rooms.gaps(room_id, limit))

    async def between(
        self, room_id: str, have: Sequence[str], want: Sequence[str] | None = None, limit: int = 1_000
    ) -> Between:
        """Return the events that a server with ``have`` lacks of ``want``, by default the forward extremities."""

        def ask(rooms: RoomReads) -> Between:
            ends = rooms.view(room_id).forward_extremities if want is None else want
            return rooms.between(room_id, have, ends, limit)

        return await self.read(ask)

    async def next_place(self, room_id: str) -> tuple[Sequence[str], int]:
        """Return ``prev_event_ids`` and depth for a new event, which follows the ten deepest forward extremities."""
        return await self.read(lambda rooms: rooms.next_place(room_id, MAX_OWN_PREV_EVENTS))


def _next_tasks(waiting: Sequence[_Task]) -> tuple[list[_Task], list[_Task]]:
    """Return the tasks of the next transaction, sorted by room so that all writers lock in one order; and the rest.

    The tasks of one room stay in order.
    """
    chosen: list[_Task] = []
    rest: list[_Task] = []
    count = 0
    for task in waiting:
        full = bool(chosen) and count + len(task.events) > MAX_EVENTS
        stays = task.backfilled != waiting[0].backfilled or any(each.room_id == task.room_id for each in rest)
        if full or stays:
            rest.append(task)
        else:
            chosen.append(task)
            count += len(task.events)
    return sorted(chosen, key=lambda task: task.room_id), rest


def _note_changes(changed: dict[str, list[str]], room_id: str, rows: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Add to ``changed`` the room and the users whose membership ``state`` rows change, if any."""
    states = [fields for of_id in rows for kind, fields in of_id if kind == "state"]
    if states:
        users = changed.setdefault(room_id, [])
        users += [key for _, kind, key, _ in states if kind == MEMBER and key not in users]
