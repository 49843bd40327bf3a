"""Tests of the pictures: each event once, each edge between drawn events, a look for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given

from replication.rooms.drawing import FORWARD, KINDS, EventMark, _columns, encode_dot, encode_svg, mark_of, with_missing
from replication.rooms.event import Event
from replication.rooms.views import StoredEvent
from tests.rooms.graphs import Step, graphs
from tests.rooms.recorded import DATA

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

SVG = "{http://www.w3.org/2000/svg}"


def mark(name: str, depth: int, *prev: str, kind: str = "plain") -> EventMark:
    return EventMark(name, f"type of {name}", depth, depth, prev, kind, is_state=kind == "state")


@pytest.mark.parametrize(
    ("state_key", "flags", "label", "kind", "is_state"),
    [
        (None, (), "m.room.topic", "plain", False),
        ("", (), "m.room.topic", "state", True),
        ("@a:here", (), "m.room.topic @a:here", "state", True),
        (None, ("outlier",), "m.room.topic", "outlier", False),
        (None, ("outlier", "soft_failed"), "m.room.topic", "soft_failed", False),
        ("", ("outlier", "soft_failed", "rejected"), "m.room.topic", "rejected", True),
    ],
)
def test_a_mark_draws_an_event_of_http(
    state_key: str | None, flags: Collection[str], label: str, kind: str, *, is_state: bool
) -> None:
    event = Event("$e", "!r:here", "m.room.topic", state_key, "@a:here", prev_event_ids=("$b", "$c"))
    stored = StoredEvent(
        *(event, 7, -3, "master"),
        outlier="outlier" in flags,
        rejected="no" if "rejected" in flags else None,
        soft_failed="soft_failed" in flags,
        out_of_band_membership=False,
        state_group=None,
    )
    assert mark_of(stored.to_json()) == EventMark("$e", label, 7, -3, ("$b", "$c"), kind, is_state)


def test_a_missing_event_is_drawn_below_the_lowest_event_that_names_it() -> None:
    marks = with_missing([mark("low", 5, "gone"), mark("high", 9, "gone")], {"gone"})
    assert [(each.event_id, each.depth) for each in marks] == [("high", 9), ("low", 5), ("gone", 4)]


def test_a_missing_event_is_drawn_below_the_events_that_name_it() -> None:
    marks = with_missing([mark("b", 9, "gone", "elsewhere"), mark("a", 1)], {"gone", "never shown"})
    assert [(each.event_id, each.depth, each.kind) for each in marks] == [
        ("b", 9, "plain"),
        ("gone", 8, "missing"),
        ("a", 1, "plain"),
    ]


def test_marks_are_in_descending_order_of_depth_then_of_arrival_then_of_id() -> None:
    marks = with_missing([mark("b", 3, "x", "y"), mark("c", 3), mark("a", 2, "x"), mark("zz", 0, "z")], {"x", "y", "z"})
    ranks = [(each.event_id, each.depth) for each in marks]
    assert ranks == [("c", 3), ("b", 3), ("a", 2), ("y", 2), ("x", 1), ("zz", 0), ("z", 0)]


def picture() -> tuple[str, list[EventMark], set[str]]:
    """Return a room with an event of each kind, branches that part and meet, and an event that is not shown."""
    marks = [
        mark("$merge_of_all_branches", 7, "$left", "$right", "$other_right"),
        mark("$outlier", 6, "$left", kind="outlier"),
        mark("$other_right", 6, "$root"),
        mark("$right", 5, "$root", kind="state"),
        mark("$left", 5, "$failed", "not shown"),
        mark("$late", 4, "$rejected", "$root"),
        mark("$failed", 3, "$root", kind="soft_failed"),
        mark("$rejected", 2, "$root", kind="rejected"),
        mark("$root", 1, "$gone", kind="state"),
    ]
    return "!room:far.test", with_missing(marks, {"$gone"}), {"$merge_of_all_branches", "$late"}


@pytest.mark.parametrize(("encode", "name"), [(encode_svg, "room.svg"), (encode_dot, "room.dot")])
def test_a_picture_stays_as_it_is(encode: Callable[..., str], name: str) -> None:
    """After a change, look at the new picture, and replace the old one if it is better."""
    assert encode(*picture()) == (DATA / "drawing" / name).read_text(encoding="utf-8")


def test_a_room_without_events_is_a_picture_with_a_legend_only() -> None:
    svg = ET.fromstring(encode_svg("!r", [], ()))
    assert (svg.get("width"), svg.get("height")) == ("960", "80")
    assert encode_dot("!r", [], ()).count("\n") == 3


def test_every_kind_has_a_look_of_its_own_and_is_in_the_legend() -> None:
    marks = [mark(kind, place, kind=kind) for place, kind in enumerate(KINDS)]
    svg, dot = encode_svg("!r", marks, {"plain"}), encode_dot("!r", marks, {"plain"})
    for fill, line, name in KINDS.values():
        assert name in svg
        assert fill in svg
        assert fill in dot
        assert line in svg
    assert svg.count(FORWARD[0]) == 2  # the event, and the legend
    assert dot.count(FORWARD[0]) == 1
    assert len({(fill, line) for fill, line, _ in KINDS.values()}) == len(KINDS)


def test_names_are_escaped() -> None:
    evil = '"]; <script>&\\'
    marks = [mark(evil, 2, "a"), mark("a", 1)]
    ET.fromstring(encode_svg(evil, marks, {evil}))
    assert '"\\"]; <script>&\\\\" [label=' in encode_dot(evil, marks, ())


def test_control_characters_are_escaped() -> None:
    """SVG may not have them, and a terminal would obey those of Graphviz text."""
    marks = [mark("\x1b[2J", 1)]
    svg, dot = encode_svg("!\x1b", marks, ()), encode_dot("!\x1b", marks, ())
    ET.fromstring(svg)
    assert "\x1b" not in svg + dot


def test_events_of_equal_depth_share_a_rank() -> None:
    dot = encode_dot("!r", [mark("c", 2, "a"), mark("b", 2, "a"), mark("a", 1)], ())
    assert '{ rank=same; "c"; "b"; }' in dot


@given(graphs())
def test_every_event_has_a_row_and_every_edge_a_line(steps: list[Step]) -> None:
    events = {step.event.event_id: step.event for step in steps}
    marks = with_missing(
        [EventMark(it.event_id, it.type, it.depth or 0, n, it.prev_event_ids) for n, it in enumerate(events.values())],
        (),
    )
    svg = ET.fromstring(encode_svg("!r", marks, ()))
    legend = len(KINDS) + 1
    nodes = svg.findall(f"{SVG}circle[@r='5']")
    assert len(nodes) >= len(events)
    edges = [(each, prev) for each, it in events.items() for prev in it.prev_event_ids if prev in events]
    assert len(svg.findall(f"{SVG}path[@fill='none']")) == len(edges)
    heights = [node.get("cy") for node in nodes[-len(events) :]]
    assert len(set(heights)) == len(events)
    assert legend < len(svg)
    dot = encode_dot("!r", marks, ())
    assert dot.count(" -> ") == len(edges)
    assert dot.count("[label=") == len(events)


@given(graphs())
def test_no_edge_crosses_another_event(steps: list[Step]) -> None:
    events = {step.event.event_id: step.event for step in steps}
    marks = with_missing(
        [EventMark(it.event_id, it.type, it.depth or 0, n, it.prev_event_ids) for n, it in enumerate(events.values())],
        (),
    )
    columns = _columns(marks)
    rows = {each.event_id: row for row, each in enumerate(marks)}
    for each in marks:
        for prev in each.prev_event_ids:
            if prev in rows:
                between = [it for it in marks if rows[each.event_id] < rows[it.event_id] < rows[prev]]
                assert columns[prev] not in {columns[it.event_id] for it in between}
