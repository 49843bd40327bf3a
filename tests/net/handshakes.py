"""The base of tests of TLS: a master, clients, and real handshakes of OpenSSL over a network in memory."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

from OpenSSL import SSL
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.trial.unittest import SynchronousTestCase

from replication.net.client import WriterClient
from replication.net.protocol import Limits
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName
from replication.writer.master import Master
from tests.certificates import Authority, Connections, Identity
from tests.doubles import FragileStore, Net, begin, logged, now

if TYPE_CHECKING:
    from twisted.internet.interfaces import IProtocolFactory

PORT = 9092


class TlsCase(SynchronousTestCase):
    def setUp(self) -> None:
        files = TemporaryDirectory()
        self.addCleanup(files.cleanup)
        folder = Path(files.name)
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

    def follow(
        self, kind: str = "tls", shown: Identity | None = None, more: str = ""
    ) -> tuple[WriterClient, list[str]]:
        """Connect for a minute, and return the client and what is logged; it shows a certificate.

        ``more`` are further arguments of the endpoint.
        """
        client = WriterClient(
            reactor=self.net,
            endpoint=f"{kind}:127.0.0.1:{PORT}{shown.show() if shown else ''}{more}",
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

    def assert_refused(
        self, *parts: str, kind: str = "tls", at_master: str | None = None, shown: Identity | None = None
    ) -> None:
        """Assert that each end logs the reason once in a minute of attempts, and that the status has it."""
        client, lines = self.follow(kind, shown)
        at_worker = [each for each in lines if each.startswith("the writer at ")]
        self.assertEqual(len(at_worker), 1, lines)
        for part in parts:
            self.assertIn(part, at_worker[0])
        self.assertEqual(client.error, at_worker[0])
        self.assertFalse(client.greeted)
        self.assertGreater(self.net.attempts, 10)
        others = [each for each in lines if each not in at_worker]
        self.assertEqual(len(others), 0 if at_master is None else 1, others)
        self.assertIn(at_master or "", "".join(others))
