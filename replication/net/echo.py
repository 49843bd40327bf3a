"""PINGs that the other end sends back, with what they ask for (docs/protocol/connection.md B2)."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Final

from twisted.internet.defer import Deferred

from replication.wire.commands import Ping

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_UNANSWERED: Final = 50  # PINGs at once


class Echo:
    """Sends numbered PINGs on one connection, and receives what the other end sends back.

    Args:
        send: sends a command on the connection.

    """

    def __init__(self, send: Callable[[Ping], object]) -> None:
        self._send = send
        self._numbers = count(1)
        self._unanswered: dict[str, tuple[str, Deferred[str | None]]] = {}  # question and answer, by number
        self._waiting: deque[tuple[str, Deferred[str | None]]] = deque()  # those that are not sent yet
        self._lost = False

    def request(self, question: str = "") -> Deferred[str | None]:
        """Send a PING; fires with what the other end adds to the question, or None if the connection is lost."""
        answer: Deferred[str | None] = Deferred()
        if self._lost:
            answer.callback(None)
        else:
            self._waiting.append((question, answer))
            self._send_waiting()
        return answer

    def received(self, ping: Ping) -> None:
        """Process a PING of the other end, which may be an answer."""
        word, _, rest = ping.text.partition(" ")
        number, _, rest = rest.partition(" ")
        if word == Ping.ECHO and number in self._unanswered:
            question, answer = self._unanswered.pop(number)
            self._send_waiting()
            answer.callback(rest.removeprefix(question).strip())

    def lost(self) -> None:
        """Process the loss of the connection: no answer comes any more."""
        self._lost = True
        for _, answer in [*self._unanswered.values(), *self._waiting]:
            answer.callback(None)
        self._unanswered.clear()
        self._waiting.clear()

    def _send_waiting(self) -> None:
        while self._waiting and len(self._unanswered) < MAX_UNANSWERED:
            question, answer = self._waiting.popleft()
            if not answer.called:  # else it was cancelled
                number = str(next(self._numbers))
                self._unanswered[number] = question, answer
                self._send(Ping(f"{Ping.ECHO} {number} {question}".rstrip()))
