"""TLS between real processes: facts that arrive, and a reason wherever a connection fails."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.certificates import DAY, Authority
from tests.system.daemons import PATIENCE, Daemon, environment, run_command, until
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


class Cluster:
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

    def run(self, *command: str, status: int = 0) -> str:
        """Run a command, and return what it prints."""
        done = run_command("replication", *command, variables=self.environment)
        assert done.returncode == status, (command, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def tail(self, *arguments: str) -> str:
        """Return the first line that ``replication tail`` writes to standard error."""
        command = [sys.executable, "-m", "replication.cli.main", "tail", *arguments]
        with subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = process.stderr.readline()
            process.kill()
        return line


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path)


def test_facts_arrive_with_tls_on_the_wire_and_on_http(cluster: Cluster) -> None:
    good = cluster.authority.issue("good", "127.0.0.1")
    wire, http = cluster.master(good, good)
    where = (f"--connect=tls:{wire}", f"--catch-up=https://{http}", f"--http={LOCAL}")
    worker = cluster.daemon("worker", *where)
    here = f"http://{worker.address('HTTP')}"
    cluster.run("append", "--http", f"https://{http}", "orders", '["o1"]')

    def applied() -> bool:
        status, orders = ask(f"{here}/v1/streams/orders")
        return bool(status == 200 and orders["positions"].get("master") == 2)

    until(applied, "the fact arrives")
    assert ask(f"{here}/health/ready")[0] == 200


@pytest.mark.parametrize("fault", list(BAD))
def test_a_refused_certificate_is_in_the_log_in_the_status_and_in_tail(cluster: Cluster, fault: str) -> None:
    host, reason = BAD[fault]
    valid = (-2 * DAY, -DAY if fault == "expired" else DAY)
    bad = cluster.authority.issue("bad", host, valid=valid)
    wire, _ = cluster.master(bad, bad)
    worker = cluster.daemon("worker", f"--connect=tls:{wire}", f"--http={LOCAL}")
    here = f"http://{worker.address('HTTP')}"
    until(lambda: reason in worker.log, "the reason is logged")
    until(lambda: reason in ask(f"{here}/health/ready")[1]["detail"], "the reason is in the status")
    assert reason in " ".join(cluster.run("status", "--http", here).split())
    assert reason in cluster.tail(f"tls:{wire}")
    assert worker.log.count(reason) == 1


def test_a_refused_certificate_of_an_https_source_is_in_the_log_and_in_the_status(cluster: Cluster) -> None:
    good, bad = cluster.authority.issue("good", "127.0.0.1"), cluster.authority.issue("bad", "other.example")
    wire, http = cluster.master(good, bad)
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"https://{http}/v1/streams/orders/facts", b'{"rows": [["o1"]]}', headers)
    careless = ssl.create_default_context()
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=PATIENCE, context=careless) as answer:
        assert answer.status == 200
    worker = cluster.daemon("worker", f"--connect=tls:{wire}", f"--catch-up=https://{http}", f"--http={LOCAL}")
    here = f"http://{worker.address('HTTP')}"
    reason = "TLS failed: the certificate is for another host"
    until(lambda: reason in worker.log, "the reason is logged")
    until(lambda: reason in str(ask(f"{here}/v1/streams/orders")[1]), "the reason is in the status")
    assert reason in cluster.tail(f"tls:{wire}", "--from=beginning", f"--http=https://{http}")


def test_plain_tcp_to_a_port_with_tls_is_explained_on_both_sides(cluster: Cluster) -> None:
    good = cluster.authority.issue("good", "127.0.0.1")
    master = cluster.daemon("master", f"--listen={good.listen()}", f"--http={LOCAL}")
    wire = master.address("the wire")
    assert "before SERVER; if that port has TLS, write tls:" in cluster.tail(f"tcp:{wire}")
    until(lambda: "this port uses TLS, but the peer connects without it" in master.log, "the master logs it")


class MutualTlsMaster:
    """A master that requires the certificate of ``worker1`` or ``admin`` on all addresses, and workers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, issue = cluster, cluster.authority.issue
        self.server, self.worker, self.admin, self.stranger = (
            issue("server", "127.0.0.1"),
            issue("worker", "worker1"),
            issue("admin", "admin"),
            issue("stranger", "worker2"),
        )
        everywhere = self.server.listen().replace("127.0.0.1", "0.0.0.0")
        (cluster.folder / "master.toml").write_text(f"""
            stream = ["orders"]
            listen = ["{everywhere}"]
            http = "{everywhere}"
            [tls]
            client_ca = "{cluster.authority.certificate}"
            allow = ["worker1", "admin"]
        """)
        self.master = cluster.daemon("master", "--config=master.toml")
        self.wire, self.http = (
            f"127.0.0.1:{self.master.address(each).rpartition(':')[2]}" for each in ("the wire", "HTTP")
        )

    def follow(self, shown: Identity, name: str) -> tuple[Daemon, str]:
        """Start a worker that shows a certificate, and return it with the URL of its HTTP."""
        certificate, key = shown.files
        (self.cluster.folder / f"{name}.toml").write_text(f"""
            instance_name = "{name}"
            connect = ["tls:{self.wire}"]
            catch_up = ["https://{self.http}"]
            http = "{LOCAL}"
            [tls]
            certificate = "{certificate}"
            private_key = "{key}"
        """)
        worker = self.cluster.daemon("worker", f"--config={name}.toml", name=name)
        return worker, f"http://{worker.address('HTTP')}"

    def append(self, row: str, shown: Identity | None = None, status: int = 0) -> str:
        """Append a row, and return what the command prints."""
        certificate = () if shown is None else ("--certificate", shown.files[0], "--private-key", shown.files[1])
        return self.cluster.run("append", "--http", f"https://{self.http}", *certificate, "orders", row, status=status)


