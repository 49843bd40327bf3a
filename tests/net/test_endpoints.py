"""Endpoint strings: their errors, and the URL that belongs to one."""

from __future__ import annotations

import errno
import socket
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import pytest
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.endpoints import HostnameEndpoint, _SystemdParser, serverFromString
from twisted.internet.error import ConnectionRefusedError as RefusedError
from twisted.internet.error import DNSLookupError, getConnectError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.selectreactor import SelectReactor
from twisted.internet.testing import MemoryReactor
from twisted.python.failure import Failure
from twisted.python.systemd import ListenFDs
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import TLS_CURE
from replication.net.endpoints import (
    ACCEPTED_AT_ONCE,
    BACKLOG,
    check_host_of,
    client_endpoint,
    default_http_url,
    describe_connect_error,
    describe_endpoint_error,
    is_local,
    server_endpoint,
    show_certificate,
)

if TYPE_CHECKING:
    from twisted.internet.interfaces import IResolutionReceiver


def resolve(port: int, receiver: IResolutionReceiver, *_: object, **__: object) -> None:
    """Resolve a name to two addresses."""
    receiver.resolutionBegan(Mock())
    for host in ("127.0.0.2", "127.0.0.1"):
        receiver.addressResolved(IPv4Address("TCP", host, port))
    receiver.resolutionComplete()


class EndpointTests(SynchronousTestCase):
    def test_a_failed_connection_is_described_by_the_name_of_its_error(self) -> None:
        for error, text in [
            (getConnectError((errno.ECONNREFUSED, "as the system has it")), "Connection refused"),
            (getConnectError((errno.EHOSTUNREACH, "as the system has it")), "No route to host"),
            (RefusedError(), "Connection was refused by other side"),
            (DNSLookupError("no results"), "DNS lookup failed: no results"),
        ]:
            self.assertEqual(describe_connect_error(Failure(error)), text)

    def test_another_kind_of_endpoint_gets_twisteds_error(self) -> None:
        text = describe_endpoint_error("ssl:1:privateKey=/x", FileNotFoundError(2, "No such file"), "tcp:PORT")
        self.assertEqual(text, "it cannot be used: [Errno 2] No such file")
        text = describe_endpoint_error("tls:h:1", FileNotFoundError(2, "No such file", "/x"), "tcp:HOST:PORT")
        self.assertEqual(text, "cannot read /x: No such file")

    def test_a_password_before_an_at_sign_is_not_quoted(self) -> None:
        error = ValueError("invalid literal for int() with base 10: 'hidden@h'")
        text = describe_endpoint_error("tls:me:hidden@h:1", error, "tcp:HOST:PORT")
        self.assertEqual(text, "it cannot be used: an endpoint has no user and no password")

    def test_tls_without_its_libraries_names_the_extra_to_install(self) -> None:
        for library in ("OpenSSL", "service_identity"):
            with patch.dict("sys.modules", {library: None}):
                for error in (NameError("name 'optionsForClientTLS' is not defined"), ValueError("Unknown endpoint")):
                    self.assertEqual(describe_endpoint_error("tls:h:1", error, "tcp:HOST:PORT"), TLS_CURE)

    def test_the_default_url_is_the_same_host_and_the_next_port(self) -> None:
        for endpoint, url in [
            ("tcp:127.0.0.1:9092", "http://127.0.0.1:9093"),
            ("tcp:host=example.com:port=9092", "http://example.com:9093"),
            ("tcp:example.com:port=9092:timeout=3", "http://example.com:9093"),
            (r"tcp:\:\:1:9092", "http://[::1]:9093"),
            (r"tcp:host=fe80\:\:1:port=1", "http://[fe80::1]:2"),
        ]:
            self.assertEqual(default_http_url(endpoint), url)

    def test_other_endpoints_have_no_default_url(self) -> None:
        for endpoint in (
            "unix:/run/r.sock",
            "tls:example.com:9092",
            "tcp:example.com",
            "tcp:example.com:x",
            "tcp:a..b:1",
            "tcp:",
            "",
        ):
            self.assertIsNone(default_http_url(endpoint), endpoint)


def test_a_certificate_is_shown_at_tls_unless_the_endpoint_names_one() -> None:
    files = ("a:b.pem", "k.pem")
    assert show_certificate("tls:h:1", files) == r"tls:h:1:certificate=a\:b.pem:privateKey=k.pem"
    for endpoint in ("tcp:h:1", "unix:p", "redis://h", "tls:h:1:certificate=c.pem"):
        assert show_certificate(endpoint, files) == endpoint
    assert show_certificate("tls:h:1", None) == "tls:h:1"


