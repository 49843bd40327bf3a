"""What a writer logs about its peers."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.net import peer_log
from replication.net.peer_log import PeerLog
from tests.doubles import logged


class Peer:
    def __init__(self, address: str, name: str = "") -> None:
        self.address = address
        self.name = name
        self.has_pinged = False


class PeerLogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.peers = PeerLog(self.clock)

    def connect(self, address: str, name: str, pings: int = 1) -> Any:
        peer: Any = Peer(address)
        self.peers.named(peer, name)
        self.ping(peer, pings)
        return peer

    def ping(self, peer: Any, times: int = 1) -> None:
        for _ in range(times):
            self.peers.pinged(peer)

    def errors(self, *errors: tuple[str, str, str]) -> list[str]:
        with logged() as lines:
            for address, name, text in errors:
                peer = cast("Any", Peer(address, name))
                self.peers.error(peer, "{name} ({address}): {error}", text)
                self.peers.lost(peer)
        return lines

    def test_an_error_that_comes_with_every_connection_is_logged_once(self) -> None:
        again = [(f"10.0.0.1:{port}", "worker1", "Wrong remote {x}") for port in range(5)]
        self.assertEqual(self.errors(*again), ["'worker1' (10.0.0.1:0): Wrong remote {x}"])

    def test_each_peer_and_each_text_is_logged(self) -> None:
        self.assertEqual(
            self.errors(("a:1", "one", "x"), ("b:2", "two", "x"), ("a:3", "one", "y"), ("[::1]:4", "", "y")),
            ["'one' (a:1): x", "'two' (b:2): x", "'one' (a:3): y", "a peer ([::1]:4): y"],
        )

    def test_without_a_name_peers_are_distinguished_by_host(self) -> None:
        self.assertEqual(len(self.errors(("a:1", "", "x"), ("a:2", "", "x"), ("b:1", "", "x"))), 2)

    def test_after_a_connection_that_stayed_an_error_is_logged_again(self) -> None:
        self.errors(("a:1", "one", "x"))
        self.ping(self.connect("a:2", "one"))
        self.assertEqual(len(self.errors(("a:3", "one", "x"))), 1)

    def test_one_host_does_not_fill_the_log(self) -> None:
        """One connection that sent ERROR lines wrote gigabytes in a day."""
        flood = [(f"a:{n}", f"name{n % 7}", f"x{n}") for n in range(peer_log.MAX_LINES * 2)]
        for _ in range(2):
            lines = self.errors(*flood)
            self.assertEqual(len(lines), peer_log.MAX_LINES + 1)
            self.assertEqual(lines[-1], "a: further errors of its peers are not logged for up to 60 s")
            self.assertEqual(self.errors(("b:1", "", "x"), ("b:1", "", f"y{_}"))[-1], f"a peer (b:1): y{_}")
            with logged(LogLevel.info) as lines:
                self.peers.note(cast("Any", Peer("a:1", "one")), "{name!r} ({address}) is stopping")
                first, second = self.connect("a:1", "two", 2), self.connect("a:2", "two", 2)
                self.ping(first)
            self.assertEqual(lines, [])
            self.peers.lost(first)
            self.peers.lost(second)
            self.clock.advance(peer_log.PERIOD)
        with logged(LogLevel.info) as lines:
            self.peers.note(cast("Any", Peer("a:1", "one")), "{name!r} ({address}) is stopping")
        self.assertEqual(lines, ["'one' (a:1) is stopping"])

    def test_a_host_with_many_ipv6_addresses_does_not_fill_the_log(self) -> None:
        flood = [(f"[2001:db8::{n:x}]:1", "", f"x{n}") for n in range(peer_log.MAX_LINES * 2)]
        lines = self.errors(*flood)
        self.assertEqual(len(lines), peer_log.MAX_LINES + 1)
        self.assertEqual(lines[-1], "2001:db8::/64: further errors of its peers are not logged for up to 60 s")
        self.assertEqual(len(self.errors(("[2001:db8:0:1::1]:1", "", "x"), ("[::ffff:10.0.0.1]:1", "", "x"))), 2)

    def test_a_limited_number_of_peers_is_remembered(self) -> None:
        self.patch(peer_log, "MAX_PEERS", 3)
        self.errors(*[("a:1", str(number), "x") for number in range(10)])
        self.assertEqual(len(self.peers._errors), 3)

    def test_two_live_connections_with_one_name_are_warned_of_once(self) -> None:
        one, two = self.connect("a:1", "same"), self.connect("b:2", "same")
        with logged() as lines:
            for _ in range(3):
                self.ping(two)
                self.ping(one)
        expected = "two processes have the instance name 'same', at a:1 and at b:2: give each its own"
        self.assertEqual(lines, [expected])
        self.assertEqual(self.peers.shared_names, {"same"})

    def test_a_process_that_reconnects_before_its_old_connection_ends_is_not_warned_of(self) -> None:
        old = self.connect("a:1", "same", pings=3)
        new = self.connect("a:2", "same")
        with logged() as lines:
            self.ping(new, 3)
            self.peers.lost(old)
            self.ping(new, 3)
        self.assertEqual(lines, [])

    def test_after_one_is_gone_a_new_second_process_is_warned_of_again(self) -> None:
        one = self.connect("a:1", "same", pings=2)
        for _ in range(2):
            two = self.connect("b:2", "same")
            with logged() as lines:
                self.ping(one)
            self.assertEqual(len(lines), 1)
            self.peers.lost(two)

    def test_another_name_on_the_same_connection_replaces_the_first(self) -> None:
        one, two = self.connect("a:1", "same", pings=2), self.connect("b:2", "same")
        self.peers.named(two, "other")
        with logged() as lines:
            self.ping(one)
            self.ping(two)
        self.assertEqual(lines, [])

    def test_nothing_is_kept_of_lost_connections(self) -> None:
        for peer in [self.connect("a:1", name, pings=2) for name in ("one", "one", "two")]:
            self.peers.lost(peer)
        self.peers.lost(cast("Any", Peer("a:1")))
        kept = self.peers._newest, self.peers.shared_names
        self.assertEqual([len(each) for each in kept], [0] * 2)
