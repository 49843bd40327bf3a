"""Tests of persisting: recordings of a real Synapse, and refused events."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any

import pytest
from msgspec.structs import replace

from replication.errors import RoomError, UnknownRoomError
from replication.rooms.event import MAX_DEPTH, Event
from tests.rooms.recorded import DATA, Keeper, lines_of, read_all

ROOM = "!r:far.test"

STEPS = [
    step
    for name in ("steps", "more")  # "more" was recorded likewise: stuck extremities in a room of version 1, and fuzz
    for step in lines_of(f"room-dag-branching/{name}.ndjson.gz")
]
SCENARIOS = list(dict.fromkeys(step["scenario"] for step in STEPS))


def triples(rows: Any) -> list[tuple[Any, ...]]:
    """Return rows as sorted tuples."""
    return sorted(map(tuple, rows), key=repr)


def state_of(state: Any) -> list[tuple[str, ...]]:
    """Return a state in the form of the recordings."""
    return sorted((*key, event_id) for key, event_id in state.items())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_recorded_step_gives_the_same_tables_as_synapse(scenario: str) -> None:
    """Extremities, flags, orderings, de-outliering, groups, deltas and rows after each recorded step."""
    replay_scenario(Keeper(), scenario)


def replay_scenario(keeper: Keeper, scenario: str) -> None:
    """Persist the recorded events, and compare after each step."""
    steps = [step for step in STEPS if step["scenario"] == scenario]
    events = {event["event_id"]: event for step in steps for event in step["events"]}
    for step in steps:
        by_room = defaultdict(list)
        for event in step["events"]:
            by_room[event["room_id"]].append(event)
        rows_sent = []
        for room, sources in by_room.items():
            some = read_all(room, sources, events.__getitem__)
            for chunk in [[each] for each in some] if step["one_transaction_each"] else [some]:
                rows_sent += keeper.take(room, chunk, backfilled=step["backfilled"])
        check_step(keeper, step, rows_sent)


def check_step(keeper: Keeper, step: Any, rows_sent: list[tuple[int, str]]) -> None:
    """Compare everything that was recorded of a step."""
    expected, where = step["expected"], (step["scenario"], step["step"])
    assert keeper.positions == expected["positions"], where
    lines = [line.split(" ", 4) for line in expected["wire"] if line.startswith("RDATA")]
    # the recorder's poll sent backfill in descending order (docs/protocol/traps.md 12), state rows in the table's
    assert sorted(row for _, row in rows_sent) == sorted(line[4] for line in lines), where
    numbered = sorted({int(line[3]) for line in lines if line[3] != "batch"})
    assert sorted({number for number, _ in rows_sent}) == numbered, where
    for room, tables_then in expected["rooms"].items():
        check_room(keeper, room, tables_then, where)


def check_room(keeper: Keeper, room: str, then: Any, where: object) -> None:
    """Compare a room's tables with the recorded ones."""
    tables = keeper.tables()
    assert tables.forward(room) == set(then["forward_extremities"]), where
    assert tables.backward(room) == set(then["backward_extremities"]), where
    assert state_of(tables.current_state(room)) == triples(then["current_state"]), where
    summary = tables.room(room)
    assert (summary and summary.min_depth) == then["min_depth"], where
    for event in then["events"]:
        (stored,) = tables.metadata([event["event_id"]]).values()
        assert (stored.stream_ordering, stored.depth) == (event["stream_ordering"], event["topological_ordering"]), (
            where
        )
        assert (stored.outlier, stored.rejected) == (event["outlier"], event["rejected"]), where
        assert stored.state_group == event["state_group"], where
    for number, group in then["state_groups"].items():
        own = tables.group(int(number))
        assert (own.prev_group, state_of(own.delta)) == (group["prev_group"], triples(group["delta"])), where
        assert state_of(tables.group_state(int(number))) == triples(group["state"]), where
    for table, columns in (
        ("ex_outlier_stream", "stream_ordering, event_id, state_group FROM room_ex_outliers"),
        (
            "current_state_delta_stream",
            "stream_ordering, type, state_key, event_id, prev_event_id FROM room_state_deltas",
        ),
        ("stream_ordering_to_exterm", "stream_ordering, event_id FROM room_extremity_log"),
        ("event_edges", "event_id, prev_event_id FROM room_edges"),
    ):
        held = set(keeper.rows(f"SELECT {columns}"))
        assert {tuple(row) for row in then[table]} <= held, (where, table)