class ServerEndpointTests(SynchronousTestCase):
    def listen(self, endpoint: str) -> MemoryReactor:
        reactor = MemoryReactor()
        self.successResultOf(server_endpoint(reactor, endpoint).listen(Factory()))
        return reactor

    def test_standard_input_is_refused(self) -> None:
        """The daemon's log had a traceback, because standard input has no port to close."""
        error = self.assertRaises(ValueError, server_endpoint, MemoryReactor(), "stdio:")
        self.assertIn("standard input is no socket: write tcp:PORT or unix:PATH", str(error))

    def test_an_endpoint_that_names_no_backlog_has_room_for_many_connections_at_once(self) -> None:
        for endpoint in ("tcp:9092", "tcp:9092:interface=127.0.0.1", "tcp:9092:127.0.0.1", "tcp:port=9092"):
            ((port, _, backlog, _),) = self.listen(endpoint).tcpServers
            self.assertEqual((port, backlog), (9092, BACKLOG), endpoint)
        ((path, _, backlog, _, _),) = self.listen(r"unix:/run/a\:b.sock").unixServers
        self.assertEqual((path, backlog), ("/run/a:b.sock", BACKLOG))

    def test_a_socket_of_systemd_must_be_as_it_is_described(self) -> None:
        """A UNIX socket at ``domain=INET`` was a traceback, and one on ::1 was refused as open to other hosts."""
        kinds = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
        passed = [socket.socket(each) for each in kinds] + [socket.socket(type=socket.SOCK_DGRAM)]
        for each in passed:
            self.addCleanup(each.close)
        self.patch(_SystemdParser, "_sddaemon", ListenFDs([each.fileno() for each in passed]))
        for index, own in enumerate(("INET", "INET6", "UNIX")):
            server_endpoint(MemoryReactor(), f"systemd:domain={own}:index={index}")
            for other in {"INET", "INET6", "UNIX"} - {own}:
                with self.assertRaisesRegex(ValueError, f"^systemd has passed .* another domain: write domain={own}$"):
                    server_endpoint(MemoryReactor(), f"systemd:domain={other}:index={index}")
        with self.assertRaisesRegex(ValueError, "another type: write ListenStream="):
            server_endpoint(MemoryReactor(), "systemd:domain=INET:index=3")

    def test_a_backlog_of_the_description_is_kept(self) -> None:
        for endpoint in ("tcp:9092:backlog=7", "tcp:9092:127.0.0.1:7", "tcp:9092:backlog=7:interface=127.0.0.1"):
            ((_, _, backlog, _),) = self.listen(endpoint).tcpServers
            self.assertEqual(backlog, 7, endpoint)

    def test_a_reactor_turn_accepts_only_a_few_of_the_connections_that_wait(self) -> None:
        """With Twisted's own limit of 100 the others would wait for all of them."""
        reactor: Any = SelectReactor()
        self.addCleanup(reactor.disconnectAll)
        accepted: list[Protocol] = []

        def accept() -> Protocol:
            accepted.append(Protocol())
            return accepted[-1]

        endpoint = server_endpoint(reactor, "tcp:0:interface=127.0.0.1")
        port: Any = self.successResultOf(endpoint.listen(Factory.forProtocol(accept)))
        for _ in range(2 * ACCEPTED_AT_ONCE + 1):
            self.addCleanup(socket.create_connection(("127.0.0.1", port.getHost().port)).close)
        counts = []
        for _ in range(3):
            reactor.iterate(1)
            counts.append(len(accepted))
        self.assertEqual(counts, [ACCEPTED_AT_ONCE, 2 * ACCEPTED_AT_ONCE, 2 * ACCEPTED_AT_ONCE + 1])

    def test_each_address_of_a_host_is_tried(self) -> None:
        """Nothing listens at the first one.  So two hosts of one name may take over from each other."""
        reactor: Any = SelectReactor()
        self.addCleanup(reactor.disconnectAll)
        port: Any = reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")
        number = port.getHost().port
        resolver = Mock()
        resolver.resolveHostName.side_effect = partial(resolve, number)
        reactor.installNameResolver(resolver)
        found: list[Any] = []
        endpoint: Any = client_endpoint(reactor, f"tcp:orders.example:{number}:timeout=5")
        endpoint.connect(Factory.forProtocol(Protocol)).addBoth(found.append)
        for _ in range(100):
            if found:
                break
            reactor.iterate(0.1)
        self.assertEqual(found[0].transport.getPeer(), IPv4Address("TCP", "127.0.0.1", number))

    def test_only_a_name_is_resolved(self) -> None:
        for endpoint in ("tcp:127.0.0.1:1", r"tcp:\:\:1:1", "unix:/a"):
            self.assertNotIsInstance(client_endpoint(MemoryReactor(), endpoint), HostnameEndpoint)

    def test_a_wrong_description_gets_the_error_of_twisted(self) -> None:
        reactor: Any = MemoryReactor()
        for endpoint in ("nothing:1", "tcp:x", "tcp", "tcp:1:backlog=x", "tcp:1:2:3:4", "ssl:1:privateKey=/no/such"):
            with self.assertRaises(Exception) as refused:
                server_endpoint(reactor, endpoint)
            with self.assertRaises(Exception) as refused_by_twisted:
                serverFromString(reactor, endpoint)
            self.assertEqual(str(refused.exception), str(refused_by_twisted.exception))


@pytest.mark.parametrize(
    ("address", "local"),
    [
        (IPv4Address("TCP", "127.0.0.1", 1), True),
        (IPv4Address("TCP", "127.8.8.8", 1), True),
        (IPv4Address("TCP", "10.0.0.1", 1), False),
        (IPv4Address("TCP", "0.0.0.0", 1), False),
        (IPv6Address("TCP", "::1", 1), True),
        (IPv6Address("TCP", "::ffff:127.0.0.1", 1), True),
        (IPv6Address("TCP", "::ffff:10.0.0.1", 1), False),
        (IPv6Address("TCP", "fe80::1%eth0", 1), False),
        (UNIXAddress(b"/run/socket"), True),
        (UNIXAddress(None), True),
        (None, False),
    ],
)
def test_loopback_and_unix_sockets_are_this_machine(address: object, *, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize("endpoint", ["tcp:a..b:1", "tcp:port=1:host=.a", "ssl:a..b:1"])
def test_a_host_that_cannot_be_looked_up_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="no name of a host"):
        check_host_of(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp:h:1", r"tcp:\:\:1:1", "unix:/a/../b", "tls:h:1", "stdio:"])
def test_other_endpoints_pass(endpoint: str) -> None:
    check_host_of(endpoint)
