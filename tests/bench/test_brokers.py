"""Brokers that the bench starts, and what their clients send."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from unittest import mock

from msgspec.structs import replace
from twisted.trial.unittest import SynchronousTestCase

from replication.bench import BROKERS, brokers, version_of
from replication.bench.brokers import KINDS, Broker, connect
from replication.bench.processes import BenchError
from tests.bench.scenarios import require

FRAMES = {
    "redis": b"*3\r\n$7\r\nmessage\r\n$6\r\nevents\r\n$3\r\n[1]\r\n",
    "nats": b"MSG events 1 3\r\n[1]\r\n",
}


class BrokerTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = Path(self.mktemp())
        folder.mkdir(parents=True)
        self.folder = folder
        self.patch(tempfile, "tempdir", str(folder))

    def test_every_broker_of_the_command_line_is_known(self) -> None:
        self.assertEqual([*KINDS], [*BROKERS])

    def _deliver(self, name: str) -> None:
        """A text reaches a subscriber in the frame of the protocol; at the end the server and its folder are gone."""
        require(name)
        kind = KINDS[name]
        with Broker(name) as broker, connect(kind, broker.port, kind.subscribe) as reader:
            with connect(kind, broker.port) as publisher:
                publisher.sendall(kind.publish % (3, b"[1]"))
                reader.settimeout(30)
                data = b""
                while not data.endswith(b"[1]\r\n"):
                    data += reader.recv(1_000)
            self.assertTrue(data.endswith(FRAMES[name]), data)
            self.assertGreaterEqual(broker.cpu_time(), 0.0)
        self.assertRaises(ConnectionRefusedError, socket.create_connection, ("127.0.0.1", broker.port))
        self.assertEqual([*self.folder.iterdir()], [])
        self.assertRegex(version_of(name), r"^\d+\.\d+\.\d+$")

    def test_redis_delivers(self) -> None:
        self._deliver("redis")

    def test_nats_delivers(self) -> None:
        self._deliver("nats")

    def test_a_missing_program_is_named_with_the_cure(self) -> None:
        with mock.patch.object(shutil, "which", return_value=None):
            error = self.assertRaises(BenchError, Broker, "nats")
        self.assertEqual(
            str(error), "nats-server is missing: apt-get install nats-server, or put nats-server on the PATH"
        )
        self.assertEqual([*self.folder.iterdir()], [])

    def test_a_server_that_does_not_start_is_an_error_with_its_output(self) -> None:
        wrong = replace(KINDS["redis"], program="sh", options=["-c", "echo no room; exit 1"])
        with mock.patch.dict(brokers.KINDS, {"redis": wrong}):
            error = self.assertRaises(BenchError, Broker("redis").__enter__)
        self.assertEqual(str(error), "sh does not start\nno room\n")
        self.assertEqual([*self.folder.iterdir()], [])
