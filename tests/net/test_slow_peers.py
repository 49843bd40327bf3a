"""Slow peers: a few in each reactor turn receive what waits, each line once, in order, and share the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.net.slow_peers import HELD_LINES, HOLD, PAUSE, SLICE, SlowPeers
from replication.session.encoder import EncodedLines
from replication.wire.grammar import StreamName

if TYPE_CHECKING:
    from replication.net.protocol import ReplicationProtocol

ORDERS, CACHES = StreamName("orders"), StreamName("caches")


class Peer:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes, lines: int) -> None:
        assert data.count(b"\n") == lines
        self.written.append(data)

    @property
    def numbers(self) -> list[int]:
        return [int(line) for data in self.written for line in data.split()]


class SlowPeersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.wanted: dict[object, frozenset[StreamName]] = {}
        self.slow = SlowPeers(self.clock, self.wanted.get)
        self.peers: list[Peer] = []

    def tearDown(self) -> None:
        for peer in self.peers:
            self.slow.discard(cast("ReplicationProtocol", peer))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def add(self, count: int = 1) -> list[Peer]:
        added = [Peer() for _ in range(count)]
        for peer in added:
            self.slow.add(cast("ReplicationProtocol", peer))
        self.peers += added
        return added

    def release(self, peer: Peer) -> None:
        self.slow.release(cast("ReplicationProtocol", peer))

    def publish(self, *numbers: int, stream: StreamName = ORDERS) -> None:
        self.slow.publish([(stream, EncodedLines(b"%d\n" % number, 1)) for number in numbers])

    def test_a_round_is_sent_in_slices(self) -> None:
        peers = self.add(2 * SLICE + 1)
        self.publish(1, 2)
        self.clock.advance(HOLD)
        reached = [sum(bool(peer.written) for peer in peers)]
        for _ in range(2):
            self.publish(3)
            self.clock.advance(PAUSE)
            reached.append(sum(bool(peer.written) for peer in peers))
        self.assertEqual(reached, [SLICE, 2 * SLICE, 2 * SLICE + 1])
        self.assertEqual({tuple(peer.numbers) for peer in peers}, {(1, 2)})
        self.assertEqual(len({id(peer.written[0]) for peer in peers}), 1, "all share the bytes")
        self.clock.pump([HOLD, PAUSE, PAUSE])
        self.assertEqual({tuple(peer.numbers) for peer in peers}, {(1, 2, 3, 3)})

    def test_a_peer_that_is_added_later_receives_what_is_published_from_then_on(self) -> None:
        (first,) = self.add()
        self.publish(1)
        (second,) = self.add()
        self.publish(2)
        self.clock.advance(HOLD)
        self.assertEqual((first.numbers, second.numbers), ([1, 2], [2]))

    def test_a_peer_that_is_released_during_a_round_has_received_each_line_once(self) -> None:
        peers = self.add(SLICE + 1)
        self.publish(1)
        self.clock.advance(HOLD)
        self.publish(2)
        for peer in peers:
            self.release(peer)
            self.assertEqual(peer.numbers, [1, 2])
            self.assertNotIn(peer, self.slow)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_released_peer_receives_nothing_more_here(self) -> None:
        one, _other = self.add(2)
        self.release(one)
        self.release(one)
        self.publish(1)
        self.clock.advance(HOLD)
        self.assertEqual(one.numbers, [])

    def test_a_peer_that_is_lost_during_a_round_is_left_out(self) -> None:
        peers = self.add(3 * SLICE)
        self.publish(1)
        self.clock.advance(HOLD)
        lost = [peer for peer in peers if not peer.written]
        for peer in lost:
            self.slow.discard(cast("ReplicationProtocol", peer))
        self.clock.advance(PAUSE)
        self.assertEqual([peer.written for peer in lost], [[]] * len(lost))

    def test_each_receives_the_streams_that_it_wants(self) -> None:
        everything, some = self.add(2)
        self.wanted[some] = frozenset({CACHES})
        self.publish(1)
        self.publish(2, stream=CACHES)
        self.clock.advance(HOLD)
        self.assertEqual((everything.numbers, some.numbers), ([1, 2], [2]))

    def test_a_flood_of_lines_does_not_wait(self) -> None:
        peers = self.add(2 * SLICE)
        self.publish(*range(HELD_LINES))
        self.publish(HELD_LINES)
        self.clock.advance(0)
        self.publish(*range(HELD_LINES + 1))
        self.clock.advance(0)
        self.assertEqual({len(peer.numbers) for peer in peers}, {HELD_LINES + 1})

    def test_all_are_released_at_the_end(self) -> None:
        peers = self.add(2 * SLICE)
        self.publish(1)
        self.slow.release_all()
        self.assertEqual({tuple(peer.numbers) for peer in peers}, {(1,)})

    def test_without_slow_peers_nothing_is_kept(self) -> None:
        self.publish(1)
        (peer,) = self.add()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.release(peer)
        self.assertEqual(peer.numbers, [])
