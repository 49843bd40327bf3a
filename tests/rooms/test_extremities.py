"""Tests of extremities after random graphs, compared with a computation from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.rooms.event import Event
from replication.rooms.extremities import DUMMY, are_stuck, missing
from replication.rooms.resolution import resolve as matrix
from tests.rooms.graphs import ROOM, Step, backward_of, forward_of, graphs
from tests.rooms.recorded import Keeper

if TYPE_CHECKING:
    from collections.abc import Collection


def persist_steps(keeper: Keeper, steps: list[Step], cuts: list[bool] | None = None) -> None:
    """Persist steps one by one or, where ``cuts`` is False, together with the step before."""
    batch: list[Step] = []
    for index, step in enumerate(steps):
        cut = cuts is None or cuts[index % len(cuts)]
        repeated = any(each.event.event_id == step.event.event_id for each in batch)
        if batch and (cut or repeated or batch[-1].backfilled != step.backfilled):
            keeper.take(ROOM, [each.event for each in batch], backfilled=batch[0].backfilled)
            batch = []
        batch.append(step)
    keeper.take(ROOM, [each.event for each in batch], backfilled=batch[0].backfilled)


@given(graphs())
def test_forward_extremities_equal_those_computed_from_scratch(steps: list[Step]) -> None:
    keeper = Keeper()
    for count, step in enumerate(steps, 1):
        before = keeper.tables().forward(ROOM)
        persist_steps(keeper, [step])  # a Keeper keeps nothing between transactions: each step is a restart, too
        found = keeper.tables().forward(ROOM)
        assert found
        assert found == (before if step.backfilled else forward_of(steps[:count]) or before)


@given(graphs())
def test_backward_extremities_equal_those_computed_from_scratch(steps: list[Step]) -> None:
    keeper = Keeper()
    for count, step in enumerate(steps, 1):
        persist_steps(keeper, [step])
        assert keeper.tables().backward(ROOM) == backward_of(steps[:count])


@given(graphs(), st.lists(st.booleans(), min_size=1, max_size=10))
def test_batches_do_not_change_the_graph(steps: list[Step], cuts: list[bool]) -> None:
    single, batched = Keeper(), Keeper()
    persist_steps(single, steps)
    persist_steps(batched, steps, cuts)
    # a forward extremity that got a backfilled child goes with the next live batch: let one come to both
    for what in ("forward", "backward", "current_state"):
        assert getattr(single.tables(), what)(ROOM) == getattr(batched.tables(), what)(ROOM), what
    names = [step.event.event_id for step in steps]
    for name, stored in single.tables().metadata(names).items():
        other = batched.tables().metadata([name])[name]
        assert (stored.depth, stored.outlier, stored.rejected) == (other.depth, other.outlier, other.rejected)
        assert (stored.state_group is None) == (other.state_group is None)
        if stored.state_group is not None and other.state_group is not None:
            assert single.tables().group_state(stored.state_group) == batched.tables().group_state(other.state_group)
    edges = "SELECT event_id, prev_event_id FROM room_edges ORDER BY event_id, prev_event_id"
    assert single.rows(edges) == batched.rows(edges)


def test_an_outlier_counts_as_missing() -> None:
    keeper = Keeper()
    (outlier, after) = (step.event for step in _outlier_story())
    keeper.take(ROOM, [outlier, after])
    assert missing(keeper.tables(), [after]) == {"o"}


def test_an_event_that_is_reached_through_an_outlier_stays_a_forward_extremity() -> None:
    keeper = Keeper()
    for name, before, more in (
        ("first", [], {}),
        ("outlier", ["first"], {"outlier": True}),
        ("last", ["outlier"], {"state_before": []}),
    ):
        fields = {"event_id": name, "type": "note", "prev_event_ids": before, **more}
        keeper.take(ROOM, [Event.read(ROOM, fields)])
    assert keeper.tables().forward(ROOM) == {"first", "last"}


def _outlier_story() -> list[Step]:
    from replication.rooms.event import Event

    outlier = Event.read(ROOM, {"event_id": "o", "type": "note", "prev_event_ids": [], "depth": 1, "outlier": True})
    source = {"event_id": "a", "type": "note", "prev_event_ids": ["o"], "depth": 2, "state_before": []}
    return [Step(outlier), Step(Event.read(ROOM, source))]


NOW = 1_800_000_000_000  # milliseconds, as a Keeper's clock has it
DAY = 24 * 60 * 60 * 1000
ALICE, BOB, LOCAL = "@alice:far.test", "@bob:other.test", "@me:local.test"


def room_with_a_stuck_end(stuck: dict[str, Any], chain: int) -> Keeper:
    """Return a room: ``stuck`` is beside the topic; ``chain`` events follow the topic, the last a new topic."""
    keeper = Keeper("local.test", matrix)

    def send(name: str, prev: str | None, kind: str = "m.room.message", **values: Any) -> None:
        source = {"event_id": name, "type": kind, "sender": ALICE, "prev_event_ids": [prev] if prev else [], **values}
        keeper.take(ROOM, [Event.read(ROOM, source)])

    send("create", None, "m.room.create", state_key="", content={"creator": ALICE, "room_version": "6"})
    fields = {"auth_event_ids": ["create"]}
    send("joined", "create", "m.room.member", state_key=ALICE, content={"membership": "join"}, **fields)
    fields["auth_event_ids"].append("joined")
    send("topic", "joined", "m.room.topic", state_key="", content={"topic": "t"}, **fields)
    send("stuck", "joined", **{"sender": BOB, **stuck})
    last = "topic"
    for number in range(1, chain):
        send(f"m{number}", last, sender=LOCAL)
        last = f"m{number}"
    send("end", last, "m.room.topic", state_key="", content={"topic": "u"}, **fields)
    return keeper


@pytest.mark.parametrize(
    ("stuck", "chain", "goes"),
    [
        ({"sender": ALICE}, 20, False),
        ({"sender": ALICE}, 21, True),  # the 21st is 21 deeper: topic and stuck are equally deep
        ({}, 21, False),
        ({"origin_server_ts": NOW - DAY - 1}, 100, False),
        ({"origin_server_ts": NOW - DAY - 1}, 101, True),
        ({"origin_server_ts": NOW - DAY}, 101, False),
        ({"sender": LOCAL, "origin_server_ts": 1}, 101, False),
        ({"sender": LOCAL, "origin_server_ts": 1, "type": DUMMY}, 101, True),  # "joined", which it joins, is Alice's
    ],
)
def test_a_stuck_forward_extremity_is_removed(stuck: dict[str, Any], chain: int, goes: bool) -> None:
    keeper = room_with_a_stuck_end(stuck, chain)
    assert keeper.tables().forward(ROOM) == {"end", *([] if goes else ["stuck"])}


def test_a_local_dummy_that_follows_a_local_event_stays() -> None:
    sources = {"d": (LOCAL, DUMMY, ["local", "remote"]), "local": (LOCAL, "m", []), "remote": (ALICE, "m", [])}

    def fetch(event_ids: Collection[str]) -> dict[str, Event]:
        values = {
            each: {"event_id": each, "type": kind, "sender": sender, "prev_event_ids": prevs, "depth": 1}
            for each in event_ids
            for sender, kind, prevs in [sources[each]]
        }
        return {each: Event.read(ROOM, value) for each, value in values.items()}

    new = Event.read(ROOM, {"event_id": "new", "type": "m", "sender": ALICE, "prev_event_ids": [], "depth": 500})

    def all_of(event_ids: Collection[str]) -> dict[str, Event]:
        return {"new": new} if "new" in event_ids else fetch(event_ids)

    def stuck(*ends: str) -> bool:
        return are_stuck(ends, [new], all_of, is_local=lambda user: user == LOCAL, now=NOW)

    assert stuck("remote")
    assert not stuck("remote", "local")
    assert not stuck("d")
    assert not stuck("new")


def test_a_graph_without_a_create_event_keeps_its_extremities() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [Event.read(ROOM, {"event_id": "a", "type": "n", "prev_event_ids": []})])
    ends = [Event.read(ROOM, {"event_id": each, "type": "n", "prev_event_ids": ["a"]}) for each in ("b", "c")]
    keeper.take(ROOM, ends)
    last = "c"
    for number in range(150):
        more = {"state_key": ""} if not number else {}
        event = {"event_id": f"n{number}", "type": "n", "prev_event_ids": [last], **more}
        keeper.take(ROOM, [Event.read(ROOM, event)])
        last = f"n{number}"
    assert keeper.tables().forward(ROOM) == {"b", "n149"}
