"""The bound of all answers that wait for clients of HTTP to read them (docs/security.md, Bounds)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.web.channel import Channel

MOST_UNREAD: Final = 268_435_456  # bytes; eight pages of PAGE_BYTES


class UnreadAnswers:
    """The answers that wait for clients to read them: MOST_UNREAD bytes of all connections together.

    Beyond that, the connection whose answer has waited longest is closed, and ``closed`` is called with it.  A single
    connection may have more.
    """

    def __init__(self, closed: Callable[[Channel], object]) -> None:
        self._closed = closed
        self._sizes: dict[Channel, int] = {}  # the oldest first
        self._total = 0

    def wait(self, channel: Channel, size: int) -> None:
        """Note that ``size`` bytes more wait for the client of ``channel``."""
        self._sizes[channel] = self._sizes.get(channel, 0) + size
        self._total += size
        while len(self._sizes) > 1 and self._total > MOST_UNREAD:
            oldest = next(iter(self._sizes))
            self.end(oldest)
            self._closed(oldest)
            cast("Any", oldest.transport).abortConnection()

    def end(self, channel: Channel) -> None:
        """Note that nothing waits for this client any more."""
        self._total -= self._sizes.pop(channel, 0)
