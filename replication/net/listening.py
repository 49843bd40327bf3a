"""The sockets that a daemon listens on; one that other hosts could misuse is refused (docs/operations.md, Security)."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from twisted.internet.abstract import isIPAddress
from twisted.internet.address import IPv4Address
from twisted.internet.defer import maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.logger import Logger

from replication.errors import ConfigError
from replication.net.endpoints import (
    SSL_ARGUMENTS,
    describe_endpoint_error,
    has_tls,
    is_local,
    server_endpoint,
    split_endpoint,
)
from replication.urls import Url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from twisted.internet.interfaces import IListeningPort, IProtocolFactory, IStreamServerEndpoint

    from replication.net.certificates import TlsEndpoint

_CURE: Final = "in a network where every host is trusted, insecure = true or --insecure allows it"


class Socket(msgspec.Struct, frozen=True):
    """An endpoint to listen on.

    ``key`` is its option, ``what`` its name in the log.  ``open_risk`` is what other hosts could do if they can
    connect, and the cure; empty if the socket is safe.  ``client_ca`` and ``allow`` are those of ``[tls]``.
    ``expires`` is, by file, when the certificates expire that the sockets of a process have read.
    """

    log = Logger()

    key: str
    what: str
    endpoint: str
    make_factory: Callable[[], IProtocolFactory]
    open_risk: str = ""
    client_ca: str | None = None
    allow: Sequence[str] = ()
    expires: dict[str, datetime] = msgspec.field(default_factory=dict)

    def parse(self, reactor: Any, *, insecure: bool) -> IStreamServerEndpoint:
        """Return the endpoint; ConfigError if it is not one, or if it is plain that ``open`` would refuse it."""
        names = SSL_ARGUMENTS if has_tls(self.endpoint) else ("port", "interface", "backlog")
        kind, named = split_endpoint(self.endpoint, *names)
        if kind in {"tcp", "ssl"} and not insecure:  # before the database is opened, and perhaps migrated
            host = named.get("interface", "")
            if not host or isIPAddress(host):
                self._refuse_risk(IPv4Address("TCP", host or "0.0.0.0", 0))  # noqa: S104 (refused)
        try:
            if not has_tls(self.endpoint):
                return server_endpoint(reactor, self.endpoint)
            from replication.net.certificates import ClientRule, TlsEndpoint  # noqa: PLC0415 (an extra)

            clients = None if self.client_ca is None else ClientRule(self.client_ca, self.allow)
            endpoint = TlsEndpoint(reactor, self.endpoint, clients)
        except ConfigError as error:
            raise ConfigError(f"{self.key}: {error}") from error
        except Exception as error:  # parsers of endpoints, plugins among them, raise any exception
            why = describe_endpoint_error(self.endpoint, error, "tcp:PORT, tcp:PORT:interface=HOST or unix:PATH")
            raise ConfigError(f"{self.key}: cannot listen on {Url(self.endpoint)!r}: {why}") from error
        self.expires.update(endpoint.expires)
        return endpoint

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

    def warn_of_certificate(self, endpoint: IStreamServerEndpoint) -> None:
        """Log that the certificate of an ``ssl:`` endpoint is not valid today: each client refuses it."""
        if has_tls(self.endpoint) and (fault := cast("TlsEndpoint", endpoint).fault):
            text = "{key}: {fault}, so clients refuse to connect: renew it, and send SIGHUP to this process"
            self.log.warn(text, key=self.key, fault=fault)

    def read_certificates(self, endpoint: IStreamServerEndpoint) -> None:
        """Read the files of an ``ssl:`` endpoint again; new connections get what they have.  The result is logged."""
        if not has_tls(self.endpoint):
            return
        try:
            found = cast("TlsEndpoint", endpoint)
            until = found.read()
            self.expires.update(found.expires)
        except ConfigError as error:
            text = "{key}: new connections get the certificate that was read before: {error}"
            self.log.error(text, key=self.key, error=str(error))
        else:
            text = "{key}: new connections get the certificate that is valid until {until}"
            self.log.info(text, key=self.key, until=f"{until:%Y-%m-%d}")
            if found.lost_names:
                text = "{key}: the new certificate lacks {names}: clients that connect to such a name refuse it"
                self.log.warn(text, key=self.key, names=", ".join(found.lost_names))

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


def wire_risk(endpoint: str, *, demands_certificates: bool) -> str:
    """Return what other hosts could do at an endpoint of the wire, and the cure; empty if clients must identify."""
    if not has_tls(endpoint):
        return "without TLS, and all that reach it can read all facts: give an ssl: endpoint, or interface=127.0.0.1"
    if not demands_certificates:
        return "without client certificates, and all that reach it can read all facts: give client_ca in [tls]"
    return ""


def http_risk(endpoint: str, *, has_secret: bool, demands_certificates: bool) -> str:
    """Return what other hosts could do at an endpoint of HTTP, and the cure; empty if clients must identify."""
    if not has_secret and not (demands_certificates and has_tls(endpoint)):
        return "without a secret, and their requests are refused: give --secret-file, or interface=127.0.0.1"
    if not has_tls(endpoint):
        return "without TLS, and the secret can be read on the way: give an ssl: endpoint, or interface=127.0.0.1"
    return ""


def expiry_of(file: str | None) -> Mapping[str, datetime]:
    """Return when the certificate in a file expires, by the file, as it is now; empty if it cannot be read."""
    if file is None:
        return {}
    from replication.net.certificates import expiries  # noqa: PLC0415 (an extra)

    return expiries(file)
