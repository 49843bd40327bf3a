"""Twisted's endpoint strings and addresses: messages for wrong and failing ones, addresses as text, default URLs."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.endpoints import (
    AdoptedStreamServerEndpoint,
    HostnameEndpoint,
    clientFromString,
    quoteStringArgument,
    serverFromString,
)
from twisted.internet.interfaces import IStreamClientEndpoint, IStreamServerEndpoint
from zope.interface import implementer

from replication.errors import TLS_CURE
from replication.urls import is_host

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IListeningPort, IProtocolFactory
    from twisted.python.failure import Failure

# Those of ssl:, in the order of Twisted.
SSL_ARGUMENTS: Final = (
    *("port", "privateKey", "certKey", "sslmethod", "interface", "backlog"),
    *("extraCertChain", "dhParameters"),
)
BACKLOG: Final = 1024  # connections that wait to be accepted; Twisted's 50 delays a thousand followers by many seconds
ACCEPTED_AT_ONCE: Final = 4  # connections in one reactor turn; Twisted's 100 or more delay all others by 20 ms


def server_endpoint(reactor: Any, endpoint: str) -> IStreamServerEndpoint:
    """Return the endpoint that a string of Twisted describes; raises what Twisted's parser of it raises.

    ValueError: a socket that systemd has passed is not one of streams, or not of the domain that the string names; or
    the string names no socket.

    Its backlog is BACKLOG, unless the string has a backlog, or its kind has none, as ``systemd:``
    (docs/configuration.md, Endpoints).  It accepts ACCEPTED_AT_ONCE connections in one reactor turn.
    """
    if endpoint.partition(":")[0] == "stdio":
        raise ValueError("standard input is no socket: write tcp:PORT or unix:PATH")
    if not re.search(r"(?<!\\):backlog=", endpoint):
        with suppress(Exception):  # the kind takes no backlog, or the string is wrong: see below
            return _ServerEndpoint(serverFromString(reactor, f"{endpoint}:backlog={BACKLOG}"))
    found = serverFromString(reactor, endpoint)
    if isinstance(found, AdoptedStreamServerEndpoint):
        _check_passed(found)
    return _ServerEndpoint(found)


def _check_passed(endpoint: AdoptedStreamServerEndpoint) -> None:
    """Raise ValueError unless a socket of systemd is as described: the system cuts addresses of another domain off."""
    with socket.socket(fileno=os.dup(endpoint.fileno)) as passed:
        if passed.type != socket.SOCK_STREAM:
            raise ValueError("systemd has passed a socket of another type: write ListenStream= in its .socket unit")
        if passed.family != endpoint.addressFamily:
            domain = socket.AddressFamily(passed.family).name.removeprefix("AF_")
            raise ValueError(f"systemd has passed a socket of another domain: write domain={domain}")


@implementer(IStreamServerEndpoint)
class _ServerEndpoint:
    """An endpoint whose port accepts few connections in one reactor turn."""

    def __init__(self, endpoint: IStreamServerEndpoint) -> None:
        self._endpoint = endpoint

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:  # noqa: N803 (Twisted's name)
        """Listen."""
        return self._endpoint.listen(protocolFactory).addCallback(_accept_few)


def _accept_few(port: Any) -> Any:
    """Limit what a port accepts each time that the reactor finds it readable; Twisted raises its own limit."""
    do_read = getattr(port, "doRead", None)
    if do_read is None:  # a plugin's
        return port

    def accept() -> object:
        port.numberAccepts = ACCEPTED_AT_ONCE
        return do_read()

    port.doRead = accept
    return port


def describe_endpoint_error(endpoint: str, error: Exception, example: str) -> str:
    """Return what is wrong with ``endpoint``, for which Twisted's parser raised ``error``.

    Twisted's parsers raise exceptions of any class.  ``example`` is the form of a plain endpoint.
    """
    kind = endpoint.partition(":")[0]
    if kind in {"ssl", "tls"} and not all(find_spec(each) for each in ("OpenSSL", "service_identity")):
        return TLS_CURE
    if kind == "systemd" and isinstance(error, LookupError):
        return "systemd has passed no such socket: start the unit with `systemctl`, and its .socket unit too"
    if isinstance(error, OSError) and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    if kind == "tcp" or str(error).startswith("Unknown endpoint type"):
        return f"write {example}"
    if "@" in endpoint.partition("=")[0] and isinstance(error, ValueError):  # the error quotes what is before the @
        return "it cannot be used: an endpoint has no user and no password"
    return f"it cannot be used: {error}"


def describe_connect_error(failure: Failure) -> str:
    """Return why a connection could not be made: the operating system's name of the error, if it has one."""
    number = getattr(failure.value, "osError", None)
    return os.strerror(number) if isinstance(number, int) else failure.getErrorMessage().removesuffix(".")


