"""Sends published lines to all connections, at the end of each reactor turn.

The lines of one turn are joined into pieces, once for all connections that receive the same streams.  These connections
share the bytes, so the work of joining does not grow with their number (docs/protocol/connection.md B4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.session.encoder import EncodedLines
    from replication.wire.grammar import StreamName

CHUNK_BYTES = 256 * 1024  # at which a joined piece ends: for a peer that does not read, whole pieces are queued


HELD_LINES: Final = 10_000  # that wait for slow connections at most; with more, all are written at once
HOLD: Final = 0.1  # seconds between two writes to a connection that is slowed down


@attrs.define(eq=False, repr=False)
class Broadcast:
    """The connections of a writer, the streams that each receives, and the lines that wait for the end of the turn.

    Connections that are slowed down receive their lines ten times a second: a thousand that only listen cost little.
    """

    _clock: IReactorTime
    # None: every stream.
    _wanted: dict[ReplicationProtocol, frozenset[StreamName] | None] = attrs.field(init=False, factory=dict)
    _waiting: list[tuple[StreamName, EncodedLines]] = attrs.field(init=False, factory=list)
    _due: IDelayedCall | None = attrs.field(init=False, default=None)  # None while no line waits
    _slow: set[ReplicationProtocol] = attrs.field(init=False, factory=set)
    _held: list[tuple[StreamName, EncodedLines]] = attrs.field(init=False, factory=list)  # for those that are slow
    _held_due: IDelayedCall | None = attrs.field(init=False, default=None)

    def __iter__(self) -> Iterator[ReplicationProtocol]:
        """Iterate over all connections, oldest first; connections may be added and removed meanwhile."""
        return iter(list(self._wanted))

    def add(self, peer: ReplicationProtocol, streams: frozenset[StreamName] | None = None) -> None:
        """Send what is published from now on to ``peer``: these streams, or all if ``streams`` is None."""
        self.flush()
        self._wanted[peer] = streams

    def restrict(self, peer: ReplicationProtocol, streams: frozenset[StreamName] | None) -> None:
        """Send only these streams to ``peer`` from now on; all streams if ``streams`` is None."""
        if peer in self._wanted:
            self.add(peer, streams)

    def remove(self, peer: ReplicationProtocol) -> None:
        """Send nothing more to ``peer``."""
        self._wanted.pop(peer, None)
        self._slow.discard(peer)
        if not self._slow:
            self._flush_held()

    def slow_down(self, peer: ReplicationProtocol) -> None:
        """Send to ``peer`` only ten times a second from now on."""
        self.flush()
        if peer in self._wanted:
            self._slow.add(peer)

    def speed_up(self, peer: ReplicationProtocol) -> None:
        """Send to ``peer`` at the end of each turn again."""
        if peer in self._slow:
            self._flush_held()
            self._slow.discard(peer)

    def receivers(self, stream: StreamName) -> Sequence[ReplicationProtocol]:
        """Return the connections that receive ``stream``, oldest first."""
        return [peer for peer, wanted in self._wanted.items() if wanted is None or stream in wanted]

    def publish(self, stream: StreamName, chunk: EncodedLines) -> None:
        """Send ``chunk`` to every connection that receives ``stream``, at the end of this reactor turn."""
        if not self._wanted:
            return
        if self._due is None:
            self._due = self._clock.callLater(0, self.flush)
        self._waiting.append((stream, chunk))

    def end(self) -> None:
        """Send now what waits, for connections that are slowed down, too."""
        self.flush()
        self._flush_held()

    def flush(self) -> None:
        """Send now what waits for the end of this reactor turn."""
        if self._due is None:
            return
        if self._due.active():
            self._due.cancel()
        self._due = None
        waiting, self._waiting = self._waiting, []
        if self._slow:
            self._held += waiting
            if self._held_due is None:
                self._held_due = self._clock.callLater(HOLD, self._flush_held)
            if sum(each.lines for _, each in self._held) > HELD_LINES:
                self._flush_held()
        self._write(waiting, [each for each in self._wanted.items() if each[0] not in self._slow])

    def _flush_held(self) -> None:
        if self._held_due is None:
            return
        if self._held_due.active():
            self._held_due.cancel()
        self._held_due = None
        held, self._held = self._held, []
        self._write(held, [each for each in self._wanted.items() if each[0] in self._slow])

    def _write(
        self,
        waiting: Sequence[tuple[StreamName, EncodedLines]],
        peers: Sequence[tuple[ReplicationProtocol, frozenset[StreamName] | None]],
    ) -> None:
        """Send lines to these connections, joined once for all that receive the same streams."""
        joined: dict[frozenset[StreamName] | None, list[tuple[bytes, int]]] = {}
        for peer, wanted in peers:
            if wanted not in joined:
                joined[wanted] = list(_join(each for name, each in waiting if wanted is None or name in wanted))
            for data, lines in joined[wanted]:
                peer.write(data, lines)


def _join(chunks: Iterator[EncodedLines]) -> Iterator[tuple[bytes, int]]:
    pieces: list[bytes] = []
    size = lines = 0
    for chunk in chunks:
        pieces.append(chunk.data)
        size += len(chunk.data)
        lines += chunk.lines
        if size >= CHUNK_BYTES:
            yield b"".join(pieces), lines
            pieces, size, lines = [], 0, 0
    if pieces:
        yield b"".join(pieces), lines
