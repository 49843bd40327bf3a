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
        seconds: a clock.

    """

    def __init__(self, send: Callable[[Ping], object], seconds: Callable[[], float]) -> None:
        self._send = send
        self._seconds = seconds
        self._since = 0.0  # when the first of the PINGs without an answer was sent, or the last answer was received
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

    def waited(self) -> float:
        """Return for how many seconds the other end has owed an answer, and has sent none."""
        return self._seconds() - self._since if self._unanswered else 0.0

    def received(self, ping: Ping) -> bool:
        """Process a PING of the other end; returns whether it is an answer."""
        word, _, rest = ping.text.partition(" ")
        number, _, rest = rest.partition(" ")
        if word != Ping.ECHO or number not in self._unanswered:
            return False
        question, answer = self._unanswered.pop(number)
        self._since = self._seconds()
        self._send_waiting()
        answer.callback(rest.removeprefix(question).strip())
        return True

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
                if not self._unanswered:
                    self._since = self._seconds()
                number = str(next(self._numbers))
                self._unanswered[number] = question, answer
                self._send(Ping(f"{Ping.ECHO} {number} {question}".rstrip()))
