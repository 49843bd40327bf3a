"""A master with many streams: SIGTERM during its start, and followers that connect early."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from replication.bench.cluster import free_ports
from tests.system.daemons import LOCAL, Daemon, until

if TYPE_CHECKING:
    from pathlib import Path

STREAMS = 3000


def test_sigterm_ends_a_start_with_many_streams_before_its_end(tmp_path: Path) -> None:
    options = [f"--stream=s{number}" for number in range(STREAMS)]
    with Daemon(tmp_path, "master", *LOCAL, *options) as master:
        until(lambda: "is open" in master.log, "the database is open")
        assert master.terminate() == 0
        assert "is served at" not in master.log
        assert "cannot start" not in master.log
        master.start().address("the wire")
        assert master.terminate() == 0


def test_a_follower_that_is_greeted_is_answered_at_once(tmp_path: Path) -> None:
    """No connection is accepted before all streams can be served."""
    options = [f"--stream=s{number}" for number in range(STREAMS)]
    (port,) = free_ports(1)
    listen = (f"--listen=tcp:{port}:interface=127.0.0.1", "--http=tcp:0:interface=127.0.0.1")
    with Daemon(tmp_path, "master", *listen, *options):

        def connected() -> socket.socket | None:
            try:
                return socket.create_connection(("127.0.0.1", port))
            except ConnectionRefusedError:
                return None

        peer = until(connected, "a connection is accepted")
        with peer, peer.makefile("rb") as lines:
            peer.sendall(b"REPLICATE\n")
            assert [lines.readline().split()[0] for _ in range(2 + STREAMS)] == [
                b"SERVER",
                b"PING",
                *[b"POSITION"] * STREAMS,
            ]
