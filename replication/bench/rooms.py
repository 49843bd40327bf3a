"""Rooms: events persisted and read per second, in a file, ``synchronous = FULL``; and whether a room's size matters.

Live and backfilled events go through a master's ``Rooms``, 100 to a call and eight calls at once, a room each.
A backfilled batch brings the state before its oldest event.  Reads are one call each, there and back through the
database's thread.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred, gatherResults

from replication.bench.children import Child, hear
from replication.bench.daemons import database_in
from replication.bench.series import Lap, Series, Stopwatch, rates
from replication.master import Master
from replication.roomkeeper import Rooms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from replication.bench.series import Effort

BATCH: Final = 100
CALLERS: Final = 8
KEYS: Final = 1_000
ASKS: Final = 50


def measure(effort: Effort) -> Iterator[Series]:
    """Measure live events, backfilled ones, both ends of a growing room, and what is read."""
    events = effort.size(24_000, 800)
    with TemporaryDirectory(prefix="replication-bench-") as folder, Child(_keep, folder) as child:
        for name in ("live", "backfilled"):
            yield from rates(
                f"SQLite, {name}, 100 a call", "events", [child.ask((name, events)) for _ in range(effort.rounds)]
            )
        for size in (100, effort.size(100_000, 1_000)):
            laps = [child.ask(("room", size)) for _ in range(effort.rounds)]
            yield from rates(f"live, in a room of {size:,}", "events", laps)
        for name, what in (("page", "100 events backwards"), ("state", "resolved state of 1,000 keys")):
            laps = [child.ask((name, ASKS)) for _ in range(effort.rounds)]
            yield Series(what, "time of a call", "s", [lap.wall / lap.count for lap in laps])


async def _keep(reactor: Any, pipe: Connection[Any, Any], folder: str) -> None:
    master = Master(database=database_in(folder, "rooms"), reactor=reactor)
    bench = _Bench(Rooms(master))
    while True:
        asked: tuple[str, int] | None = await hear(reactor, pipe)
        if asked is None:
            return
        name, count = asked
        pipe.send(await getattr(bench, name)(count))


class _Bench:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._made = 0
        self._grown: dict[int, tuple[str, str]] = {}  # a room of each size, and its last event

    def _name(self) -> str:
        self._made += 1
        return f"$event{self._made:039d}"

    def _chain(self, last: str | None, count: int) -> list[dict[str, Any]]:
        events = []
        for _ in range(count):
            name = self._name()
            events.append(
                _event(name, [] if last is None else [last], content={"body": "a word or two", "n": self._made})
            )
            last = name
        return events

    async def live(self, count: int) -> Lap:
        """Persist chains in as many rooms as there are callers."""

        async def grow(room: str) -> None:
            last = None
            for _ in range(count // CALLERS // BATCH):
                events = self._chain(last, BATCH)
                await self._rooms.persist(room, events)
                last = events[-1]["event_id"]

        watch = Stopwatch.start()
        await _at_once([grow(f"!live{self._name()}") for _ in range(CALLERS)])
        return watch.lap(count)

    async def backfilled(self, count: int) -> Lap:
        """Persist chains newest first, each batch below the one before."""

        async def dig(room: str) -> None:
            batches = [self._chain(None, BATCH) for _ in range(count // CALLERS // BATCH)]
            await self._rooms.persist(room, [_event(self._name(), [], state_key="", depth=1)])
            above: dict[str, Any] | None = None
            for number, batch in enumerate(reversed(batches)):
                for place, event in enumerate(batch):
                    event["depth"] = (len(batches) - number) * BATCH + place
                batch[0] |= {"prev_event_ids": [f"{batch[0]['event_id']}<"], "state_before": []}
                if above is not None:
                    batch[-1]["event_id"] = f"{above['event_id']}<"
                await self._rooms.persist(room, batch[::-1], backfilled=True)
                above = batch[0]

        watch = Stopwatch.start()
        await _at_once([dig(f"!old{self._name()}") for _ in range(CALLERS)])
        return watch.lap(count)

    async def room(self, size: int) -> Lap:
        """Persist 2,000 events in a room that has ``size`` already."""
        if size not in self._grown:
            room, last = f"!size{self._name()}", None
            for start in range(0, size, BATCH * 10):
                events = self._chain(last, min(BATCH * 10, size - start))
                await self._rooms.persist(room, events)
                last = events[-1]["event_id"]
            self._grown[size] = (room, last or "")
        room, last = self._grown[size]
        watch = Stopwatch.start()
        for _ in range(20):
            events = self._chain(last, BATCH)
            await self._rooms.persist(room, events)
            last = events[-1]["event_id"]
        self._grown[size] = (room, last or "")
        return watch.lap(20 * BATCH)

    async def page(self, count: int) -> Lap:
        """Read pages of 100 events backwards, from the middle of the largest room."""
        room, _ = self._grown[max(self._grown)]
        (*_, start) = await self._rooms.history(room, None, 500)
        watch = Stopwatch.start()
        for _ in range(count):
            page = await self._rooms.history(room, start.place, 100)
            assert len(page) == BATCH  # noqa: S101
        return watch.lap(count)

    async def state(self, count: int) -> Lap:
        """Read the state at an event that 1,000 state events, each on the one before, have made."""
        last: Sequence[str] = []
        events = []
        for number in range(KEYS):
            events.append(_event(self._name(), last, state_key=str(number)))
            last = [events[-1]["event_id"]]
        room = f"!state{last[0]}"
        await self._rooms.persist(room, events)
        watch = Stopwatch.start()
        for _ in range(count):
            state = await self._rooms.state_at(room, last[0])
            assert len(state) == KEYS  # noqa: S101
        return watch.lap(count)


def _event(event_id: str, prev_event_ids: Sequence[str], **more: Any) -> dict[str, Any]:
    return {"event_id": event_id, "type": "bench", "sender": "@far:away", "prev_event_ids": prev_event_ids, **more}


async def _at_once(work: Sequence[Any]) -> None:
    await gatherResults([Deferred.fromCoroutine(each) for each in work], consumeErrors=True)
