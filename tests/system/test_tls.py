"""TLS between real processes: facts that arrive, and a reason wherever a connection fails."""

from __future__ import annotations

import ssl
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.certificates import DAY, Authority
from tests.system.daemons import PATIENCE, Daemon, environment, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.certificates import Identity

BAD = {
    "another host": ("other.example", "the certificate is for another host"),
    "expired": ("127.0.0.1", "the certificate has expired on 2"),
}
LOCAL = "tcp:0:interface=127.0.0.1"


class Scene:
    """A folder with an authority that every process trusts."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.authority = Authority(folder)
        self.environment = environment() | {"SSL_CERT_FILE": str(self.authority.certificate)}

    def daemon(self, role: str, *options: str, name: str | None = None) -> Daemon:
        """Start a daemon."""
        daemon = Daemon(self.folder, role, *options, name=name)
        daemon.environment = self.environment
        return self.stack.enter_context(daemon)

    def master(self, wire: Identity, http: Identity) -> tuple[str, str]:
        """Start a master and return its addresses."""
        master = self.daemon("master", "--stream=orders", f"--listen={wire.listen()}", f"--http={http.listen()}")
        return master.address("the wire"), master.address("HTTP")

    def tail(self, *arguments: str) -> str:
        """Return the first line that ``replication tail`` writes to standard error."""
        command = [sys.executable, "-m", "replication.cli.main", "tail", *arguments]
        with subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            process.kill()
        return line


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack, tmp_path)


def test_facts_arrive_with_tls_on_the_wire_and_on_http(scene: Scene) -> None:
    good = scene.authority.issue("good", "127.0.0.1")
    wire, http = scene.master(good, good)
    where = (f"--connect=tls:{wire}", f"--catch-up=https://{http}", f"--http={LOCAL}")
    worker = scene.daemon("worker", *where)
    here = f"http://{worker.address('HTTP')}"
    append = ["replication", "append", "--http", f"https://{http}", "orders", '["o1"]']
    subprocess.run(append, env=scene.environment, check=True, stdout=subprocess.DEVNULL)

    def applied() -> bool:
        status, orders = ask(f"{here}/v1/streams/orders")
        return bool(status == 200 and orders["positions"].get("master") == 2)

    until(applied, "the fact arrives")
    assert ask(f"{here}/health/ready")[0] == 200


@pytest.mark.parametrize("fault", list(BAD))
def test_a_refused_certificate_is_in_the_log_in_the_status_and_in_tail(scene: Scene, fault: str) -> None:
    host, reason = BAD[fault]
    valid = (-2 * DAY, -DAY if fault == "expired" else DAY)
    bad = scene.authority.issue("bad", host, valid=valid)
    wire, _ = scene.master(bad, bad)
    worker = scene.daemon("worker", f"--connect=tls:{wire}", f"--http={LOCAL}")
    here = f"http://{worker.address('HTTP')}"
    until(lambda: reason in worker.log, "the reason is logged")
    until(lambda: reason in ask(f"{here}/health/ready")[1]["detail"], "the reason is in the status")
    status = ["replication", "status", "--http", here]
    shown = subprocess.run(status, env=scene.environment, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert reason in " ".join(shown.stdout.split())
    assert reason in scene.tail(f"tls:{wire}")
    assert worker.log.count(reason) == 1


def test_a_refused_certificate_of_an_https_source_is_in_the_log_and_in_the_status(scene: Scene) -> None:
    good, bad = scene.authority.issue("good", "127.0.0.1"), scene.authority.issue("bad", "other.example")
    wire, http = scene.master(good, bad)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"https://{http}/v1/streams/orders/facts", b'{"rows": [["o1"]]}', headers)
    careless = ssl.create_default_context()
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=PATIENCE, context=careless) as answer:
        assert answer.status == 200
    worker = scene.daemon("worker", f"--connect=tls:{wire}", f"--catch-up=https://{http}", f"--http={LOCAL}")
    here = f"http://{worker.address('HTTP')}"
    reason = "TLS failed: the certificate is for another host"
    until(lambda: reason in worker.log, "the reason is logged")
    until(lambda: reason in str(ask(f"{here}/v1/streams/orders")[1]), "the reason is in the status")
    assert reason in scene.tail(f"tls:{wire}", "--from=beginning", f"--http=https://{http}")


def test_plain_tcp_to_a_port_with_tls_is_explained_on_both_sides(scene: Scene) -> None:
    good = scene.authority.issue("good", "127.0.0.1")
    master = scene.daemon("master", f"--listen={good.listen()}", f"--http={LOCAL}")
    wire = master.address("the wire")
    assert "before SERVER; if that port has TLS, write tls:" in scene.tail(f"tcp:{wire}")
    until(lambda: "the port does not answer with TLS" in master.log, "the master logs it")
