"""The parts of connections that are made again: a failed attempt is reported once, by its owner, and not by Twisted."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import Mock

from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.net.reconnecting import LONGEST_ATTEMPT, FreshEndpoint, ReportingEndpoint, SilentClientService
from tests.doubles import Net, logged

if TYPE_CHECKING:
    from twisted.python.failure import Failure


class ReconnectingTests(SynchronousTestCase):
    def test_each_failed_attempt_is_reported_to_the_owner_and_nothing_is_logged(self) -> None:
        net = Net()
        reported: list[str] = []

        def failed(failure: Failure) -> Failure:
            reported.append(failure.getErrorMessage())
            return failure

        endpoint = ReportingEndpoint("the writer", TCP4ClientEndpoint(net, "127.0.0.1", 1), failed, net)
        service = SilentClientService(endpoint, Factory.forProtocol(Protocol), retryPolicy=lambda _: 1.0, clock=net)
        with logged(LogLevel.debug) as lines:
            service.startService()
            net.run(2.5)
            service.stopService()
        self.assertEqual((len(reported), lines, str(endpoint)), (3, [], "the writer"))

    def test_an_endpoint_that_raises_fails_the_attempt_and_not_the_service(self) -> None:
        """As one of a plugin may: ClientService would make no attempt any more."""
        net = Net()
        reported: list[str] = []
        plugin = Mock(connect=Mock(side_effect=OSError("too many open files")))

        def failed(failure: Failure) -> Failure:
            reported.append(failure.getErrorMessage())
            return failure

        endpoint = ReportingEndpoint("the writer", plugin, failed, net)
        service = SilentClientService(endpoint, Factory.forProtocol(Protocol), retryPolicy=lambda _: 1.0, clock=net)
        service.startService()
        net.run(1.5)
        service.stopService()
        self.assertEqual(reported, ["too many open files"] * 2)

    def test_an_attempt_without_a_result_fails(self) -> None:
        """Twisted loses the result of a name if no thread can be started: a worker never connected again."""
        net = Net()
        self.patch(net.nameResolver, "resolveHostName", lambda *_, **__: None)
        reported: list[str] = []

        def failed(failure: Failure) -> Failure:
            reported.append(failure.getErrorMessage())
            return failure

        endpoint = ReportingEndpoint("h", HostnameEndpoint(net, "h", 1), failed, net)
        service = SilentClientService(endpoint, Factory.forProtocol(Protocol), retryPolicy=lambda _: 1.0, clock=net)
        service.startService()
        net.run(LONGEST_ATTEMPT * 2 + 2)
        service.stopService()
        self.assertEqual(len(reported), 3)
        self.assertEqual(reported[0], "no result in 60 s: its name is not resolved, or it does not answer")
        self.assertEqual(net.getDelayedCalls(), [])

    def test_a_description_is_parsed_for_each_connection_and_its_error_fails_the_attempt(self) -> None:
        net = Net()
        for number in (1, 2):
            FreshEndpoint(net, "tcp:127.0.0.1:9").connect(Factory())
            self.assertEqual(len(net.tcpClients), number)
        self.failureResultOf(FreshEndpoint(net, "tls:h:1:certificate=/no/such").connect(Factory()), FileNotFoundError)
