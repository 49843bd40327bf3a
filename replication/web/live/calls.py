"""The calls of a browser: the page, its events, and its two files (docs/http.md, The live page)."""

from __future__ import annotations

from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

from replication.errors import RoomError
from replication.rooms.ordering import Place
from replication.web.live.feed import Feed
from replication.web.live.rooms import room_section
from replication.web.live.segments import segments_section
from replication.web.live.tables import text
from replication.web.request import Answer, RequestError, read_query, read_token

if TYPE_CHECKING:
    from replication.web.request import ApiRequest

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_STATIC: Final = {"live.css": "text/css; charset=utf-8", "live.js": "text/javascript; charset=utf-8"}
_PAGE: Final = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="stylesheet" href="live/live.css">
<script type="module" src="live/live.js"></script>
</head>
<body>
<header>
<h1>$title</h1>
<p id="state" role="status">$state</p>
</header>
<main>
<form role="search">
<fieldset>
<legend>Find facts</legend>
<label>stream <input name="stream" value="$stream" list="names"></label>
<label>ID <input name="id" value="$token" inputmode="numeric"></label>
<label>text in a row <input name="has" value="$has"></label>
</fieldset>
$room_field
<fieldset>
<legend>Show streams</legend>
<label>part of a name <input name="find" value="$find"></label>
</fieldset>
<button>Search</button>
<datalist id="names">$names</datalist>
</form>
<div id="trouble">$trouble</div>
<label id="follow" hidden><span>follow the latest facts <input type="checkbox" checked></span></label>
<div id="facts" data-followed="$followed">$facts</div>
$room
<div id="streams" data-events="live/events?find=$query">$streams</div>
<div id="connections">$connections</div>
<div id="followers">$followers</div>
$segments
</main>
</body>
</html>
""")
_ROOM_FIELD: Final = Template("""<fieldset>
<legend>Walk through a room</legend>
<label>room <input name="room" value="$room"></label>
</fieldset>""")
MAX_NAMES: Final = 100  # that the search proposes


async def show_page(request: ApiRequest) -> Answer:
    """Answer with the page: its tables are complete, so it can be read without JavaScript."""
    query = read_query(request, [], ["find", "stream", "id", "has", "room", "at"])
    feed, served = feed_of(request), request.api.served
    feed.look()
    rights = request.rights
    find, stream, has = query.get("find", ""), query.get("stream", ""), query.get("has", "")
    room, place = query.get("room", ""), _read_place(query.get("at"))
    token = read_token(query, "id") if query.get("id") else None
    if token is not None and not stream:
        raise RequestError(400, "parameter 'stream' is missing: an ID is one of a stream")
    names = sorted(each.definition.name for each in served.stream_statuses())
    visible = [each for each in names if rights.may_see(each)]
    tables = await feed.tables(rights, find)
    page = _PAGE.substitute(
        title=text(f"{served.role} {served.instance_name} of {served.server_name}"),
        state=await feed.state(),
        find=text(find),
        query=text(quote(find, safe="")),
        stream=text(stream),
        token="" if token is None else token,
        names="".join(f'<option value="{text(each)}">' for each in visible[:MAX_NAMES]),
        has=text(has),
        followed=text("&" + urlencode({"stream": stream, "has": has})) if stream and token is None else "",
        facts=await feed.facts(rights, stream, token, has) if stream else "",
        room_field=_ROOM_FIELD.substitute(room=text(room)) if request.api.keeps_rooms else "",
        room=await feed.section(("room", rights, room, place), lambda: _room(request, room, place)) if room else "",
        trouble=tables["trouble"],
        streams=tables["streams"],
        connections=tables["connections"],
        followers=await feed.followers(rights),
        segments=await feed.section(("segments", rights), lambda: segments_section(served, rights)),
    )
    return Answer(200, page.encode(), "text/html; charset=utf-8", HEADERS)


async def send_events(request: ApiRequest) -> Answer:
    """Answer with server-sent events, until the page is closed: a part of the page each, or cells."""
    query = read_query(request, [], ["find", "stream", "has"])
    feed, what = feed_of(request), [query.get(each, "") for each in ("find", "stream", "has")]
    return Answer(200, b"", "text/event-stream", HEADERS, stream=lambda opened: feed.follow(opened, *what))


async def send_file(request: ApiRequest, name: str) -> Answer:
    """Answer with the style or the script of the page."""
    read_query(request)
    if name not in _STATIC:
        raise RequestError(404, f"there is no file {name!r:.100}")
    body = (files("replication.web.live") / "static" / name).read_bytes()
    return Answer(200, body, _STATIC[name], HEADERS)


def _read_place(at: str | None) -> Place | None:
    try:
        return None if at is None else Place.parse(at)
    except RoomError as error:
        raise RequestError(400, f"at: {error}") from error


async def _room(request: ApiRequest, room: str, place: Place | None) -> str:
    """Return the section of a room."""
    if not request.api.keeps_rooms:
        return "<p>This process keeps no rooms.</p>"
    if why := request.rights.missing("read", request.api.streams_of_rooms):
        return f"<p>{text(why)}</p>"
    return await room_section(request.api.rooms, room, place)


def feed_of(request: ApiRequest) -> Feed:
    """Return what all viewers of this process share."""
    api = request.api
    if api.feed is None:
        api.feed = Feed(api.served, api.clock, api.health, api.report_notes)
    return api.feed
