"""The factory that an endpoint listens with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.protocol import Factory

from replication.net.protocol import Conversation, Limits, ReplicationProtocol
from replication.session.connection import Role

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress, IReactorTime

    from replication.session.connection import Words


class ReplicationFactory(Factory):
    """Makes the writer's end of a connection, whoever calls."""

    noisy = False

    def __init__(
        self, conversation: Conversation, clock: IReactorTime, limits: Limits, words: Words | None = None
    ) -> None:
        self._conversation = conversation
        self._clock = clock
        self._limits = limits
        self._words = words

    def buildProtocol(self, addr: IAddress | None) -> ReplicationProtocol:  # noqa: ARG002 (Twisted's signature)
        """Return a protocol that speaks as a master."""
        return ReplicationProtocol(Role.MASTER, self._conversation, self._clock, self._limits, words=self._words)
