"""Rooms over HTTP, call by call, on tables in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest

from replication.errors import StoreError
from replication.rooms.event import Event
from replication.storage.tables.room_queries import RoomReads
from replication.web.site import make_site
from replication.wire.grammar import Token
from tests.rooms.recorded import Keeper
from tests.web.served import Client, FakeServed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.web.rooms import IRooms

ROOM = "!r:far.test"
URL = "/v1/rooms/%21r%3Afar.test"
JSON = [("Content-Type", "application/json")]


class KeptRooms:
    """Rooms without a master: what is asked is answered at once."""

    streams = ("events", "backfill")

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.reads = RoomReads(self.keeper.statements)
        self.error: Exception | None = None

    async def persist(self, room_id: str, events: Sequence[Any], *, backfilled: bool = False) -> Sequence[Token]:
        if self.error is not None:
            raise self.error
        some = [Event.read(room_id, each) for each in events]
        stream = "backfill" if backfilled else "events"
        first = self.keeper.positions[stream] + 1
        self.keeper.take(room_id, some, backfilled=backfilled)
        return [Token(first + each) for each in range(len(some))]

    async def view(self, room_id: str) -> Any:
        return self.reads.view(room_id)

    async def event(self, room_id: str, event_id: str) -> Any:
        return self.reads.event_view(room_id, event_id)

    async def state_group(self, number: int) -> Any:
        return self.reads.group(number)

    async def history(self, room_id: str, start: Any = None, limit: int = 100, **how: bool) -> Any:
        return self.reads.history(room_id, start, limit, **how)

    async def gaps(self, room_id: str, limit: int = 100) -> Any:
        return self.reads.gaps(room_id, limit)


class Site:
    """The API with rooms."""

    def __init__(self) -> None:
        self.rooms = KeptRooms()
        self.site = make_site(FakeServed(), secret=None, rooms=cast("IRooms", self.rooms))

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        received = Client(self.site).ask(method, path, data, JSON if data else ())
        return received.code, received.json

    def post(self, *events: object, **more: object) -> tuple[int, Any]:
        return self.ask("POST", f"{URL}/events", {"events": events, **more})


def event(name: str, *prev: str, **more: object) -> dict[str, object]:
    return {"event_id": name, "type": "note", "prev_event_ids": list(prev), **more}


@pytest.fixture
def site() -> Site:
    return Site()


def test_events_are_taken_and_their_ids_answered(site: Site) -> None:
    assert site.post(event("a"), event("b", "a")) == (200, {"ids": [2, 3]})
    assert site.post(event("c", "b"), backfilled=False) == (200, {"ids": [4]})
    old = event("old", "older", depth=1, state_before=[])
    assert site.post(old, backfilled=True) == (200, {"ids": [2]})
    assert site.post() == (200, {"ids": []})


@pytest.mark.parametrize("stream", ["events", "backfill"])
def test_streams_of_rooms_take_events_of_rooms_only(site: Site, stream: str) -> None:
    status, output = site.ask("POST", f"/v1/streams/{stream}/facts", {"rows": [["a"]]})
    assert (status, output["detail"]) == (
        403,
        f"stream {stream!r} has the events of rooms: POST /v1/rooms/ROOM/events",
    )


def test_a_room_is_shown(site: Site) -> None:
    site.post(event("a", state_key=""), event("b", "a"), event("far", "gone", depth=9, state_before=["a"]))
    assert site.ask("GET", URL) == (
        200,
        {
            "room_id": ROOM,
            "room_version": None,
            "forward_extremities": ["b", "far"],
            "backward_extremities": ["gone"],
            "min_depth": 9,
            "current_state": [["note", "", "a"]],
            "gaps": [{"event_id": "gone", "depth": 9}],
        },
    )


def test_an_event_is_shown_with_flags_orderings_edges_and_group(site: Site) -> None:
    site.post(event("a"), event("b", "a", content={"x": [1]}), event("o", "b", outlier=True))
    code, shown = site.ask("GET", f"{URL}/events/b")
    assert code == 200
    assert (shown["depth"], shown["topological_ordering"], shown["stream_ordering"]) == (2, 2, 3)
    assert (shown["prev_event_ids"], shown["next_event_ids"], shown["content"]) == (["a"], ["o"], {"x": [1]})
    assert (shown["outlier"], shown["rejected"], shown["soft_failed"], shown["state_group"]) == (False, None, False, 1)
    assert site.ask("GET", f"{URL}/events/o")[1]["state_group"] is None
    site.post(event("o", "b"))
    assert site.ask("GET", f"{URL}/events/o")[1]["ex_outlier_stream_orderings"] == [5]


def test_a_state_group_is_shown_in_its_room_only(site: Site) -> None:
    site.post(event("a", state_key=""), event("b", "a", state_key="x"))
    number = site.ask("GET", f"{URL}/events/b")[1]["state_group"]
    code, shown = site.ask("GET", f"{URL}/state_groups/{number}")
    assert (code, shown["prev_group"], shown["delta"]) == (200, number - 1, [["note", "x", "b"]])
    assert shown["state"] == [["note", "", "a"], ["note", "x", "b"]]
    assert site.ask("GET", f"/v1/rooms/other/state_groups/{number}")[0] == 404
    assert site.ask("GET", f"{URL}/state_groups/99")[0] == 404
    assert site.ask("GET", f"{URL}/state_groups/x")[0] == 400


def test_history_is_answered_in_pages_in_both_directions(site: Site) -> None:
    site.post(event("a"), event("b", "a"), event("s", "b", soft_failed=True), event("c", "b"))
    for direction, wanted in (("b", ["c", "b", "a"]), ("f", ["a", "b", "c"])):
        found, place = [], ""
        while True:
            code, page = site.ask("GET", f"{URL}/events?dir={direction}&limit=2{place}")
            assert code == 200
            found += [each["event_id"] for each in page["events"]]
            if page["next"] is None:
                break
            place = f"&from={page['next']}"
        assert found == wanted
    assert len(site.ask("GET", f"{URL}/events?whole=true")[1]["events"]) == 4


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("dir=up", "dir"),
        ("whole=1", "whole"),
        ("from=7", "from"),
        ("upto=7", "unknown parameter"),
    ],
)
def test_a_wrong_question_is_refused(site: Site, query: str, why: str) -> None:
    site.post(event("a"))
    code, output = site.ask("GET", f"{URL}/events?{query}")
    assert code == 400
    assert why in output["detail"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not JSON"),
        (b'{"events": [{"event_id": "a", "type": "t", "prev_event_ids": [], "content": {"x": NaN}}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ({}, "the body is not"),
        ({"events": {}}, "the body is not"),
        ({"events": [], "backfill": True}, "the body is not"),
        ({"events": [], "backfilled": 1}, "backfilled"),
        ({"events": ["a"]}, "an event is an object"),
        ({"events": [{"event_id": "a"}]}, "'a': type is missing"),
        ({"events": [event("a", "a")]}, "cycle"),
        ({"events": [event("x", "y", depth=1), event("y", "x", depth=1)]}, "cycle"),
        ({"events": [event("a", depth="1")]}, "depth must be"),
        ({"events": [event("a", depth=True)]}, "depth must be"),
        ({"events": [event("a", depth=-1)]}, "depth must be"),
        ({"events": [event("a", content=[])]}, "content must be"),
        ({"events": [event("a", outlier="yes")]}, "outlier must be"),
        ({"events": [event("a", prev_events=["x"])]}, "unknown field 'prev_events'"),
        ({"events": [event("a", *[str(each) for each in range(21)])]}, "21 prev_event_ids; at most 20"),
        ({"events": [event("a", auth_event_ids=[str(each) for each in range(11)])]}, "11 auth_event_ids; at most 10"),
        ({"events": [event("a", room_id="!other")]}, "its room is"),
        ({"events": [event("first"), event("first", content={"other": 1})]}, "different content"),
    ],
)
def test_wrong_input_is_refused_with_a_reason_and_leaves_nothing(site: Site, body: object, why: str) -> None:
    code, output = site.ask("POST", f"{URL}/events", body)
    assert code == 400
    assert why in output["detail"]
    assert site.ask("GET", URL)[0] == 404


def test_an_unknown_room_is_a_404_and_a_failing_database_a_503(site: Site) -> None:
    for path in (URL, f"{URL}/events", f"{URL}/events/a", "/v1/rooms", f"{URL}/members"):
        assert site.ask("GET", path)[0] == 404
    assert site.ask("POST", URL, {})[0] == 405
    site.rooms.error = StoreError("the disk is full")
    assert site.post(event("a"))[0] == 503


def test_a_server_without_rooms_has_no_such_calls() -> None:
    received = Client(make_site(FakeServed(), secret=None)).ask("GET", URL)
    assert received.code == 404
