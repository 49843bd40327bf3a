"""What an endpoint listens with."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.net.listener import ReplicationFactory
from replication.net.protocol import Limits
from tests.doubles import connect
from tests.net.test_protocol import Listener


class ListenerTests(SynchronousTestCase):
    def test_whoever_calls_speaks_with_a_master(self) -> None:
        """Both connections are of one conversation, keep its limits, and take a worker's words but not a master's."""
        clock, listener = Clock(), Listener()
        factory = ReplicationFactory(listener, clock, Limits(line_limit=1_024))
        one, two = connect(factory), connect(factory)
        one.protocol.dataReceived(b"NAME one\n")
        self.assertEqual(len(listener.heard), 1)
        self.assertFalse(one.disconnecting)
        two.protocol.dataReceived(b"SERVER example.com\n")
        self.assertEqual(listener.faults[0].kind, "wrong direction")
        one.protocol.dataReceived(b"x" * 1_025)
        self.assertEqual(listener.faults[1].kind, "line too long")
        for wire in (one, two):
            wire.read()
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_it_does_not_fill_the_log(self) -> None:
        self.assertFalse(ReplicationFactory(Listener(), Clock(), Limits()).noisy)