def applied(here: str, token: int) -> bool:
    """Return whether a worker has applied the facts of the master up to a token."""
    status, orders = ask(f"{here}/v1/streams/orders")
    return bool(status == 200 and orders["positions"].get("master") == token)


def test_a_master_that_demands_certificates_serves_those_that_it_allows_and_no_others(cluster: Cluster) -> None:
    mutual = MutualTlsMaster(cluster)
    master = mutual.master
    assert mutual.append('["o1"]', mutual.admin) == "2\n"
    _, here = mutual.follow(mutual.worker, "worker1")
    until(lambda: applied(here, 2), "the fact is fetched over HTTP")
    assert mutual.append('["o2"]', mutual.admin) == "3\n"
    until(lambda: applied(here, 3), "the next one comes over the wire")
    assert "worker1" in mutual.cluster.run("status", "--http", here)

    refused, there = mutual.follow(mutual.stranger, "worker2")
    text = "the certificate is for 'worker2', which tls.allow does not have"
    until(lambda: text in master.log, "the reason is logged")
    until(lambda: "TLS failed" in refused.log, "the other end logs the failure")
    assert ask(f"{there}/health/ready")[0] == 503
    assert "refuses" in mutual.append('["o3"]', mutual.stranger, status=1)
    assert "give --certificate FILE and --private-key FILE" in mutual.append('["o3"]', status=1)
    until(lambda: "HTTP: a peer" in master.log, "HTTP logs it, too")
    shown = mutual.cluster.tail(
        f"tls:{mutual.wire}",
        "--certificate",
        mutual.stranger.files[0],
        "--private-key",
        mutual.stranger.files[1],
    )
    assert "TLS failed" in shown

    context = ssl.create_default_context(cafile=str(cluster.authority.certificate))
    context.load_cert_chain(*mutual.admin.files)
    with urllib.request.urlopen(f"https://{mutual.http}/metrics", timeout=PATIENCE, context=context) as answer:
        metrics = answer.read().decode()
    assert 'replication_tls_failures_total{socket="wire"}' in metrics
    assert 'replication_tls_failures_total{socket="http"}' in metrics
    for each in (cluster.authority.certificate, mutual.server.certificate):
        assert f'replication_certificate_expires_seconds{{file="{each}"}}' in metrics
    assert master.log.count(text) == 2, "once for the wire, and once for HTTP"
    assert mutual.append('["o4"]', mutual.admin) == "4\n"
    until(lambda: applied(here, 4), "the connection that is open was not disturbed")


