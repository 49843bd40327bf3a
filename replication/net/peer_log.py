"""What a writer logs about its peers: the same error once, and two processes with one name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from twisted.logger import Logger, LogLevel

from replication.logs import TroubleLog

if TYPE_CHECKING:
    from replication.net.protocol import ReplicationProtocol


class Peer(Protocol):
    """One end of a connection: its NAME, empty if it has sent none, and its address."""

    name: str
    address: str


MAX_PEERS: Final = 1_000  # with errors that are kept: hostile names cannot fill the memory


class PeerLog:
    """Logs the errors of peers, by their NAME, or by their host if they have sent none.

    An error is logged once until it changes.  It is over when a peer of that name stays long enough for a second PING.
    """

    log = Logger()

    def __init__(self) -> None:
        self._errors: dict[str, TroubleLog] = {}
        self._newest: dict[str, ReplicationProtocol] = {}  # by NAME
        self.shared_names: set[str] = set()  # each is that of two processes, which is in the log

    def error(self, peer: Peer, message: str, text: str) -> None:
        """Log ``message``, a format with ``{name}``, ``{address}`` and ``{error}``, which is ``text``."""
        errors = self._errors.setdefault(_key(peer), TroubleLog(self.log, LogLevel.warn))
        errors.report(message, error=text, name=repr(peer.name) if peer.name else "a peer", address=peer.address)
        if len(self._errors) > MAX_PEERS:
            del self._errors[next(iter(self._errors))]

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
            self.log.warn(
                "two processes have the instance name {name!r}, at {first} and at {second}: give each its own",
                name=peer.name,
                first=peer.address,
                second=newest.address,
            )

    def lost(self, peer: ReplicationProtocol) -> None:
        """Forget a connection."""
        self._forget_name(peer)

    def _forget_name(self, peer: ReplicationProtocol) -> None:
        self.shared_names.discard(peer.name)
        if self._newest.get(peer.name) is peer:
            del self._newest[peer.name]


def _key(peer: Peer) -> str:
    return peer.name or peer.address.rpartition(":")[0]
