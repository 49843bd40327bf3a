"""Which connections are accepted: how many, from one address and in all, and how fast (docs/security.md, Bounds).

The wire and HTTP have an ``Admission`` each: a flood of one does not close the other.  A connection is refused before
anything is sent or received, which costs the least.
"""

from __future__ import annotations

import ipaddress
import os
import resource
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
from twisted.logger import Logger

from replication.net.endpoints import is_local
from replication.streams.interfaces import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twisted.internet.interfaces import IReactorTime

PERIOD: Final = 60.0  # seconds over which what is "per minute" is counted
RESERVED_FILES: Final = 64  # for the database, sources and logs; with a limit below 256, a quarter of it
_RESERVES: Final = {"http": 1, "wire": 2}  # the wire leaves one more, so that a flood of it does not close HTTP
MAX_ADDRESSES: Final = 10_000  # that are counted in one period; with more, the period begins again


class Bounds(msgspec.Struct, frozen=True):
    """The limits of the connections that a process accepts, at the wire and at HTTP separately; 0 lifts a limit.

    Args:
        max_connections: open at once.
        max_connections_per_address: open at once from one address.
        max_connects_per_minute: new ones from one address.
        max_faults_per_minute: of one address: lines that are wrong, and handshakes of TLS that fail.
        handshake_timeout: seconds to negotiate TLS, and then to send a first line.
        max_silent_connections: open ones of the wire that have sent no line in ``handshake_timeout``.
        header_timeout: seconds in which all headers of a request must be received.
        body_timeout: seconds in which a body must be received; each KiB of it adds one second.

    The limits of one address do not count for addresses of this machine, where a proxy may be.

    """

    max_connections: int = 10_000
    max_connections_per_address: int = 5_000
    max_connects_per_minute: int = 6_000
    max_faults_per_minute: int = 600
    handshake_timeout: float = 30.0
    max_silent_connections: int = 100
    header_timeout: float = 30.0
    body_timeout: float = 60.0


class Admission:
    """Counts the connections of a factory, and decides which are refused.

    ``socket`` is the name of the factory in metrics: ``wire`` or ``http``.
    """

    log = Logger()

    def __init__(self, socket: str, bounds: Bounds, clock: IReactorTime) -> None:
        self._socket, self._bounds, self._clock = socket, bounds, clock
        self.open = 0  # connections
        self.refused = Counter[str]()  # by the bound that refused them
        self._by_host = Counter[str]()  # open connections
        self._begin_period()

    def enter(self, address: object) -> bool:
        """Return whether to accept a connection from ``address``; if so, ``leave`` must be called once."""
        if self._clock.seconds() >= self._period_ends or len(self._new) > MAX_ADDRESSES:
            self._begin_period()
        host, bounds = host_of(address), self._bounds
        if _reached(self.open, bounds.max_connections):
            return self._refuse("max_connections", bounds.max_connections, address)
        if (files := _scarce_files(_RESERVES[self._socket])) is not None:
            return self._refuse("ulimit -n", f"{files}: raise it, or lower max_connections", address)
        if host is not None:
            if _reached(self._by_host[host], bounds.max_connections_per_address):
                return self._refuse("max_connections_per_address", bounds.max_connections_per_address, address)
            if _reached(self._new[host], bounds.max_connects_per_minute):
                return self._refuse("max_connects_per_minute", bounds.max_connects_per_minute, address)
            if _reached(self._faults[host], bounds.max_faults_per_minute):
                return self._refuse("max_faults_per_minute", bounds.max_faults_per_minute, address)
            self._by_host[host] += 1
            self._new[host] += 1
        self.open += 1
        return True

    def leave(self, address: object) -> None:
        """Note that a connection that was accepted is gone."""
        self.open -= 1
        host = host_of(address)
        if host is not None:
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def faulted(self, address: object) -> None:
        """Note a wrong line, or a handshake that failed, of a connection that was accepted."""
        host = host_of(address)
        if host is not None:
            self._faults[host] += 1

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics."""
        for bound, count in self.refused.items():
            yield Sample("connections_refused_total", count, {"socket": self._socket, "bound": bound})

    def _refuse(self, bound: str, limit: object, address: object) -> bool:
        self.refused[bound] += 1
        if bound not in self._logged:  # once in a period: a flood does not fill the log
            self._logged.add(bound)
            host = getattr(address, "host", "this machine")
            text = "{socket}: refusing connections, such as one from {host}: {bound} is {limit}"
            self.log.warn(text, socket=self._socket, host=host, bound=bound, limit=limit)
        return False

    def _begin_period(self) -> None:
        self._period_ends = self._clock.seconds() + PERIOD
        self._new, self._faults = Counter[str](), Counter[str]()  # connections and faults of this period, by host
        self._logged: set[str] = set()


def host_of(address: object) -> str | None:
    """Return what the limits of one address count: an IPv4 address, or the first 64 bits of an IPv6 address.

    None for an address of this machine.
    """
    host: str | None = getattr(address, "host", None)
    if host is None:
        return None
    try:
        return None if is_local(address) else network_of(host)
    except ValueError:  # the transport of an application, which has names instead of IP addresses
        return host


@lru_cache(1_000)
def network_of(host: str) -> str:
    """Return an IPv4 address, or the network of an IPv6 address: a host may use each address of its 64 bits."""
    ip = ipaddress.ip_address(host)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
    return host


def allow_open_files() -> None:
    """Raise this process's limit of open files to the maximum that the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a lower one, which it does not show
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _scarce_files(reserves: int) -> int | None:
    """Return the limit of open files if no more than the reserved ones, times ``reserves``, are left; None otherwise.

    A new file has the smallest free number, so all numbers below it are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        smallest = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return limit
    os.close(smallest)
    return limit if smallest >= limit - reserves * min(RESERVED_FILES, limit // 4) else None


def _reached(count: int, limit: int) -> bool:
    return 0 < limit <= count
