"""Faults that are planted into the code, most of which other projects had: seeds find each of them.

``FIRST_SEED=1 pytest -rP tests/simulation/test_planted_faults.py`` searches again, and prints the seeds.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
from msgspec.structs import replace

import replication.errors
import replication.follower.merge
import replication.session.encoder
import replication.writer.publisher
from replication.bench.simulation.disk import SimulatedStore
from replication.bench.simulation.run import Plan, make_plan, run
from replication.follower.application import Application
from replication.follower.history import FollowedHistories
from replication.follower.merge import MergingFollower
from replication.follower.relay import Relay
from replication.follower.reports import RelayedReports
from replication.follower.stream import StreamFollower
from replication.segments.archive import _SegmentCursor
from replication.session.connection import ReplicationConnection
from replication.session.encoder import encode_position
from replication.session.send_buffer import SendBuffer
from replication.streams.cursor import Apply, Cursor
from replication.streams.merge import ApplyMerged
from replication.streams.merge import merge as merge_rightly
from replication.streams.pending import PendingIds
from replication.streams.reorder_buffer import Batch, ReorderBuffer
from replication.wire.grammar import Token
from replication.writer.known_followers import LATER, KnownFollowers
from replication.writer.publisher import PublishedStream, Publisher
from replication.writer.reservation import FactTransaction
from tests.docs.pages import page, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST_SEEDS = 600


class Fault(NamedTuple):
    """A fault: the class or module that is changed, the name there, the wrong value; a world; a seed that finds it.

    ``steps`` are those of the seed in an older version, made shorter, where few seeds find the fault.
    """

    where: Any
    name: str
    wrong: Any
    world: str = ""
    seed: int = 1
    steps: Sequence[Sequence[Any]] = ()


def forget_writers(self: MergingFollower, connection: Any) -> None:
    self._writers.pop(connection, None)
    StreamFollower.connection_lost(self, connection)


def wrong_order(cursors: Mapping[Any, Cursor]) -> ApplyMerged | None:
    found = merge_rightly(cursors)
    return found and ApplyMerged(found.parts, [fact for part in found.parts.values() for fact in part.facts])


def ready_only(cursors: Mapping[Any, Cursor]) -> ApplyMerged | None:
    ready = {writer: each for writer, each in cursors.items() if isinstance(each.step(), Apply)}
    return merge_rightly(ready)


def whole_range(self: Cursor, step: Any, page: Any, right: Callable[..., None] = Cursor.fetched) -> None:
    right(self, step, page)
    if step.resets == self._resets:
        self._advance_tail(max(self._tail, self._gap_upto))


def unpaged_rows(self: Cursor, link: Any, prev: Token, new: Token, right: Any = Cursor.position_received) -> None:
    right(self, link, new if prev > self.published else prev, new)
    self._tail = self._gap_upto = self.published


async def forget_to_store(self: Publisher, stream: PublishedStream, settled: Token) -> None:
    self.ids.durable = max(self.ids.durable, settled)


async def swallow(self: Application, step: Any, tried: Any, transaction: Any, right: Any = Application._call) -> Any:
    try:
        return await right(self, step, tried, transaction)
    except ValueError:
        return ()


async def publish_first(
    self: FactTransaction[Any], facts: Any, receipt: Any = None, right: Any = FactTransaction.commit
) -> None:
    if self._transaction is None:
        self.stream.complete([fact.token for fact in facts], facts)
        self._complete = True
    await right(self, facts, receipt)


def lose_spilled(self: ReorderBuffer, settled: Token, right: Any = ReorderBuffer.release) -> Batch | None:
    found: Batch | None = right(self, settled)
    return found and Batch(found.facts, found.after, found.upto)


def drop_when_full(self: SendBuffer, chunk: bytes, lines: int, right: Any = SendBuffer.push) -> bool:
    right(self, chunk, lines)
    return True


def bare_position(self: PublishedStream, upto: Token) -> Any:
    return encode_position(self.definition.name, self._instance_name, self.published, upto)


def drop_long_rows(head: str, fact: Any, stream: str, instance: str, limit: int) -> Any:
    return [line for line in replication.session.encoder._encode_fact(head, fact) if len(line.encode()) <= limit + 1]


async def give_up(self: StreamFollower, writer: Any, step: Any, right: Any = StreamFollower._catch_up) -> None:
    try:
        await right(self, writer, step)
    except replication.errors.ReplicationError:
        self._driving[writer] = None
        await self._lifetime.sleep(1e6)


def never_reached(*_: object) -> float:
    return float("inf")


def as_published(self: PublishedStream) -> Any:
    settled = Token(self.ids.pending.highest)
    return encode_position(self.definition.name, self._instance_name, settled, settled)


def whole_segment(self: _SegmentCursor, after: Token, upto: Token, limit: int, right: Any = _SegmentCursor.page) -> Any:
    page = right(self, after, upto, limit)
    return replace(page, upto=min(upto, self.segment.upto))


def announce_at_once(self: Relay, link: Any, key: Any, *places: Token, right: Any = Relay.linked) -> None:
    right(self, link, key, *places)
    if key in self._found_at:
        self._found_at[key] = Token(0)
        self.confirmed(key, places[-1])


async def sync_nothing(self: SimulatedStore) -> None:
    """Return before the commits are on the disk."""


async def keep_to_itself(self: RelayedReports, name: str, positions: Any, streams: Any = None) -> float:
    return LATER


async def needs_nothing(self: KnownFollowers, streams: Any, writer: Any) -> Any:
    return {}


def leave_no_mark(self: StreamFollower, writer: Any, step: Any, right: Any = StreamFollower._write) -> Any:
    return replace(right(self, writer, step), gone=None)


async def trust(self: FollowedHistories, writer: Any, after: Token, upto: Token, is_open: Any) -> Any:
    return upto, await self._fetch(self._stream, writer)


FAULTS: dict[str, Fault] = {
    # ---- linear order
    "facts of several writers are not sorted": Fault(
        replication.follower.merge, "merge", wrong_order, "linear", seed=21
    ),
    "a writer that has nothing ready is passed": Fault(
        replication.follower.merge, "merge", ready_only, "linear", seed=2
    ),
    "a writer is not waited for while its connection is lost": Fault(
        MergingFollower, "connection_lost", forget_writers, "linear", seed=46
    ),
    "a known writer is not waited for after a start": Fault(
        MergingFollower, "open", StreamFollower.open, "linear-relay", seed=16101
    ),
    # ---- publishing
    "a position passes an open ID (synapse#11045)": Fault(
        PendingIds, "settled", property(lambda self: self.highest), seed=2
    ),
    "the stored position ignores open IDs": Fault(PendingIds, "settled_with", lambda self, ids: self.highest, seed=4),
    "a position is published and not stored (synapse#17226)": Fault(
        Publisher, "_store_position", forget_to_store, "copy", seed=13
    ),
    "a fact is published before its commit": Fault(FactTransaction, "commit", publish_first, seed=2),
    "facts beyond the limit of memory are lost": Fault(ReorderBuffer, "release", lose_spilled, seed=4),
    "a bare POSITION covers facts (synapse#19795)": Fault(PublishedStream, "gap", bare_position, seed=4),
    "REPLICATE is answered with what is not published yet (synapse#7360)": Fault(
        PublishedStream, "position", as_published, seed=571
    ),
    "a row that is too long is left out (synapse#6327)": Fault(
        replication.session.encoder, "_encode_long_fact", drop_long_rows, seed=1
    ),
    "lines for a slow peer are dropped": Fault(SendBuffer, "push", drop_when_full, seed=283),
    # ---- following
    "a page counts for more than it has (synapse#15335)": Fault(Cursor, "fetched", whole_range, seed=5),
    "a gap is not fetched (synapse#7427)": Fault(Cursor, "position_received", unpaged_rows, seed=1),
    "rows of a lost connection are joined to a later fact": Fault(
        Cursor, "_drop_partial", lambda self: None, seed=1451
    ),
    "a failed page is never fetched again": Fault(StreamFollower, "_catch_up", give_up, seed=30),
    "the position moves although the function raised": Fault(Application, "_call", swallow, seed=12),
    "a restored writer is trusted": Fault(FollowedHistories, "compare", trust, "restored", seed=579),
    "a dead connection is not noticed (synapse#9010)": Fault(
        ReplicationConnection, "_give_up_at", never_reached, seed=2
    ),
    # ---- relays
    "a relay does not pass on that its writer has started again": Fault(
        Relay, "restarted", lambda *_: None, "restored-relay", seed=51
    ),
    "a relay announces a writer before it has caught up": Fault(Relay, "linked", announce_at_once, "relay", seed=421),
    "a relay sends no gap for facts that it leaves out": Fault(
        Relay, "left_out", lambda *_: None, "forced-retention", seed=9
    ),
    "a relay does not pass reports on": Fault(RelayedReports, "report", keep_to_itself, "retention", seed=20),
    # ---- retention
    "a retention does not wait for known followers": Fault(
        KnownFollowers, "needed", needs_nothing, "retention", seed=9
    ),
    "a position is reported before it is on the disk": Fault(
        SimulatedStore,
        "sync",
        sync_nothing,
        "retention",
        seed=4679,
        steps=[
            ["append", 6, [[0, 0], [1, 40], [4, 240], [4, 0]], False],
            ["advance", 1.0],
            ["stop", 7],
            ["kill", 3, True, 2],
            ["advance", 40.0],
        ],
    ),
    "a copy has no mark for facts that it leaves out": Fault(
        StreamFollower, "_write", leave_no_mark, "forced-retention", seed=9
    ),
    # ---- segments
    "a part of a segment counts for all of it": Fault(_SegmentCursor, "page", whole_segment, "segments", seed=3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seed_finds_the_fault(fault: str) -> None:
    planted = FAULTS[fault]
    first = int(os.environ.get("FIRST_SEED", planted.seed))
    with mock.patch.object(planted.where, planted.name, planted.wrong):
        for seed in range(first, first + MOST_SEEDS):
            plan = Plan(seed, planted.world, planted.steps) if planted.steps else make_plan(seed, planted.world)
            if failure := run(plan).failure:
                break
        else:
            pytest.fail(f"{MOST_SEEDS} seeds have not found it")
    sys.stdout.write(f"seed {seed}: {fault}: {failure[:100]}\n")
    assert failure.startswith("AssertionError: I"), "no invariant has found it, but an error of the fault itself"
    assert not run(plan).failure, "the seed fails without the fault"


def test_the_page_lists_every_fault() -> None:
    listed = [(row["fault"], row["seed"]) for row in table(page("simulation.md"), "## Faults that it finds")]
    assert listed == [(name, f"{each.seed}{', steps' * bool(each.steps)}") for name, each in FAULTS.items()]
