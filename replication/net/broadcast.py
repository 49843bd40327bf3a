"""Telling every connection what settled, once a reactor turn, in one write each.

Lines of one turn are joined once for all connections that want the same streams; they share the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.session.feed import Chunk
    from replication.wire.grammar import StreamName

CHUNK_BYTES = 256 * 1024  # joined lines are cut about here, so that a slow peer's queue is measured in small pieces


class Broadcast:
    """The connections of a writer, and what is about to go out to them."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._wanted: dict[ReplicationProtocol, frozenset[StreamName] | None] = {}  # None: every stream
        self._waiting: list[tuple[StreamName, Chunk]] = []
        self._due: IDelayedCall | None = None  # there while something waits

    def __iter__(self) -> Iterator[ReplicationProtocol]:
        """All connections, oldest first; it may change meanwhile."""
        return iter(list(self._wanted))

    def __len__(self) -> int:
        """How many connections there are."""
        return len(self._wanted)

    def add(self, peer: ReplicationProtocol) -> None:
        """Tell ``peer`` all that goes out from now on."""
        self.flush()
        self._wanted[peer] = None

    def restrict(self, peer: ReplicationProtocol, streams: Collection[StreamName]) -> None:
        """Tell ``peer`` of these streams only; of all if there is none among them."""
        self.flush()
        if peer in self._wanted:
            self._wanted[peer] = frozenset(streams) or None

    def remove(self, peer: ReplicationProtocol) -> None:
        """Forget ``peer``."""
        self._wanted.pop(peer, None)

    def put(self, stream: StreamName, chunk: Chunk) -> None:
        """Send ``chunk`` to whoever wants ``stream``, at the end of this reactor turn."""
        if not self._wanted:
            return
        if self._due is None:
            self._due = self._clock.callLater(0, self.flush)
        self._waiting.append((stream, chunk))

    def flush(self) -> None:
        """Send what waits now."""
        if self._due is None:
            return
        if self._due.active():
            self._due.cancel()
        self._due = None
        waiting, self._waiting = self._waiting, []
        joined: dict[frozenset[StreamName] | None, list[tuple[bytes, int]]] = {}
        for peer, wanted in list(self._wanted.items()):
            if wanted not in joined:
                joined[wanted] = list(_join(each for name, each in waiting if wanted is None or name in wanted))
            for data, lines in joined[wanted]:
                peer.write(data, lines)


def _join(chunks: Iterator[Chunk]) -> Iterator[tuple[bytes, int]]:
    some: list[bytes] = []
    size = lines = 0
    for chunk in chunks:
        some.append(chunk.data)
        size += len(chunk.data)
        lines += chunk.lines
        if size >= CHUNK_BYTES:
            yield b"".join(some), lines
            some, size, lines = [], 0, 0
    if some:
        yield b"".join(some), lines
