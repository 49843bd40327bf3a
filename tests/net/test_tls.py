"""Why TLS fails: real certificates and real handshakes of OpenSSL, over a network in memory."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING
from unittest.mock import patch

from OpenSSL import SSL
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.trial.unittest import SynchronousTestCase

from replication.net.client import WriterClient
from replication.net.protocol import Limits
from replication.net.tls import describe_tls_error
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName
from replication.writer.master import Master
from tests.certificates import DAY, Authority, Connections, Identity
from tests.doubles import FragileStore, Net, begin, logged, now

if TYPE_CHECKING:
    from twisted.internet.interfaces import IProtocolFactory

PORT = 9092


class TlsTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(mkdtemp())
        self.authority, self.foreign = Authority(folder), Authority(folder, "foreign")
        trusting = patch.dict(os.environ, {"SSL_CERT_FILE": str(self.authority.certificate)})
        trusting.start()
        self.addCleanup(trusting.stop)
        self.folder = folder
        self.good = self.authority.issue("good", "127.0.0.1")
        self.net = Net()
        self.master = Master(
            server_name="h", database=FragileStore(), streams=[StreamDefinition("orders")], reactor=self.net
        )
        now(self.master.start())
        self.clients: list[WriterClient] = []

    def tearDown(self) -> None:
        stopped = [begin(each.stop()) for each in self.clients]
        self.net.run(1)
        stopped.append(begin(self.master.stop()))
        self.net.run(10)
        self.assertEqual(stopped, [[None]] * len(stopped))
        self.assertEqual(self.net.getDelayedCalls(), [])

    def serve(self, identity: Identity, client: str = "", newest: int = SSL.TLS1_3_VERSION) -> None:
        """Serve with a certificate; clients need one of the authority ``client``."""
        creator, factory = Connections(identity, client, newest), self.master.factory()
        self.serve_plain(TLSMemoryBIOFactory(creator, False, factory, clock=self.net))

    def serve_plain(self, factory: IProtocolFactory | None = None) -> None:
        self.net.serving[PORT] = factory or self.master.factory()

    def follow(self, kind: str = "tls") -> tuple[WriterClient, list[str]]:
        """Connect for a minute, and return the client and what is logged."""
        client = WriterClient(
            reactor=self.net,
            endpoint=f"{kind}:127.0.0.1:{PORT}",
            server_name="h",
            instance_name=InstanceName("worker1"),
            streams=[],
            limits=Limits(),
            on_received=lambda *_: None,
            on_lost=lambda *_: None,
            on_fault=lambda *_: None,
        )
        self.clients.append(client)
        client.start()
        with logged() as lines:
            self.net.run(60)
        return client, lines

    def assert_refused(self, *parts: str, kind: str = "tls", at_master: str | None = None) -> None:
        """Assert that each end logs the reason once in a minute of attempts, and that it stands in the status."""
        client, lines = self.follow(kind)
        ours = [each for each in lines if each.startswith("the writer at ")]
        self.assertEqual(len(ours), 1, lines)
        for part in parts:
            self.assertIn(part, ours[0])
        self.assertEqual(client.error, ours[0])
        self.assertFalse(client.greeted)
        self.assertGreater(self.net.attempts, 10)
        theirs = [each for each in lines if each not in ours]
        self.assertEqual(len(theirs), 0 if at_master is None else 1, theirs)
        self.assertIn(at_master or "", "".join(theirs))

    def test_with_a_good_certificate_server_is_received_and_nothing_is_logged(self) -> None:
        self.serve(self.good)
        client, lines = self.follow()
        self.assertTrue(client.greeted)  # what the client sends waits for the real reactor
        self.assertEqual((client.error, lines), (None, []))

    def test_another_host_is_refused(self) -> None:
        self.serve(self.authority.issue("other", "other.example"))
        self.assert_refused("the certificate is for another host")

    def test_an_unknown_authority_is_refused(self) -> None:
        self.serve(self.foreign.issue("unknown", "127.0.0.1"))
        self.assert_refused("an authority that is not trusted", "SSL_CERT_FILE", at_master="unknown ca")

    def test_an_expired_certificate_is_refused(self) -> None:
        self.serve(self.authority.issue("old", "127.0.0.1", valid=(-2 * DAY, -DAY)))
        self.assert_refused("the certificate has expired on 2", at_master="expired")

    def test_a_certificate_that_is_not_valid_yet_is_refused(self) -> None:
        self.serve(self.authority.issue("new", "127.0.0.1", valid=(DAY, 2 * DAY)))
        self.assert_refused("the certificate is not valid before 2", at_master="refuses this end's certificate")

    def test_an_expired_authority_is_refused(self) -> None:
        old = Authority(self.folder, "authority", valid=(-2 * DAY, -timedelta(hours=1)))
        self.serve(old.issue("of-expired", "127.0.0.1"))
        self.assert_refused("TLS failed: the certificate", at_master="expired")

    def test_without_the_client_certificate_that_is_required_it_is_refused(self) -> None:
        """With TLS 1.3 the client learns it after its own handshake."""
        self.serve(self.good, client=str(self.authority.certificate))
        self.assert_refused("a client certificate is required", at_master="no client certificate")

    def test_with_tls_1_2_it_is_refused_in_the_handshake(self) -> None:
        self.serve(self.good, client=str(self.authority.certificate), newest=SSL.TLS1_2_VERSION)
        self.assert_refused("it may require a client certificate", at_master="no client certificate")

    def test_plain_tcp_to_a_port_with_tls_names_tls(self) -> None:
        self.serve(self.good)
        self.assert_refused("before SERVER", "write tls:", kind="tcp", at_master="does not answer with TLS")

    def test_tls_to_a_plain_port_names_it(self) -> None:
        self.serve_plain()
        self.assert_refused("the port does not answer with TLS", at_master="connects with TLS, this port has none")

    def test_an_error_of_another_kind_is_none_of_tls(self) -> None:
        for error in (None, ValueError("x")):
            self.assertIsNone(describe_tls_error(error, None))