def test_sighup_reads_certificates_again_and_no_connection_is_lost(cluster: Cluster) -> None:
    mutual = MutualTlsMaster(cluster)
    master = mutual.master
    worker, here = mutual.follow(mutual.worker, "worker1")
    mutual.append('["o1"]', mutual.admin)
    until(lambda: applied(here, 2), "the worker follows")

    mutual.server.key.write_text("nonsense")
    os.kill(master.pid, signal.SIGHUP)
    until(lambda: "get the certificate that was read before: cannot use" in master.log, "the error is logged")
    assert mutual.append('["o2"]', mutual.admin) == "3\n"

    renewed = cluster.authority.issue("renewed", "127.0.0.1", valid=(-DAY, 30 * DAY))
    mutual.server.key.write_bytes(renewed.key.read_bytes())
    mutual.server.certificate.write_bytes(renewed.certificate.read_bytes())
    os.kill(master.pid, signal.SIGHUP)
    until(lambda: master.log.count("new connections get the certificate that is valid until") == 2, "both are read")
    for address in (mutual.wire, mutual.http):
        host, _, port = address.partition(":")
        pem = ssl.PEM_cert_to_DER_cert(renewed.certificate.read_text())
        context = ssl.create_default_context(cafile=str(cluster.authority.certificate))
        context.load_cert_chain(*mutual.admin.files)
        with (
            socket.create_connection((host, int(port)), PATIENCE) as tcp,
            context.wrap_socket(tcp, server_hostname=host) as tls,
        ):
            assert tls.getpeercert(binary_form=True) == pem, "new connections get the new one"
    mutual.append('["o3"]', mutual.admin)
    until(lambda: applied(here, 4), "the worker still follows")
    connections = ask(f"{here}/metrics")[1]
    assert "replication_connections_total 1.0" in connections, "over its first connection"
    assert worker.terminate() == 0


def test_a_relay_shows_its_certificate_to_the_master_and_demands_those_of_its_followers(cluster: Cluster) -> None:
    mutual = MutualTlsMaster(cluster)
    edge = cluster.authority.issue("edge", "edge")
    everywhere = mutual.server.listen().replace("127.0.0.1", "0.0.0.0")
    certificate, key = mutual.worker.files
    (cluster.folder / "relay.toml").write_text(f"""
        instance_name = "relay1"
        connect = ["tls:{mutual.wire}"]
        catch_up = ["https://{mutual.http}"]
        listen = ["{everywhere}"]
        http = "{everywhere}"
        [tls]
        certificate = "{certificate}"
        private_key = "{key}"
        client_ca = "{cluster.authority.certificate}"
        allow = ["edge"]
        [access.edge]
        certificates = ["edge"]
        read = ["orders"]
    """)
    mutual.append('["o1"]', mutual.admin)
    relay = cluster.daemon("worker", "--config=relay.toml", name="relay1")
    mutual.wire, mutual.http = (f"127.0.0.1:{relay.address(each).rpartition(':')[2]}" for each in ("the wire", "HTTP"))
    _, here = mutual.follow(edge, "edge")
    until(lambda: applied(here, 2), "the fact arrives behind the relay")
    assert [each["name"] for each in ask(f"{here}/v1/streams")[1]["streams"]] == ["orders"], "and no other stream"
    text = "the right to append 'orders' is missing: add it to append in [access.edge]"
    assert text in mutual.append('["o2"]', edge, status=1)
    mutual.follow(mutual.worker, "worker2")
    text = "the certificate is for 'worker1', which tls.allow does not have"
    until(lambda: text in relay.log, "the relay refuses a certificate that the master accepts")