def test_a_recorded_server_gives_the_same_tables_as_synapse() -> None:
    """3,442 events in 26 rooms of versions 1 to 9: depths, extremities, current state, and the state of every event."""
    keeper = Keeper("peer.test")
    expected = json.loads(gzip.decompress((DATA / "room-dag/expected.json.gz").read_bytes()))["rooms"]
    groups = {}
    for source in lines_of("room-dag/events.ndjson.gz"):
        groups[source["event_id"]] = source["state_group"]
        keeper.positions["events"] = source["stream_ordering"] - 1
        keeper.take(source["room_id"], read_all(source["room_id"], [source]))
    tables = keeper.tables()
    for room, then in expected.items():
        assert tables.forward(room) == set(then["forward_extremities"])
        assert tables.backward(room) == set(then["backward_extremities"])
        assert state_of(tables.current_state(room)) == triples(then["current_state"])
    for stored in tables.metadata(groups).values():
        then = expected[stored.room_id]["state_groups"][str(groups[stored.event_id])]
        assert stored.state_group is not None
        assert state_of(tables.group_state(stored.state_group)) == triples(then["state"])
    assert keeper.rows("SELECT max(chain) FROM room_state_groups") == [(100,)]


def event(name: str, *prev: str, **more: Any) -> Event:
    """Return an event of a graph without a create event."""
    return Event.read(ROOM, {"event_id": name, "type": "note", "prev_event_ids": list(prev), **more})


def test_a_missing_depth_is_computed() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a"), event("b", "a"), event("c", "a", "b")])
    depths = {name: stored.depth for name, stored in keeper.tables().metadata(["a", "b", "c"]).items()}
    assert depths == {"a": 1, "b": 2, "c": 3}
    keeper.take(ROOM, [event("deep", "c", depth=MAX_DEPTH), event("deeper", "deep")])
    assert keeper.tables().metadata(["deeper"])["deeper"].depth == MAX_DEPTH


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            [event("x", "b", depth=1)],
            (
                "event 'x' is local and has depth 1, less than depth 2 of an event that it follows; "
                "leave depth out to have it computed"
            ),
        ),
        (
            [event("x", "y", depth=1), event("y", "x", depth=1)],
            "event 'x' would precede itself: that is a cycle",
        ),
        (
            [event("x", "y"), event("y", "x")],
            "event 'y' has no depth, and 'x', which it follows, follows it: that is a cycle",
        ),
        ([event("b", "a", content={"other": 1})], "event 'b' is stored already, with different content"),
        (
            [event("x", "b"), event("x", "b", content={"other": 1})],
            "event 'x' is in this request twice, with different content",
        ),
        ([event("b", "a", depth=7)], "event 'b' has another depth in a copy that is stored or in this request"),
        (
            [event("x", "gone", depth=3)],
            (
                "event 'x': the state before it is not known, because 'gone' is missing; "
                "give state_before, or make it an outlier"
            ),
        ),
        ([event("x", "gone")], "event 'x' has no depth, and 'gone', which it follows, is missing"),
        ([event("x", "b", state_before=["a"])], "event 'x': 'a' of its state_before is not a state event"),
        (
            [event("x", "b", state_before=[["t", "", "a"], ["t", "", "b"]])],
            "event 'x': its state_before has two events for ('t', '')",
        ),
    ],
)
def test_a_refused_chunk_changes_nothing(bad: list[Event], why: str) -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a"), event("b", "a")])
    before = dump(keeper)
    with pytest.raises(RoomError) as caught:
        keeper.take(ROOM, [event("good", "b"), *bad])
    assert str(caught.value) == why
    assert dump(keeper) == before


