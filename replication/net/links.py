"""What a follower uses of a connection to writers, by TCP (``net.client``) or by Redis (``net.redis``)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from replication.streams.interfaces import PeerStatus
    from replication.wire.commands import Command
    from replication.wire.grammar import StreamName


class IPeer(Protocol):
    """The other end of an open connection, as functions of ``on_command`` receive it."""

    @property
    def name(self) -> str:
        """The name of the peer's server; empty until it is known."""

    @property
    def address(self) -> str:
        """The peer's host and port, or its path."""

    def send(self, *commands: Command) -> None:
        """Send commands; LocalProtocolError if one of them may not be sent there."""

    def status(self) -> PeerStatus:
        """Return what status pages show of this connection."""


class IWriterLink(Hashable, Protocol):
    """Keeps one connection to one or more writers, and makes it again whenever it is lost.

    ``endpoint`` is shown to users, without secrets.  ``state`` is ``not connected``, ``connected``, ``following``,
    ``stopping`` or ``stopped``; ``following`` begins when the writers had time to send their positions.
    ``connections`` counts those made.
    """

    endpoint: str
    state: str
    connections: int

    @property
    def peer(self) -> IPeer | None:
        """The open connection."""

    @property
    def greeted(self) -> bool:
        """Whether commands of the right server are received."""

    @property
    def error(self) -> str | None:
        """The logged reason why the writers are not followed; None if there is none."""

    def start(self) -> None:
        """Begin to connect."""

    def stop(self) -> Deferred[None]:
        """Close; fires once the connection is gone."""

    def pause_reading(self) -> None:
        """Read no more for a moment, if the peer can wait."""

    def resume_reading(self) -> None:
        """Read again."""

    def can_go_back(self, stream: StreamName) -> bool:
        """Whether a position below the known one means that the writer was restored; else the known one is kept."""

    def begins_again(self, stream: StreamName) -> bool:
        """Whether a position below the known one, also on one connection, means that the stream begins at 0 again."""

    def position_missing(self) -> None:
        """Note that rows of a writer were received, and no POSITION of it."""

    def echo(self, question: str = "") -> Deferred[str | None]:
        """Send a PING that the other end sends back; fires with what that adds (docs/protocol/connection.md B2).

        To ``STREAM INSTANCE PLACE`` it adds the writer's epochs from a place on.  The answer is empty if there is
        nothing to add and, at once, if the other end sends no PING back.  None: there is no connection, or it is lost
        before.
        """

    def request_positions(self) -> None:
        """Have the writers send their positions again, now or later; nothing while there is no connection."""
