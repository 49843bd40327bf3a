"""Endpoint strings: their errors, and the URL that belongs to one."""

from __future__ import annotations

import errno
from unittest.mock import patch

from twisted.internet.error import ConnectionRefusedError as RefusedError
from twisted.internet.error import DNSLookupError, getConnectError
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import TLS_CURE
from replication.net.endpoints import default_http_url, describe_connect_error, describe_endpoint_error


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
        self.assertEqual(text, "not an endpoint ([Errno 2] No such file)")

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
            "tcp:",
            "",
        ):
            self.assertIsNone(default_http_url(endpoint), endpoint)