def dump(keeper: Keeper) -> list[Any]:
    """Return the content of all tables."""
    names = [name for (name,) in keeper.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return [(name, keeper.rows(f"SELECT * FROM {name}")) for name in names]


def test_the_current_state_is_resolved_again() -> None:
    """A state event came as an outlier after the event that names it as its state."""
    keeper = Keeper()
    keeper.take(ROOM, [event("a", "gone", depth=5, state_before=["late"])])
    keeper.take(ROOM, [event("late", "gone", depth=4, outlier=True, state_key="k")])
    assert keeper.tables().current_state(ROOM) == {}
    assert keeper.recalculate(ROOM, 9) == [["state", [ROOM, "note", "k", "late"]]]
    assert keeper.tables().current_state(ROOM) == {("note", "k"): "late"}
    assert keeper.recalculate(ROOM, 10) == []
    with pytest.raises(UnknownRoomError, match=r"^no room '!unknown' with a state is stored here$"):
        keeper.recalculate("!unknown", 11)


def test_a_changed_resolver_changes_the_state_of_a_room_with_several_extremities() -> None:
    def resolver(states: object, fetch: object, version: object) -> dict[tuple[str, str], str]:
        return {("note", ""): "a", ("note", "x"): "b"}

    keeper = Keeper()
    keeper.take(ROOM, [event("a", state_key=""), event("b", "a", state_key="x"), event("c", "a", state_key="y")])
    assert set(keeper.tables().current_state(ROOM)) == {("note", ""), ("note", "x"), ("note", "y")}
    keeper.rules = replace(keeper.rules, resolver=resolver)
    assert keeper.recalculate(ROOM, 9) == [["state", [ROOM, "note", "y", None]]]
    assert keeper.tables().current_state(ROOM) == {("note", ""): "a", ("note", "x"): "b"}


def test_an_invitation_of_a_local_user_to_a_room_that_is_not_joined_is_stored() -> None:
    invited = {"outlier": True, "out_of_band_membership": True, "type": "m.room.member"}
    local = "@me:local.test"
    for user, changes, stored in (
        (local, {}, {local: "invite"}),
        (local, {"out_of_band_membership": False}, {}),
        (local, {"type": "note"}, {}),
        ("@you:far.test", {}, {}),
    ):
        keeper = Keeper()
        keeper.take(ROOM, [event("a")])
        keeper.take(ROOM, [event("b", state_key=user, content={"membership": "invite"}, **{**invited, **changes})])
        assert keeper.tables().local_members(ROOM) == stored, (user, changes)


def test_an_event_of_another_room_is_refused() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a")])
    with pytest.raises(RoomError, match="event of room"):
        keeper.take("!other", [Event.read("!other", {"event_id": "a", "type": "note", "prev_event_ids": []})])
    with pytest.raises(RoomError, match="state_before is in another room"):
        source = {"event_id": "b", "type": "note", "prev_event_ids": ["gone"], "depth": 2, "state_before": ["a"]}
        keeper.take("!other", [Event.read("!other", source)])
    with pytest.raises(RoomError, match="another room"):
        keeper.take("!other", [Event.read("!other", {"event_id": "b", "type": "note", "prev_event_ids": ["a"]})])


def test_a_cycle_through_stored_events_is_refused() -> None:
    """``late`` was missing when ``above`` was stored; then it names ``above`` as its predecessor."""
    keeper = Keeper()
    keeper.take(ROOM, [event("a"), event("above", "a", "late", depth=3, state_before=[]), event("top", "above")])
    with pytest.raises(RoomError, match="cycle"):
        keeper.take(ROOM, [event("late", "top", depth=4)], backfilled=True)
    with pytest.raises(RoomError, match="cycle"):
        keeper.take(ROOM, [event("late", "top", depth=2, sender="@far:away")], backfilled=True)


def test_trap_49_an_extremity_behind_a_soft_failed_event_of_one_batch_is_removed() -> None:
    whole, single = Keeper(), Keeper()
    story = [event("a"), event("bad", "a", soft_failed=True), event("good", "bad")]
    whole.take(ROOM, story)
    for each in story:
        single.take(ROOM, [each])
    assert whole.tables().forward(ROOM) == single.tables().forward(ROOM) == {"good"}


def test_trap_49_a_room_keeps_its_forward_extremity_if_all_new_events_are_bad() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a")])
    keeper.take(
        ROOM, [event("s", "a", soft_failed=True), event("r", "a", rejected="no"), event("o", "a", outlier=True)]
    )
    assert keeper.tables().forward(ROOM) == {"a"}


def test_trap_52_a_de_outliered_event_is_published_under_a_new_token_and_keeps_its_own() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a"), event("o", "a", outlier=True)])
    ((number, row),) = keeper.take(ROOM, [event("o", "a")])
    assert (number, json.loads(row)[1][0]) == (4, "o")
    assert keeper.tables().metadata(["o"])["o"].stream_ordering == 3


def test_a_rejected_outlier_that_is_accepted_later_becomes_ordinary() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a"), event("o", "a", outlier=True, rejected="no auth event yet")])
    keeper.take(ROOM, [event("o", "a")])
    stored = keeper.tables().metadata(["o"])["o"]
    assert stored.is_good
    assert keeper.tables().edges_from(["o"]) == [("o", "a")]
    assert keeper.tables().forward(ROOM) == {"o"}


def test_a_missing_state_event_joins_its_groups_when_it_is_stored() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a"), event("far", "gone", depth=9, state_before=["late"])])
    group = keeper.tables().metadata(["far"])["far"].state_group
    assert group is not None
    assert keeper.tables().group_state(group) == {}
    keeper.take(ROOM, [event("late", "a", state_key="", outlier=True)])
    assert keeper.tables().group_state(group) == {("note", ""): "late"}


def test_a_backfilled_chunk_takes_its_state_from_its_oldest_event() -> None:
    """Backfill is newest first; only the oldest event has ``state_before``."""
    keeper = Keeper()
    keeper.take(ROOM, [event("top", "c", depth=9, state_before=[])])
    below = [
        event("c", "b", depth=8),
        event("b", "a", state_key="", depth=7),
        event("a", "gone", depth=6, state_before=[]),
    ]
    keeper.take(ROOM, below, backfilled=True)
    groups = {name: stored.state_group for name, stored in keeper.tables().metadata("abc").items()}
    assert groups["c"] == groups["b"] is not None
    assert keeper.tables().group_state(groups["b"] or 0) == {("note", ""): "b"}
    assert keeper.tables().backward(ROOM) == {"gone"}
    assert keeper.tables().forward(ROOM) == {"top"}
