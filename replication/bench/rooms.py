"""Events of rooms persisted and read per second, in a file with ``synchronous = FULL``, in small and large rooms.

Live and backfilled events go through a master's ``Rooms``: 100 per call, eight calls at once, one room each.  A
backfilled batch has ``state_before`` on its oldest event.  Each read is one call through the database's thread.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred, gatherResults

from replication.bench.daemons import database_in
from replication.bench.processes import ChildProcess
from replication.bench.series import Sample, Series, Stopwatch, rates
from replication.writer.master import Master
from replication.writer.rooms import Rooms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.series import BenchOptions

BATCH: Final = 100
CALLERS: Final = 8
KEYS: Final = 1_000
READS: Final = 50


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure live and backfilled events, a small and a large room, and reads."""
    events = options.size(24_000, 800)
    with TemporaryDirectory(prefix="replication-bench-") as folder, ChildProcess(_Bench, folder) as child:
        for name, persist in (("live", _Bench.live), ("backfilled", _Bench.backfilled)):
            yield from rates(f"SQLite, {name}, 100 a call", "events", options, child.call, persist, events)
        for size in (100, options.size(100_000, 1_000)):
            yield from rates(f"live, in a room of {size:,}", "events", options, child.call, _Bench.room, size)
        for read, what in ((_Bench.page, "100 events backwards"), (_Bench.state, "resolved state of 1,000 keys")):
            samples = [child.call(read, READS) for _ in range(options.rounds)]
            yield Series(what, "time of a call", "s", [sample.wall / sample.count for sample in samples])


class _Bench:
    def __init__(self, reactor: Any, folder: str) -> None:
        self._rooms = Rooms(Master(database=database_in(folder, "rooms"), reactor=reactor))
        self._made = 0
        self._grown: dict[int, tuple[str, str | None]] = {}  # by size: a room and its last event

    def _name(self) -> str:
        self._made += 1
        return f"$event{self._made:039d}"

    def _chain(self, last: str | None, count: int) -> list[dict[str, Any]]:
        events = []
        for _ in range(count):
            content = {"body": "a word or two", "n": self._made + 1}
            events.append(_event(self._name(), [] if last is None else [last], content=content))
            last = events[-1]["event_id"]
        return events

    async def _grow(self, room: str, last: str | None, batches: int, batch: int = BATCH) -> str | None:
        """Persist a chain of events after ``last``, and return the ID of its last event."""
        for _ in range(batches):
            events = self._chain(last, batch)
            await self._rooms.persist(room, events)
            last = events[-1]["event_id"]
        return last

    async def live(self, count: int) -> Sample:
        """Persist chains of events, one room per caller."""
        watch = Stopwatch()
        batches = count // CALLERS // BATCH
        await _at_once([self._grow(f"!live{self._name()}", None, batches) for _ in range(CALLERS)])
        return watch.sample(count)

    async def backfilled(self, count: int) -> Sample:
        """Persist chains newest first, each batch before the previous one."""

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

        watch = Stopwatch()
        await _at_once([dig(f"!old{self._name()}") for _ in range(CALLERS)])
        return watch.sample(count)

    async def room(self, size: int) -> Sample:
        """Persist 2,000 events in a room that has ``size`` events."""
        if size not in self._grown:
            room, batch = f"!size{self._name()}", min(BATCH * 10, size)
            self._grown[size] = room, await self._grow(room, None, size // batch, batch)
        room, last = self._grown[size]
        watch = Stopwatch()
        self._grown[size] = room, await self._grow(room, last, 20)
        return watch.sample(20 * BATCH)

    async def page(self, count: int) -> Sample:
        """Read pages of 100 events backwards, from the middle of the largest room."""
        room, _ = self._grown[max(self._grown)]
        (*_, start) = await self._rooms.history(room, None, 500)
        watch = Stopwatch()
        for _ in range(count):
            page = await self._rooms.history(room, start.place, 100)
            assert len(page) == BATCH  # noqa: S101
        return watch.sample(count)

    async def state(self, count: int) -> Sample:
        """Read the state after a chain of 1,000 state events with different keys."""
        last: Sequence[str] = []
        events = []
        for number in range(KEYS):
            events.append(_event(self._name(), last, state_key=str(number)))
            last = [events[-1]["event_id"]]
        room = f"!state{last[0]}"
        await self._rooms.persist(room, events)
        watch = Stopwatch()
        for _ in range(count):
            state = await self._rooms.state_at(room, last[0])
            assert len(state) == KEYS  # noqa: S101
        return watch.sample(count)


def _event(event_id: str, prev_event_ids: Sequence[str], **more: Any) -> dict[str, Any]:
    return {"event_id": event_id, "type": "bench", "sender": "@far:away", "prev_event_ids": prev_event_ids, **more}


async def _at_once(work: Sequence[Any]) -> None:
    await gatherResults([Deferred.fromCoroutine(each) for each in work], consumeErrors=True)
