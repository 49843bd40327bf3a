"""The routing table."""

from __future__ import annotations

import pytest

from replication.web.request import Answer, RequestError
from replication.web.routes import Route, find_route


async def nothing(*_: object) -> Answer:
    return Answer.json({})


ROUTES = (
    Route("GET", "/v1/streams", "streams", nothing),
    Route("GET", "/v1/streams/NAME", "stream", nothing),
    Route("GET", "/v1/rooms/ROOM/events", "history", nothing),
    Route("POST", "/v1/rooms/ROOM/events", "events", nothing),
    Route("GET", "/replication/updates/NAME/TXN", "updates", nothing),
    Route("POST", "/replication/NAME/WORD…", "request", nothing),
)


@pytest.mark.parametrize(
    ("method", "path", "label", "parameters"),
    [
        ("GET", "v1/streams", "streams", []),
        ("HEAD", "v1/streams", "streams", []),
        ("GET", "v1/streams/orders", "stream", ["orders"]),
        ("GET", "v1/streams/NAME", "stream", ["NAME"]),
        ("GET", "v1/rooms/!r/events", "history", ["!r"]),
        ("POST", "v1/rooms/!r/events", "events", ["!r"]),
        ("GET", "replication/updates/orders/x", "updates", ["orders", "x"]),
        ("POST", "replication/send_event", "request", ["send_event", []]),
        ("POST", "replication/send_event/a/b", "request", ["send_event", ["a", "b"]]),
    ],
)
def test_a_request_has_a_route_and_parameters(method: str, path: str, label: str, parameters: list[object]) -> None:
    route, found = find_route(ROUTES, method, path.split("/"))
    assert (route.label, found) == (label, parameters)
    assert route.answer is nothing


def error_of(method: str, path: str) -> RequestError:
    route, parameters = find_route(ROUTES, method, path.split("/"))
    assert parameters == []
    with pytest.raises(RequestError) as caught:
        route.answer(None).send(None)  # type: ignore[attr-defined]
    return caught.value


@pytest.mark.parametrize("path", ["", "v1", "v1/streams/a/b", "v2/streams", "replication", "V1/streams"])
def test_a_path_without_a_route_is_answered_404(path: str) -> None:
    assert error_of("GET", path).answer.status == 404
    assert find_route(ROUTES, "GET", path.split("/"))[0].label == "none"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "v1/streams", "GET"),
        ("PUT", "v1/rooms/!r/events", "GET, POST"),
        ("POST", "replication/updates/orders/x", "GET"),
    ],
)
def test_a_wrong_method_is_answered_405_with_those_of_the_path(method: str, path: str, allowed: str) -> None:
    answer = error_of(method, path).answer
    assert (answer.status, answer.headers) == (405, {"Allow": allowed})