def format_address(address: object) -> str:
    """Return ``host:port``, or ``unix:path``, of an address of Twisted."""
    host, port = getattr(address, "host", None), getattr(address, "port", None)
    if host is None:
        return f"unix:{os.fsdecode(getattr(address, 'name', None) or b'')}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(address: object) -> bool:
    """Return whether only this machine can be, or connect to, ``address``: a loopback address or a UNIX socket."""
    match address:
        case UNIXAddress():
            return True
        case IPv4Address(host=host) | IPv6Address(host=host):
            return _is_loopback(host)
    return False


@lru_cache(1_000)
def _is_loopback(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def show_certificate(endpoint: str, files: tuple[str, str] | None) -> str:
    """Return a ``tls:`` endpoint that shows the certificate and private key in ``files``, unless it names its own."""
    if files is None or not endpoint.startswith("tls:") or "certificate" in split_endpoint(endpoint)[1]:
        return endpoint
    certificate, private_key = map(quoteStringArgument, files)
    return f"{endpoint}:certificate={certificate}:privateKey={private_key}"


def has_tls(endpoint: str) -> bool:
    """Whether an endpoint to listen on has TLS."""
    return endpoint.startswith("ssl:")


def is_redis(endpoint: str) -> bool:
    """Whether an entry of ``connect`` is the URL of a Redis."""
    return endpoint.startswith(("redis://", "rediss://", "redis+unix://"))


def split_endpoint(endpoint: str, *names: str) -> tuple[str, dict[str, str]]:
    """Return the kind of an endpoint and its arguments; those without a name have the free ones of ``names``."""
    kind, *parts = [re.sub(r"\\(.)", r"\1", part) for part in re.split(r"(?<!\\):", endpoint)]
    named = dict(part.split("=", 1) for part in parts if "=" in part)
    plain = [part for part in parts if "=" not in part]
    return kind, named | dict(zip([each for each in names if each not in named], plain, strict=False))


def check_host_of(endpoint: str) -> None:
    """Raise ValueError if an endpoint to connect to names a host that the resolver cannot look up."""
    kind, named = split_endpoint(endpoint, "host", "port")
    if kind in {"tcp", "ssl"} and not is_host(named.get("host", "")):
        raise ValueError("no name of a host")


def client_endpoint(reactor: Any, endpoint: str) -> IStreamClientEndpoint:
    """Return Twisted's endpoint to connect to; a ``tcp:`` endpoint tries all addresses of the name of a host.

    Twisted's own ``tcp:`` uses the first IPv4 address only.
    """
    found: IStreamClientEndpoint = clientFromString(reactor, endpoint)
    kind, named = split_endpoint(endpoint, "host", "port", "timeout", "bindAddress")
    host, bound = named.get("host", ""), named.get("bindAddress")
    if kind != "tcp" or isIPAddress(host) or isIPv6Address(host):
        return found
    bind = None if bound is None else (bound, 0)
    return HostnameEndpoint(reactor, host, int(named["port"]), float(named.get("timeout", 30)), bind)


def default_http_url(endpoint: str) -> str | None:
    """Return the default URL of the HTTP API of the writer at ``endpoint``: the same host, the next port.

    None for every kind of endpoint but ``tcp:``, because only those have a host and a port.
    """
    kind, named = split_endpoint(endpoint, "host", "port")
    host, port = named.get("host", ""), named.get("port", "")
    if kind != "tcp" or not host or not is_host(host) or not re.fullmatch("[0-9]{1,5}", port):
        return None
    return f"http://{f'[{host}]' if ':' in host else host}:{int(port) + 1}"
