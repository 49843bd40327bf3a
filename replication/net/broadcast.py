"""Sends published lines to all connections, at the end of each reactor turn.

The lines of one turn are joined into pieces, once for all connections that receive the same streams.  These connections
share the bytes, so the work of joining does not grow with their number (docs/protocol/connection.md B4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from replication.net.slow_peers import SlowPeers, all_or_none
from replication.session.encoder import join_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.session.encoder import EncodedLines
    from replication.wire.grammar import StreamName


@attrs.define(eq=False, repr=False)
class Broadcast:
    """The connections of a writer, the streams that each receives, and the lines that wait for the end of the turn.

    Connections that are slowed down receive their lines a little later: a thousand that only listen cost little.
    """

    _clock: IReactorTime
    # None: every stream.
    _wanted: dict[ReplicationProtocol, frozenset[StreamName] | None] = attrs.field(init=False, factory=dict)
    _waiting: list[tuple[StreamName, EncodedLines]] = attrs.field(init=False, factory=list)
    _due: IDelayedCall | None = attrs.field(init=False, default=None)  # None while no line waits
    _slow: SlowPeers = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin without connections."""
        self._slow = SlowPeers(self._clock, self._wanted.__getitem__)

    def __iter__(self) -> Iterator[ReplicationProtocol]:
        """Iterate over all connections, oldest first; connections may be added and removed meanwhile."""
        return iter(list(self._wanted))

    def __contains__(self, peer: object) -> bool:
        """Whether a connection receives what is published; it takes the same time with any number of connections."""
        return peer in self._wanted

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

    def slow_down(self, peer: ReplicationProtocol) -> None:
        """Send to ``peer`` at most ten times a second from now on, in its turn with other slow connections."""
        self.flush()
        if peer in self._wanted:
            self._slow.add(peer)

    def speed_up(self, peer: ReplicationProtocol) -> None:
        """Send to ``peer`` at the end of each turn again."""
        self._slow.release(peer)

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
        self._slow.release_all()

    def flush(self) -> None:
        """Send now what waits for the end of this reactor turn."""
        if self._due is None:
            return
        if self._due.active():
            self._due.cancel()
        self._due = None
        waiting, self._waiting = self._waiting, []
        joined: dict[frozenset[StreamName] | None, list[EncodedLines]] = {}
        with all_or_none(self._wanted):
            self._slow.publish(waiting)
            for peer, wanted in [each for each in self._wanted.items() if each[0] not in self._slow]:
                if wanted not in joined:
                    joined[wanted] = list(join_lines(waiting, wanted))
                for piece in joined[wanted]:
                    peer.write(piece.data, piece.lines)
