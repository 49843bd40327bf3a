"""The routing table: which function answers which method and path (docs/http.md, All calls)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs

from replication.web import browser, facts, followers, health, metrics, rooms, skips, status, synapse
from replication.web.request import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from replication.net.access import Right
    from replication.web.line_stream import LineStream
    from replication.web.request import Answer, ApiRequest

ROOM: Final = "/v1/rooms/ROOM"
SYNAPSE: Final = "/_synapse/replication"


@attrs.frozen
class Route:
    """One call of the API.

    A part of ``path`` in upper case is a parameter; one that ends with … takes the rest of the path, as a list.
    ``answer`` is called with the request and the parameters.  ``label`` is the call's name in metrics.  The
    sender needs ``right``: for the stream that is the first parameter, or for those of rooms.  A ``public`` call needs
    no secret.  A ``browser`` is asked for the secret by HTTP Basic.  ``open_lines`` is called as ``answer`` once the
    headers have arrived, and returns what takes the body.
    """

    method: str
    path: str
    label: str
    answer: Callable[..., Awaitable[Answer]]
    right: Right | None = None
    public: bool = False
    browser: bool = False
    open_lines: Callable[..., LineStream] | None = None
    _parts: Sequence[str] = attrs.field(init=False)

    @_parts.default
    def _split(self) -> Sequence[str]:
        return self.path.strip("/").split("/")

    def match(self, path: Sequence[str]) -> list[Any] | None:
        """Return the parameters in ``path``, or None if it is the path of another call."""
        parameters: list[Any] = []
        for place, expected in enumerate(self._parts):
            if expected.endswith("…"):
                return [*parameters, [*path[place:]]]
            if place == len(path) or (not expected.isupper() and expected != path[place]):
                return None
            if expected.isupper():
                parameters.append(path[place])
        return parameters if len(path) == len(self._parts) else None


ROUTES: Final = (
    Route("GET", "/v1/streams", "streams", status.list_streams),
    Route("GET", "/v1/streams/NAME", "stream", status.read_stream, "see"),
    Route("GET", "/v1/streams/NAME/updates", "updates", facts.read_updates, "read"),
    Route("GET", "/v1/streams/NAME/history", "history", facts.read_history, "read"),
    Route("POST", "/v1/streams/NAME/facts", "facts", facts.append_facts, "append"),
    Route("POST", "/v1/streams/NAME/append", "append", facts.append_lines, "append", open_lines=facts.open_lines),
    Route("POST", "/v1/streams/NAME/skip", "skip", skips.skip_fact, "admin"),
    Route("POST", "/v1/streams/NAME/retry", "retry", skips.retry_fact, "admin"),
    Route("GET", "/v1/skipped", "skipped", skips.list_skipped, "admin"),
    Route("GET", "/v1/followers", "followers", followers.list_followers, "admin"),
    Route("PUT", "/v1/followers/NAME", "report", followers.take_report),
    Route("DELETE", "/v1/followers/NAME", "forget", followers.forget_follower, "admin"),
    Route("GET", "/v1/connections", "connections", status.list_connections),
    Route("GET", "/v1/users", "users", status.list_users, "admin"),
    Route("GET", "/v1/users/USER", "user", status.read_user, "admin"),
    Route("GET", "/health/live", "live", health.check_live, public=True),
    Route("GET", "/health/ready", "ready", health.check_ready, public=True),
    Route("GET", "/health", "health", health.check_health, public=True),
    Route("GET", "/metrics", "metrics", metrics.answer_metrics),
    Route("GET", f"{SYNAPSE}/get_repl_stream_updates/NAME/TXN", "synapse", synapse.read_updates, "read"),
    Route("POST", f"{SYNAPSE}/NAME/WORD…", "synapse call", synapse.answer_request, "commands"),
)
ROOM_ROUTES: Final = (
    Route("GET", ROOM, "room", rooms.read_room, "read"),
    Route("POST", f"{ROOM}/events", "room events", rooms.persist_events, "append"),
    Route("GET", f"{ROOM}/events", "room history", rooms.read_history, "read"),
    Route("GET", f"{ROOM}/events/EVENT", "room event", rooms.read_event, "read"),
    Route("GET", f"{ROOM}/state_groups/NUMBER", "room state group", rooms.read_state_group, "read"),
)
LIVE_ROUTES: Final = (
    Route("GET", "/", "page", browser.show_page, browser=True),
    Route("GET", "/live/events", "page events", browser.send_events, browser=True),
    Route("GET", "/live/FILE", "page file", browser.send_file, browser=True),
)
NO_ROOMS: Final = tuple(Route(method, f"{ROOM}…", "none", rooms.refuse_rooms) for method in ("GET", "POST"))


def find_route(routes: Sequence[Route], method: str, path: Sequence[str]) -> tuple[Route, Sequence[Any]]:
    """Return the route of a request, and its parameters; without one, a route that answers 404 or 405.

    Of two routes whose paths match, the first one counts.
    """
    for route in routes:
        parameters = route.match(path)
        if parameters is None:
            continue
        methods = {each.method: each for each in routes if each.path == route.path}
        found = methods.get("GET" if method == "HEAD" else method)
        return (
            (found, parameters)
            if found
            else (attrs.evolve(route, answer=partial(_refuse, method, methods), right=None), [])
        )
    return Route(method, "", "none", partial(_not_found, "/".join(path))), []


async def _refuse(method: str, allowed: Iterable[str], _: ApiRequest) -> NoReturn:
    methods = ", ".join(allowed)
    raise RequestError(405, f"{method!r:.40} is not a method of this path; use {methods}", {"Allow": methods})


async def _not_found(path: str, _: ApiRequest) -> NoReturn:
    raise RequestError(
        404, f"there is no path {path!r:.100}; try /v1/streams, /v1/connections, /health/ready or /metrics"
    )
