"""A thousand followers that connect at once, as after a restart of their master."""

from __future__ import annotations

import os
import resource
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import LOCAL, PATIENCE, Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLLOWERS = 1000
SOMAXCONN = Path("/proc/sys/net/core/somaxconn")  # Linux shortens every backlog to it


@pytest.fixture(autouse=True)
def _enough_files() -> Iterator[None]:
    """Let this process and its children open as many sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * FOLLOWERS
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"a process may open {hard} files here")
    if not SOMAXCONN.exists() or int(SOMAXCONN.read_text()) < FOLLOWERS:
        pytest.skip("the system has a shorter backlog")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_followers_are_accepted_while_the_master_does_something_else(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", *LOCAL) as master, ExitStack() as stack:
        for what, request, answer in [
            ("the wire", b"", b"SERVER localhost\n"),
            ("HTTP", b"GET /health/live HTTP/1.0\r\n\r\n", b"HTTP/1.0 200 OK\r\n"),
        ]:
            host, port = master.address(what).rsplit(":", 1)
            os.kill(master.pid, signal.SIGSTOP)  # it accepts none of them: the kernel keeps them in the backlog
            peers = []
            for _ in range(FOLLOWERS):
                peers.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE)))
                peers[-1].sendall(request)
            os.kill(master.pid, signal.SIGCONT)
            for peer in peers:
                with peer, peer.makefile("rb") as lines:
                    assert lines.readline() == answer
