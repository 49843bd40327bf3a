"""The sockets that a daemon listens on; one that other hosts could misuse is refused (docs/operations.md, Security)."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.abstract import isIPAddress
from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.error import CannotListenError

from replication.errors import ConfigError
from replication.net.endpoints import describe_endpoint_error, is_local, server_endpoint, split_endpoint
from replication.urls import Url

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint

_CURE: Final = "in a network where every host is trusted, insecure = true or --insecure allows it"


@attrs.frozen
class Socket:
    """An endpoint to listen on.

    ``key`` is its option, ``what`` its name in the log.  ``open_risk`` is what other hosts could do if they can
    connect, and the cure; empty if the socket is safe.
    """

    key: str
    what: str
    endpoint: str
    make_factory: Callable[[], IProtocolFactory]
    open_risk: str = ""

    def parse(self, reactor: Any, *, insecure: bool) -> IStreamServerEndpoint:
        """Return the endpoint; ConfigError if it is not one, or if it is plain that ``open`` would refuse it."""
        kind, plain, named = split_endpoint(self.endpoint)
        if kind in {"tcp", "ssl"} and not insecure:  # before the database is opened, and perhaps migrated
            host = named.get("interface", plain[1] if kind == "tcp" and len(plain) > 1 else "")
            if not host or isIPAddress(host):
                self._refuse_risk(IPv4Address("TCP", host or "0.0.0.0", 0))  # noqa: S104 (refused)
        try:
            return server_endpoint(reactor, self.endpoint)
        except Exception as error:  # parsers of endpoints, plugins among them, raise any exception
            why = describe_endpoint_error(self.endpoint, error, "tcp:PORT, tcp:PORT:interface=HOST or unix:PATH")
            raise ConfigError(f"{self.key}: cannot listen on {Url(self.endpoint)!r}: {why}") from error

    async def open(self, endpoint: IStreamServerEndpoint, *, insecure: bool) -> IListeningPort:
        """Listen at ``endpoint``; ConfigError if that fails, or if other hosts can connect and it is not safe.

        Nothing is accepted before the refusal: the socket is closed in the same turn of the reactor.
        """
        try:
            port = await maybeDeferred(endpoint.listen, self.make_factory())
        except Exception as error:
            why = self._reason(error)
            raise ConfigError(f"cannot listen on {self.endpoint} ({self.key}): {why}") from error
        if not insecure:
            try:
                self._refuse_risk(port.getHost())
            except ConfigError:
                await maybeDeferred(port.stopListening)
                raise
        return port

    def risk_at(self, address: object) -> str:
        """Return what other hosts could do at ``address``, where this socket listens; empty if it is safe."""
        return "" if is_local(address) else self.open_risk

    def _refuse_risk(self, address: object) -> None:
        if risk := self.risk_at(address):
            why = f"{risk}; {_CURE}"
            raise ConfigError(f"cannot listen on {self.endpoint} ({self.key}): it is open to other hosts {why}")

    def _reason(self, error: Exception) -> str:
        cause = error.socketError if isinstance(error, CannotListenError) else error
        why = getattr(cause, "strerror", None) or str(cause)
        if getattr(cause, "errno", None) != errno.EADDRINUSE:
            return why
        return f"{why}; if another master or worker runs there, stop it, or give another --{self.key}"


def wire_risk(endpoint: str) -> str:
    """Return what other hosts could do at an endpoint of the wire, and the cure; empty if it has TLS."""
    if endpoint.startswith("ssl:"):
        return ""
    return "without TLS, and all that reach it can read all facts: give an ssl: endpoint, or interface=127.0.0.1"


def http_risk(endpoint: str, *, has_secret: bool) -> str:
    """Return what other hosts could do at an endpoint of HTTP, and the cure; empty if it has TLS and a secret."""
    if not has_secret:
        return "without a secret, and their requests are refused: give --secret-file, or interface=127.0.0.1"
    if endpoint.startswith("ssl:"):
        return ""
    return "without TLS, and the secret can be read on the way: give an ssl: endpoint, or interface=127.0.0.1"
