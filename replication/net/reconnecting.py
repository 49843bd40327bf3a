"""The parts of connections that are made again for ever, with delays of their own and one log line for each reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import attrs
from twisted.application.internet import ClientService
from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.logger import Logger, LogPublisher
from zope.interface import implementer

from replication.net.tls import tls_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorTime
    from twisted.python.failure import Failure

LONGEST_ATTEMPT: Final = 60.0  # seconds: a name server has 30, and then a connection


@implementer(IStreamClientEndpoint)
@attrs.frozen
class ReportingEndpoint:
    """An endpoint that reports why it cannot connect: ClientService does not report it.

    An attempt without a result fails, too: Twisted does not limit the time to resolve the name of a host.
    """

    name: str
    endpoint: IStreamClientEndpoint
    failed: Callable[[Failure], Failure]
    clock: IReactorTime

    def __str__(self) -> str:
        """Return the name that ClientService logs."""
        return self.name

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803 (Twisted's name)
        """Connect."""
        attempt = maybeDeferred(self.endpoint.connect, protocolFactory)
        return attempt.addTimeout(LONGEST_ATTEMPT, self.clock, _too_long).addErrback(self.failed)


def _too_long(_: object, seconds: float) -> NoReturn:
    raise TimeoutError(f"no result in {seconds:g} s: its name is not resolved, or it does not answer")


@implementer(IStreamClientEndpoint)
@attrs.frozen
class FreshEndpoint:
    """An endpoint whose description is parsed for each connection: the certificates that it names are read again."""

    reactor: object
    description: str

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803 (Twisted's name)
        """Connect; an error of the parser fails the attempt."""
        return maybeDeferred(self._connect, protocolFactory)

    def _connect(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        connecting: Deferred[IProtocol] = tls_endpoint(self.reactor, self.description).connect(factory)
        return connecting


class SilentClientService(ClientService):
    """A ClientService that does not log each of its attempts."""

    _log = Logger(observer=LogPublisher())  # a publisher without observers
