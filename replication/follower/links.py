"""The links to the writers that a process follows: which of them have sent positions, and of which writers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import attrs
from msgspec import MsgspecError
from twisted.internet.defer import Deferred

from replication.deferreds import share
from replication.errors import CatchUpError, ConfigError
from replication.net.endpoints import is_redis
from replication.streams.history import MAX_EPOCHS, UNKNOWN_HISTORY, Epoch, read_part
from replication.wire.commands import Ping
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from replication.net.links import IWriterLink
    from replication.streams.history import History
    from replication.wire.grammar import StreamName

DEFAULT_CONNECT: Final = ("tcp:127.0.0.1:9092",)


@attrs.define(eq=False, repr=False)
class FollowedLinks:
    """The links of a process, and what each has sent of followed streams.

    The first positions of a link are complete once it has sent a position, and follows.  ``endpoints`` has where the
    last POSITION of each writer came from.  Several processes may send positions of one former writer, each for its
    own streams: so ``endpoint`` takes a stream.
    """

    endpoints: dict[InstanceName, str] = attrs.field(init=False, factory=dict)
    _of_streams: dict[tuple[StreamName, InstanceName], str] = attrs.field(init=False, factory=dict)
    # The open connection on which a writer is followed; None: not known yet.
    followed: Callable[[StreamName, InstanceName], IWriterLink | None] = attrs.field(
        init=False, default=lambda _stream, _writer: None
    )
    _first: dict[IWriterLink, Deferred[None]] = attrs.field(init=False, factory=dict)  # fire once they are complete
    _sent: set[IWriterLink] = attrs.field(init=False, factory=set)  # that have sent positions
    _partial: set[IWriterLink] = attrs.field(init=False, factory=set)  # to relays that have not found all writers
    _were_partial: set[IWriterLink] = attrs.field(init=False, factory=set)  # lost, and they do not follow again yet
    # The open connections that have sent a POSITION of each writer; one of them is followed.
    _of_writers: dict[InstanceName, set[IWriterLink]] = attrs.field(init=False, factory=lambda: defaultdict(set))

    def add(self, link: IWriterLink) -> None:
        """Add a link, before it is started."""
        self._first[link] = Deferred()

    def __iter__(self) -> Iterator[IWriterLink]:
        """All links."""
        return iter(self._first)

    async def first_positions(self) -> None:
        """Return once the first positions of every link are complete, or ``end_waiting`` is called."""
        for first in self._first.values():
            await share(first)

    def end_waiting(self) -> None:
        """Let ``first_positions`` return: this process stops."""
        for first in self._first.values():
            if not first.called:
                first.callback(None)

    def all_positions_received(self) -> bool:
        """Whether the first positions of each link were complete once since the start."""
        return all(first.called for first in self._first.values())

    def all_writers_found(self) -> bool:
        """Whether all positions are received, and each relay that is followed has found all of its writers, too."""
        return self.all_positions_received() and not self._partial and not self._were_partial

    def partial_relays(self) -> list[str]:
        """Return the endpoints of relays that have not found all of their writers."""
        return [link.endpoint for link in self if link in self._partial or link in self._were_partial]

    def endpoint(self, stream: StreamName, writer: InstanceName) -> str | None:
        """Return where a writer is followed, or else where its last POSITION in a stream came from; None: nowhere.

        Two databases may have a writer of one name.  Pages and the history are of the one whose rows are applied.
        """
        link = self.followed(stream, writer)
        return self._of_streams.get((stream, writer)) if link is None else link.endpoint

    async def history(self, stream: StreamName, writer: InstanceName) -> History | None:
        """Return a writer's history from the link of its ``endpoint``; None if that is lost."""
        endpoint = self.endpoint(stream, writer)
        link = next((each for each in self._of_writers[writer] if each.endpoint == endpoint), None)
        return None if link is None else await self.history_of(link, stream, writer)

    async def history_of(self, link: IWriterLink, stream: StreamName, writer: InstanceName) -> History | None:
        """Return a writer's history from a link.

        It is empty if the other end sends none, and None if the link is lost.  CatchUpError: the other end cannot read
        it now, or it has changed between two parts.
        """
        endpoint, history, total = link.endpoint, list[Epoch](), None
        while True:
            answer = await link.echo(f"{stream} {writer} {len(history)}")
            if answer is None:
                return None
            if answer == UNKNOWN_HISTORY:
                raise CatchUpError(f"the process at {endpoint} cannot read the history of {writer} now")
            try:
                count, epochs = read_part(answer)
            except MsgspecError:
                count, epochs = 0, ()  # an older version sends nothing
            history += epochs
            if count == len(history) and total in (None, count):
                return history
            if not epochs or total not in (None, count) or count > MAX_EPOCHS:
                raise CatchUpError(f"the process at {endpoint} has sent only a part of the history of {writer}")
            total = count

    def links_of(self, writer: InstanceName) -> list[IWriterLink]:
        """Return the open connections that have sent a POSITION of a writer."""
        return sorted(self._of_writers.get(writer, ()), key=lambda link: link.endpoint)

    def over_redis(self) -> bool:
        """Whether a link is to a Redis, where writers may be found at any time."""
        return any(is_redis(link.endpoint) for link in self)

    def silent_endpoints(self) -> list[str]:
        """Return the endpoints of writers and relays whose first positions are not complete; a Redis is neither."""
        return [
            link.endpoint for link, first in self._first.items() if not first.called and not is_redis(link.endpoint)
        ]

    def writers_of(self, link: IWriterLink) -> list[InstanceName]:
        """Return the writers of which the open connection of a link has sent a POSITION."""
        return [name for name, links in self._of_writers.items() if link in links]

    def request_positions(self, writer: InstanceName) -> None:
        """Have the open connections that have sent a POSITION of a writer send their positions again."""
        for link in tuple(self._of_writers.get(writer, ())):
            link.request_positions()

    # ---- what links receive

    def position_received(self, link: IWriterLink, stream: StreamName, writer: InstanceName) -> None:
        """Note a POSITION of a followed stream."""
        self.endpoints[writer] = self._of_streams[stream, writer] = link.endpoint
        self._of_writers[writer].add(link)
        self._sent.add(link)

    def pinged(self, link: IWriterLink, ping: Ping) -> list[str]:
        """Note whether a relay has found all of its writers (docs/protocol/connection.md B2); return the words."""
        words = ping.text.split()
        match words:
            case [Ping.COMPLETE]:
                self._partial.discard(link)
                self._were_partial.discard(link)
            case [_, Ping.ECHO]:
                self._partial.discard(link)
            case [Ping.PARTIAL] | [_, Ping.PARTIAL, Ping.ECHO]:
                self._partial.add(link)
        return words

    def is_late(self, link: IWriterLink) -> bool:
        """Whether a link follows, and its first positions were not complete then."""
        return link.state == "following" and not self._first[link].called

    def following(self, link: IWriterLink) -> None:
        """Note that a link follows: its first positions are complete if it has sent any."""
        self._were_partial.discard(link)  # and not at its PING: a process that starts may send ``partial`` later
        first = self._first[link]
        if link in self._sent and not first.called:
            first.callback(None)

    def lost(self, link: IWriterLink) -> None:
        """Note a lost connection; another link to the same writers is followed from now on."""
        if link in self._partial:
            self._partial.remove(link)
            self._were_partial.add(link)
        shared = [links for links in self._of_writers.values() if link in links]
        for links in shared:
            links.remove(link)
        for other in {each for links in shared for each in links}:
            other.request_positions()


def is_open(link: IWriterLink) -> Deferred[bool]:
    """Fire with True once the other end of a link has answered, with False if the connection is lost before."""
    return link.echo().addCallback(lambda answer: answer is not None)


def endpoints_of(connect: Sequence[str] | None, writers: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the endpoints to connect to: those of ``writers``, then those of ``connect``; ConfigError if none."""
    if connect is None:
        connect = () if any("connect" in place for place in writers.values()) else DEFAULT_CONNECT
    endpoints = [*(place["connect"] for place in writers.values() if "connect" in place), *connect]
    if not endpoints:
        raise ConfigError("a worker needs at least one writer to connect to: give connect")
    return list(dict.fromkeys(endpoints))


def expected_writers(writers: Mapping[str, Mapping[str, str]]) -> dict[str, list[InstanceName]]:
    """Return the names of the writers at each endpoint of ``writers``.

    A Redis is left out: any process of a Synapse publishes there.
    """
    expected: dict[str, list[InstanceName]] = {}
    for name, place in writers.items():
        if "connect" in place and not is_redis(place["connect"]):
            expected.setdefault(place["connect"], []).append(InstanceName(name))
    return expected
