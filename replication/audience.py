"""Those who follow this process: greeted, told where it stands and what is new, and told when it stops."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import LocalProtocolError
from replication.net.broadcast import Broadcast
from replication.session.connection import Fault, Role, Rows
from replication.streams.seams import Sample
from replication.wire.commands import Error, Name, Ping, RemoteServerUp, Replicate, Server, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.net.protocol import Limits, ReplicationProtocol
    from replication.session.connection import Heard, Words
    from replication.session.feed import Chunk
    from replication.wire.commands import Command
    from replication.wire.grammar import StreamName

GOODBYE_PATIENCE = 5.0  # seconds that peers have, when we stop, to take what is still on its way to them
NAME_LENGTH = 255  # of a peer's NAME, what is kept: as much as an instance's name may have


class Audience:
    """The connections of a process that writes (``net.protocol.Conversation``).

    ``positions`` returns the lines that answer REPLICATE for some streams, all if there is none among them.  Whoever
    connects before ``begin`` is greeted at once, and answered then.  ``words`` are the commands that it
    knows, ``hear`` is told of each that is said, ``lost`` of every connection that ends.
    """

    log = Logger()

    def __init__(
        self,
        clock: IReactorTime,
        *,
        server_name: str,
        limits: Limits,
        wall: Callable[[], float],
        positions: Callable[[Sequence[StreamName]], Sequence[Chunk]],
        prepare: Callable[[], Deferred[None] | None],
        words: Words,
        hear: Callable[[ReplicationProtocol, Command], None],
        lost: Callable[[ReplicationProtocol], None],
    ) -> None:
        self.faults = Counter[str]()
        self.heard = Counter[str]()  # commands, by word
        self.connections = 0
        self._clock = clock
        self._server_name = server_name
        self._limits = limits
        self._wall = wall
        self._positions = positions
        self._prepare = prepare
        self._words = words
        self._hear = hear
        self._lost = lost
        self._broadcast = Broadcast(clock)
        self._begun = False
        self._closed: str | None = None  # why nobody is let in
        self._early: dict[ReplicationProtocol, list[Replicate]] = {}  # who connected before we begin, what they asked
        self._transports: set[ReplicationProtocol] = set()  # all that there are, those that are being closed too
        self._gone = Counter[str]()  # lines and bytes of connections that have ended
        self._alone: Deferred[None] | None = None  # fires once no transport is left

    def __iter__(self) -> Iterator[ReplicationProtocol]:
        """All connections, oldest first."""
        return iter(self._broadcast)

    def begin(self) -> None:
        """Answer what was asked already, and from now on at once."""
        self._begun = True
        early, self._early = self._early, {}
        for peer, asked in early.items():
            for command in asked:
                self._answer(peer, command.streams)

    def refuse(self, why: str) -> None:
        """Close those who wait for us to begin, and whoever comes from now on."""
        self._closed = why
        for peer in list(self._early):
            peer.close(why)

    def tell(self, stream: StreamName, chunk: Chunk) -> None:
        """Hand lines to every connection that wants the stream, at the end of this reactor turn."""
        self._broadcast.put(stream, chunk)

    def say(self, *commands: Command) -> None:
        """Say commands to every connection; LocalProtocolError if one is not ours to say, or cannot be said."""
        for command in commands:
            if not self._words.may_say(Role.MASTER, type(command)):
                raise LocalProtocolError(f"{command.WORD} is not for a master to say")
        lines = b"".join([encode_line(each, self._limits.line_limit) for each in commands])
        for peer in self._broadcast:
            peer.write(lines, len(commands))

    async def end(self) -> None:
        """Say goodbye to all, and return once they are gone, or have been dropped for not taking it."""
        self._broadcast.flush()
        for peer in list(self._transports):
            peer.close("server stopping")
        if self._transports:
            self._alone = Deferred()
            await self._alone.addTimeout(GOODBYE_PATIENCE, self._clock, lambda _result, _seconds: None)
        for peer in list(self._transports):
            peer.abort()

    def samples(self) -> Iterable[Sample]:
        """Yield the figures of the metrics page."""
        peers = list(self._broadcast)
        yield Sample("connections", "gauge", "Connections that follow this writer.", len(peers))
        yield Sample("connections_total", "counter", "Connections accepted.", self.connections)
        queued = sum(peer.queued_bytes for peer in peers)
        for word, count in self.heard.items():
            yield Sample("commands_total", "counter", "Commands heard from followers.", count, {"command": word})
        yield Sample("queued_bytes", "gauge", "Bytes kept for peers that do not read.", queued)
        for what in ("lines", "bytes"):
            for way in ("in", "out"):
                total = self._gone[f"{what}_{way}"] + sum(getattr(peer, f"{what}_{way}") for peer in peers)
                yield Sample(f"{what}_total", "counter", f"{what.capitalize()} of the wire.", total, {"direction": way})

    # ---- Conversation

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """Introduce ourselves; from now on the connection gets all that is new."""
        self.connections += 1
        self._transports.add(peer)
        if self._closed is not None:
            peer.close(self._closed)
            return
        peer.say(Server(self._server_name), Ping(str(int(self._wall() * 1000))))
        self._broadcast.add(peer)
        if not self._begun:
            self._early[peer] = []

    def peer_said(self, peer: ReplicationProtocol, heard: Sequence[Heard]) -> None:
        """Do what the commands ask for."""
        for command in heard:
            match command:
                case Replicate(streams):
                    if peer in self._early:
                        self._early[peer].append(command)
                    else:
                        self._answer(peer, streams)
                case Name(name):
                    peer.name = name[:NAME_LENGTH]
                case Error("server stopping"):
                    self.log.info("{name!r} ({address}) is stopping", name=peer.name, address=peer.address)
                case Error(text):
                    self.log.warn(
                        "{name!r} ({address}) says: {text!r}", name=peer.name, address=peer.address, text=text[:200]
                    )
                case RemoteServerUp():
                    self._relay(peer, command)
                case _:
                    pass
            if not isinstance(command, Rows | Fault):
                self.heard[command.WORD] += 1
                self._hear(peer, command)

    def peer_faulted(self, peer: ReplicationProtocol, fault: Fault) -> None:
        """Count and log what a connection did wrong."""
        self.faults[fault.kind] += 1
        self.log.warn(
            "closing {name!r} ({address}): {text}", name=peer.name or "a peer", address=peer.address, text=fault.text
        )

    def peer_lost(self, peer: ReplicationProtocol) -> None:
        """Forget a connection."""
        self._broadcast.remove(peer)
        self._lost(peer)
        self._early.pop(peer, None)
        for what in ("lines_in", "lines_out", "bytes_in", "bytes_out"):
            self._gone[what] += getattr(peer, what)

    def peer_gone(self, peer: ReplicationProtocol) -> None:
        """Forget a transport."""
        self._transports.discard(peer)
        if self._alone is not None and not self._transports and not self._alone.called:
            self._alone.callback(None)

    # ---- inside

    def _relay(self, origin: ReplicationProtocol, command: RemoteServerUp) -> None:
        """Pass on to all others what one connection said, never back to where it came from (trap 9)."""
        try:
            line = encode_line(command, self._limits.line_limit)
        except LocalProtocolError as error:  # readable, but not to be said so: two CR at its end
            origin.fail(Fault(str(error), "bad line"))
            return
        for peer in self._broadcast:
            if peer is not origin:
                peer.write(line, 1)

    def _answer(self, peer: ReplicationProtocol, streams: tuple[StreamName, ...]) -> None:
        """Answer REPLICATE, as soon as it can be; who cannot be answered has to come again."""
        prepared = self._prepare()
        if prepared is None:
            self._say_positions(peer, streams)
            return
        prepared.addCallback(lambda _: self._say_positions(peer, streams) if peer in self else None)
        prepared.addErrback(lambda failure: peer.close(failure.getErrorMessage()))

    def _say_positions(self, peer: ReplicationProtocol, streams: tuple[StreamName, ...]) -> None:
        """Tell this connection only, with what all of them have been told up to now (trap 19)."""
        self._broadcast.restrict(peer, streams)
        positions = self._positions(streams)
        peer.write(b"".join(each.data for each in positions), len(positions))
