"""What a writer logs about its peers: each error once, names of two processes, MAX_LINES a minute for each host."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol

from twisted.logger import Logger, LogLevel

from replication.logs import TroubleLog
from replication.net.admission import network_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IReactorTime

    from replication.net.protocol import ReplicationProtocol


class Peer(Protocol):
    """One end of a connection: its NAME, empty if it has sent none, and its address."""

    name: str
    address: str


MAX_PEERS: Final = 1_000  # with errors that are kept: hostile names cannot fill the memory
PERIOD: Final = 60.0  # seconds over which lines of one host are counted
MAX_LINES: Final = 100  # of one host in this time


class PeerLog:
    """Logs the errors of peers, by their NAME, or by their host if they have sent none.

    An error is logged once until it changes.  It is over when a peer of that name stays long enough for a second PING.
    """

    log = Logger()

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._period_ends = 0.0
        self._lines = Counter[str]()  # in this period, by network
        self._errors: dict[str, TroubleLog] = {}
        self._newest: dict[str, ReplicationProtocol] = {}  # by NAME
        self.shared_names: set[str] = set()  # each is that of two processes, which is in the log

    def error(self, peer: Peer, message: str, text: str) -> None:
        """Log ``message``, a format with ``{name}``, ``{address}`` and ``{error}``, which is ``text``."""
        name = repr(peer.name) if peer.name else "a peer"

        def log() -> bool:
            errors = self._errors.setdefault(_key(peer), TroubleLog(self.log, LogLevel.warn))
            return errors.report(message, error=text, name=name, address=peer.address)

        self._limited(peer, log)
        if len(self._errors) > MAX_PEERS:
            del self._errors[next(iter(self._errors))]

    def note(self, peer: Peer, message: str) -> None:
        """Log ``message`` at level info, a format with ``{name}`` and ``{address}``."""
        self._limited(peer, lambda: self.log.info(message, name=peer.name, address=peer.address))

    def named(self, peer: ReplicationProtocol, name: str) -> None:
        """Note that a connection has sent NAME."""
        self._forget_name(peer)
        peer.name = name
        self._newest[name] = peer

    def pinged(self, peer: ReplicationProtocol) -> None:
        """Note a PING; warn if another process has the same NAME: a newer connection has it, and this one is alive.

        A process that has lost a connection makes a new one before the old one times out.  So two connections with one
        NAME are two processes only if the older one still sends PING.
        """
        if not peer.has_pinged:
            peer.has_pinged = True
            return
        self._errors.pop(_key(peer), None)
        newest = self._newest.get(peer.name, peer)
        if newest is not peer and peer.name not in self.shared_names:
            self.shared_names.add(peer.name)
            message = "two processes have the instance name {name!r}, at {first} and at {second}: give each its own"
            names = {"name": peer.name, "first": peer.address, "second": newest.address}
            self._limited(peer, lambda: self.log.warn(message, **names))

    def lost(self, peer: ReplicationProtocol) -> None:
        """Forget a connection."""
        self._forget_name(peer)

    def _limited(self, peer: Peer, log: Callable[[], bool | None]) -> None:
        """Call ``log``, unless MAX_LINES lines about this host were logged in this period; False: it logged nothing."""
        if self._clock.seconds() >= self._period_ends:
            self._period_ends = self._clock.seconds() + PERIOD
            self._lines.clear()
        network = _network(peer)
        if self._lines[network] >= MAX_LINES or log() is False:
            return
        self._lines[network] += 1
        if self._lines[network] == MAX_LINES:
            text = "{network}: further errors of its peers are not logged for up to {seconds:g} s"
            self.log.warn(text, network=network or "this machine", seconds=PERIOD)

    def _forget_name(self, peer: ReplicationProtocol) -> None:
        self.shared_names.discard(peer.name)
        if self._newest.get(peer.name) is peer:
            del self._newest[peer.name]


def _key(peer: Peer) -> str:
    return peer.name or _host(peer)


def _host(peer: Peer) -> str:
    return peer.address.rpartition(":")[0]


def _network(peer: Peer) -> str:
    """Return the network whose lines are counted together; an IPv6 host has up to 2**64 addresses."""
    host = _host(peer)
    try:
        return network_of(host.strip("[]"))
    except ValueError:  # a UNIX socket, or the transport of an application
        return host
