"""Whether a connection is still open, asked of the other end (docs/protocol/connection.md B2)."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred

from replication.wire.commands import Ping

if TYPE_CHECKING:
    from collections.abc import Callable


class Echo:
    """Sends PINGs on one connection, and receives what the other end sends back.

    Args:
        send: sends a command on the connection.

    """

    def __init__(self, send: Callable[[Ping], object]) -> None:
        self._send = send
        self._numbers = count(1)
        self._sent: Ping | None = None  # to which no answer was received
        self._asked: list[Deferred[bool]] = []  # before that PING was sent
        self._waiting: list[Deferred[bool]] = []  # since then: the next PING is theirs

    def request(self) -> Deferred[bool]:
        """Fire with True once a PING that is sent from now on is answered, with False if the connection is lost."""
        asked: Deferred[bool] = Deferred()
        self._waiting.append(asked)
        if self._sent is None:
            self._send_next()
        return asked

    def received(self, ping: Ping) -> None:
        """Process a PING of the other end, which may be an answer."""
        if ping == self._sent:
            self._sent = None
            self._fire(self._asked, answer=True)
            if self._waiting and self._sent is None:
                self._send_next()

    def lost(self) -> None:
        """Process the loss of the connection: no answer comes any more."""
        self._fire(self._asked, answer=False)
        self._fire(self._waiting, answer=False)

    def _send_next(self) -> None:
        self._asked, self._waiting = self._waiting, []
        self._sent = Ping(f"{Ping.ECHO} {next(self._numbers)}")
        self._send(self._sent)

    @staticmethod
    def _fire(asked: list[Deferred[bool]], *, answer: bool) -> None:
        for each in (*asked,):
            if not each.called:  # else it was cancelled
                each.callback(answer)
        asked.clear()
