"""Extremities after random stories, against a computation from scratch; in one batch, one by one, restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replication.rooms.extremities import missing
from tests.rooms.recorded import Keeper
from tests.rooms.stories import ROOM, Step, backward_of, forward_of, stories


def tell(keeper: Keeper, steps: list[Step], cuts: list[bool] | None = None) -> None:
    """Hand a story over one by one, or, where ``cuts`` are False, together with what comes before."""
    batch: list[Step] = []
    for index, step in enumerate(steps):
        cut = cuts is None or cuts[index % len(cuts)]
        repeated = any(each.event.event_id == step.event.event_id for each in batch)
        if batch and (cut or repeated or batch[-1].backfilled != step.backfilled):
            keeper.take(ROOM, [each.event for each in batch], backfilled=batch[0].backfilled)
            batch = []
        batch.append(step)
    keeper.take(ROOM, [each.event for each in batch], backfilled=batch[0].backfilled)


@given(stories())
def test_forward_extremities_are_those_that_a_fresh_look_at_everything_finds(steps: list[Step]) -> None:
    keeper = Keeper()
    for count, step in enumerate(steps, 1):
        before = keeper.tables().forward(ROOM)
        tell(keeper, [step])  # a Keeper keeps nothing between transactions: each step is a restart, too
        found = keeper.tables().forward(ROOM)
        assert found
        assert found == (before if step.backfilled else forward_of(steps[:count]) or before)


@given(stories())
def test_backward_extremities_are_what_ordinary_events_follow_and_is_not_here(steps: list[Step]) -> None:
    keeper = Keeper()
    for count, step in enumerate(steps, 1):
        tell(keeper, [step])
        assert keeper.tables().backward(ROOM) == backward_of(steps[:count])


@given(stories(), st.lists(st.booleans(), min_size=1, max_size=10))
def test_one_batch_and_one_by_one_give_the_same_graph(steps: list[Step], cuts: list[bool]) -> None:
    single, batched = Keeper(), Keeper()
    tell(single, steps)
    tell(batched, steps, cuts)
    # a forward extremity that got a backfilled child goes with the next live batch: let one come to both
    for what in ("forward", "backward", "current_state"):
        assert getattr(single.tables(), what)(ROOM) == getattr(batched.tables(), what)(ROOM), what
    names = [step.event.event_id for step in steps]
    for name, stored in single.tables().stored(names).items():
        other = batched.tables().stored([name])[name]
        assert (stored.depth, stored.outlier, stored.rejected) == (other.depth, other.outlier, other.rejected)
        assert (stored.state_group is None) == (other.state_group is None)
        if stored.state_group is not None and other.state_group is not None:
            assert single.tables().group_state(stored.state_group) == batched.tables().group_state(other.state_group)
    edges = "SELECT event_id, prev_event_id FROM room_edges ORDER BY event_id, prev_event_id"
    assert single.rows(edges) == batched.rows(edges)


def test_an_outlier_is_as_good_as_missing() -> None:
    keeper = Keeper()
    (outlier, after) = (step.event for step in _outlier_story())
    keeper.take(ROOM, [outlier, after])
    assert missing(keeper.tables(), [after]) == {"o"}


def _outlier_story() -> list[Step]:
    from replication.rooms.event import Event

    outlier = Event.read(ROOM, {"event_id": "o", "type": "note", "prev_event_ids": [], "depth": 1, "outlier": True})
    source = {"event_id": "a", "type": "note", "prev_event_ids": ["o"], "depth": 2, "state_before": []}
    return [Step(outlier), Step(Event.read(ROOM, source))]
