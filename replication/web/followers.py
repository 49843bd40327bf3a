"""What followers report: ``/v1/followers`` and ``/v1/followers/NAME`` (docs/http.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, Protocol, cast

import msgspec

from replication.errors import RemoteProtocolError
from replication.net.access import ALL
from replication.web.request import Answer, RequestError, read_query
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token  # noqa: TC001 (msgspec reads the annotations)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.streams.interfaces import KnownFollower
    from replication.web.request import ApiRequest


class IFollowers(Protocol):
    """Keeps what followers report; each may raise StreamError or StoreError."""

    async def report(
        self,
        name: str,
        positions: Mapping[StreamName, Mapping[InstanceName, Token]],
        streams: Collection[StreamName] | None = None,
    ) -> float:
        """Note up to where a follower has applied facts, and return the seconds to its next report.

        ``streams``: those whose positions are replaced; None: all.
        """
        ...

    async def followers(self) -> Sequence[KnownFollower]:
        """Return all followers that have reported, by name."""
        ...

    async def forget(self, name: str) -> None:
        """Forget a follower."""
        ...


class ReportNote(NamedTuple):
    """The version that sent the last report, and when, in seconds of the site's clock: for the live page."""

    version: str
    at: float


class _Report(msgspec.Struct, forbid_unknown_fields=True):
    positions: dict[StreamName, dict[InstanceName, Annotated[Token, msgspec.Meta(ge=0, le=2**63 - 1)]]]
    streams: frozenset[StreamName] | None = None  # that it is about; None: all


LONGEST_REPORT: Final = 8 * 2**20  # bytes; the 64 MiB of other bodies would take seconds of one turn
AGAIN_AFTER: Final = 60.0  # seconds
MAX_NOTES: Final = 1_000  # the oldest are forgotten first
_AGENT: Final = re.compile(r"replication/(?P<version>[\w.+-]{1,40})")
_decode: Final = msgspec.json.Decoder(_Report).decode


async def list_followers(request: ApiRequest) -> Answer:
    """Answer with all that have reported."""
    read_query(request)
    found = await _followers(request).followers()
    described = [{"name": each.name, "reported": each.reported_at, "positions": each.positions} for each in found]
    return Answer.json({"followers": described})


async def take_report(request: ApiRequest, name: str) -> Answer:
    """Answer with the seconds to the next report, once this one is stored."""
    read_query(request)
    readable = cast("frozenset[StreamName]", request.rights.read)
    if not readable:  # the body of such a peer is not stored
        raise RequestError(403, request.rights.missing("read", [ALL]) or "")
    body = request.body()
    if len(body) > LONGEST_REPORT:
        raise RequestError(413, f"a report of more than {LONGEST_REPORT} bytes")
    try:
        report = _decode(body)
    except grammar.NOT_DECODED as error:
        raise RemoteProtocolError(f"not a report of positions: {error}") from error
    if why := request.rights.missing("read", report.positions or [ALL]):  # an empty report removes all, as DELETE does
        raise RequestError(403, why)
    streams = report.streams
    if ALL not in readable:
        streams = readable if streams is None else readable & streams
    if streams is not None and (other := report.positions.keys() - streams):
        raise RequestError(400, f"positions has the stream {min(other)!r:.100}, but streams does not")
    if request.has_passed:  # this relay passes it on to all others now
        return Answer.json({"next": AGAIN_AFTER})
    following = await _followers(request).report(name, report.positions, streams)
    agent = _AGENT.fullmatch(request.requestHeaders.getRawHeaders("user-agent", [""])[0])
    notes = request.api.report_notes
    notes.pop(name, None)
    notes[name] = ReportNote(agent["version"] if agent else "", request.api.clock.seconds())
    if len(notes) > MAX_NOTES:
        del notes[next(iter(notes))]
    return Answer.json({"next": following})


async def forget_follower(request: ApiRequest, name: str) -> Answer:
    """Answer once a follower is forgotten."""
    read_query(request)
    followers = _followers(request)
    if name not in [each.name for each in await followers.followers()]:
        raise RequestError(404, f"no follower {name!r:.100} has reported; GET /v1/followers lists all")
    await followers.forget(name)
    request.api.report_notes.pop(name, None)
    return Answer.json({})


def _followers(request: ApiRequest) -> IFollowers:
    followers = request.api.served.followers
    if followers is None:
        raise RequestError(404, "this process only follows: report positions to the writers")
    return followers
