"""Connections that receive what is published a little later, a few in each reactor turn.

A write to a connection takes about 50 µs of CPU time.  If a thousand connections that never send a line received each
fact at once, every follower would wait for a thousand writes.  So they receive the lines in rounds.  All connections of
a round share the bytes.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

import attrs

from replication.session.encoder import join_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.session.encoder import EncodedLines
    from replication.wire.grammar import StreamName

    Streams = frozenset[StreamName] | None  # None: every stream
    Published = tuple[StreamName, EncodedLines]

HELD_LINES: Final = 10_000  # that wait for the next round; with more, a round no longer rests
HOLD: Final = 0.1  # seconds between two rounds
SLICE: Final = 8  # connections that receive a round in one reactor turn
PAUSE: Final = 0.004  # seconds between two slices


@contextmanager
def all_or_none(peers: Iterable[ReplicationProtocol]) -> Iterator[None]:
    """Disconnect ``peers`` if a bug prevents that each of them receives its lines: later lines would hide the gap."""
    try:
        yield
    except BaseException:
        for peer in list(peers):
            peer.abort()
        raise


@attrs.define(eq=False, repr=False)
class SlowPeers:
    """The connections that are slow, and the lines that wait for them.

    ``wanted`` returns the streams that a connection receives.
    """

    _clock: IReactorTime
    _wanted: Callable[[ReplicationProtocol], Streams]
    # The connections, and how many of the held lines each has received already.
    _received: dict[ReplicationProtocol, int] = attrs.field(init=False, factory=dict)
    _held: list[Published] = attrs.field(init=False, factory=list)  # for the next round
    _held_lines: int = attrs.field(init=False, default=0)
    _round: list[Published] = attrs.field(init=False, factory=list)
    # The lines of the round, joined once for all that lack the same.
    _joined: dict[tuple[Streams, int], list[EncodedLines]] = attrs.field(init=False, factory=dict)
    _behind: dict[ReplicationProtocol, int] = attrs.field(init=False, factory=dict)  # those that lack the round
    _due: IDelayedCall | None = attrs.field(init=False, default=None)  # of the next slice or round

    def __contains__(self, peer: ReplicationProtocol) -> bool:
        """Whether a connection is slow."""
        return peer in self._received

    def add(self, peer: ReplicationProtocol) -> None:
        """Slow a connection down, which has received everything that was published before."""
        self._received.setdefault(peer, len(self._held))

    def release(self, peer: ReplicationProtocol) -> None:
        """Send what waits for a connection, which is slow no longer."""
        held_from = self._received.pop(peer, None)
        if held_from is None:
            return
        round_from = self._behind.pop(peer, None)
        unsent = [] if round_from is None else self._round[round_from:]
        for piece in join_lines(unsent + self._held[held_from:], self._wanted(peer)):
            peer.write(piece.data, piece.lines)
        self._stop_if_empty()

    def discard(self, peer: ReplicationProtocol) -> None:
        """Forget a connection, if it is slow."""
        self._received.pop(peer, None)
        self._behind.pop(peer, None)
        self._stop_if_empty()

    def release_all(self) -> None:
        """Send everything now."""
        for peer in list(self._received):
            self.release(peer)

    def publish(self, lines: Sequence[Published]) -> None:
        """Keep lines for the next round."""
        if not self._received:
            return
        self._held += lines
        self._held_lines += sum([each.lines for _, each in lines])
        if self._due is None:
            self._due = self._clock.callLater(HOLD, self._begin_round)
        elif self._held_lines > HELD_LINES:
            self._due.reset(0)

    def _begin_round(self) -> None:
        self._round, self._held, self._held_lines = self._held, [], 0
        self._behind, self._received = self._received, dict.fromkeys(self._received, 0)
        self._send_slice()

    def _send_slice(self) -> None:
        self._due = None
        with all_or_none(self._received):
            self._send_to_some()
        if self._behind:
            self._due = self._clock.callLater(PAUSE, self._send_slice)
            return
        self._round, self._joined = [], {}
        if self._held:
            self._due = self._clock.callLater(HOLD, self._begin_round)

    def _send_to_some(self) -> None:
        for peer in list(islice(reversed(self._behind), SLICE)):
            start = self._behind.pop(peer)
            key = self._wanted(peer), start
            if key not in self._joined:
                self._joined[key] = list(join_lines(self._round[start:], key[0]))
            for piece in self._joined[key]:
                peer.write(piece.data, piece.lines)

    def _stop_if_empty(self) -> None:
        if self._received:
            return
        self._round, self._joined, self._held, self._held_lines = [], {}, [], 0
        if self._due is not None:
            self._due.cancel()
            self._due = None
