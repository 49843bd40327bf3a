"""A relay and a worker that writes are as safe as a master: rights, SIGHUP, and sockets that other hosts can reach."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.certificates import DAY, Authority
from tests.system.daemons import PATIENCE, Daemon, until
from tests.system.peers import Peer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.certificates import Identity

LOCAL = "tcp:0:interface=127.0.0.1"
ROLES = {"a relay": "", "a worker that writes": 'writes = ["notes"]'}


class Edge:
    """A worker that serves, and its configuration."""

    def __init__(self, folder: Path, master: Daemon, keys: str) -> None:
        self.folder, self.authority = folder, Authority(folder)
        self.identity = self.authority.issue("edge", "127.0.0.1")
        self._keys = f"""
            instance_name = "edge"
            connect = ["tcp:{master.address("the wire")}"]
            catch_up = ["http://{master.address("HTTP")}"]
            listen = ["{LOCAL}"]
            http = "{self.identity.listen()}"
            {keys}
            secret_file = "{self._secret("first")}"
        """

    def _secret(self, name: str) -> Path:
        path = self.folder / name
        path.write_text(f"the {name} secret")
        path.chmod(0o600)
        return path

    def configure(self, *rights: str) -> None:
        """Write the configuration, with these rights of the second secret."""
        table = "\n".join(("[access.second]", f'secret_file = "{self._secret("second")}"', *rights)) if rights else ""
        (self.folder / "edge.toml").write_text(self._keys + table)

    def status(self, http: str, secret: str, path: str, body: bytes | None = None) -> int:
        """Return the status of a request."""
        return self.ask(http, secret, path, body)[0]

    def ask(self, http: str, secret: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Return the status of a request, and the body of its answer."""
        headers = {"Authorization": f"Bearer the {secret} secret", "Content-Type": "application/json"}
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        try:
            with urlopen(Request(f"https://{http}{path}", body, headers), timeout=PATIENCE, context=context) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, error.read()

    def follows(self, http: str) -> bool:
        """Return whether it has the stream orders, up to now."""
        status, body = self.ask(http, "second", "/v1/streams/orders")
        return status == 200 and [each["state"] for each in json.loads(body)["writers"]] == ["live"]

    def shows(self, http: str, identity: Identity) -> bool:
        """Return whether a new connection receives a certificate."""
        host, _, port = http.partition(":")
        context = ssl.create_default_context(cafile=str(self.authority.certificate))
        with (
            socket.create_connection((host, int(port)), PATIENCE) as tcp,
            context.wrap_socket(tcp, server_hostname=host) as tls,
        ):
            return tls.getpeercert(binary_form=True) == ssl.PEM_cert_to_DER_cert(identity.certificate.read_text())


@pytest.mark.parametrize("role", ROLES)
def test_each_secret_has_its_rights_and_sighup_reads_them_and_the_certificate_again(tmp_path: Path, role: str) -> None:
    writes = bool(ROLES[role])
    with Daemon(tmp_path, "master", "--stream=orders", f"--listen={LOCAL}", f"--http={LOCAL}") as master:
        edge = Edge(tmp_path, master, ROLES[role])
        edge.configure('read = ["orders"]')
        with Daemon(tmp_path, "worker", "--config=edge.toml", name="edge") as worker:
            http = worker.address("HTTP")

            def second(path: str, body: bytes | None = None) -> int:
                return edge.status(http, "second", path, body)

            # A relay closes connections from before it has compared the history of the writer.
            until(lambda: edge.follows(http), "the stream that it may read is there")
            assert edge.status(http, "wrong", "/v1/streams/orders") == 401
            assert (second("/v1/streams/caches"), second("/v1/followers")) == (403, 403)
            assert edge.status(http, "first", "/v1/streams/caches") == 200
            fact = b'{"rows": [["n1"]]}'
            if writes:
                assert second("/v1/streams/notes/facts", fact) == 403
                assert edge.status(http, "first", "/v1/streams/notes/facts", fact) == 200
            with Peer(worker.address("the wire")) as peer:
                peer.read_until("SERVER")
                edge.configure('read = ["*"]', 'append = ["notes"]', "admin = true")
                renewed = edge.authority.issue("renewed", "127.0.0.1", valid=(-DAY, 30 * DAY))
                edge.identity.key.write_bytes(renewed.key.read_bytes())
                edge.identity.certificate.write_bytes(renewed.certificate.read_bytes())
                os.kill(worker.pid, signal.SIGHUP)
                until(lambda: second("/v1/streams/caches") == 200, "the new rights count")
                assert second("/v1/followers") == 200
                assert edge.shows(http, renewed)
                if writes:
                    assert second("/v1/streams/notes/facts", fact) == 200
                edge.configure()
                os.kill(worker.pid, signal.SIGHUP)
                until(lambda: second("/v1/streams/orders") == 401, "a secret that is gone is refused")
                peer.send(b"REPLICATE\n")
                peer.read_until("POSITION notes" if writes else "POSITION orders")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("key", ["listen", "http"])
def test_a_socket_that_other_hosts_reach_needs_insecure(tmp_path: Path, role: str, key: str) -> None:
    sockets = {"listen": f'["{LOCAL}"]', "http": f'"{LOCAL}"'} | {key: '"tcp:0"' if key == "http" else '["tcp:0"]'}
    keys = [f"{name} = {value}" for name, value in sockets.items()]
    (tmp_path / "edge.toml").write_text("\n".join(['connect = ["tcp:127.0.0.1:1"]', *keys, ROLES[role]]))
    with Daemon(tmp_path, "worker", "--config=edge.toml") as refused:
        until(lambda: refused.ended, "the worker ends")
        assert f"cannot listen on tcp:0 ({key}): it is open to other hosts without" in refused.log
    with Daemon(tmp_path, "worker", "--config=edge.toml", "--insecure") as allowed:
        allowed.address("HTTP")
        until(lambda: f"tcp:0 ({key}) is open to other hosts without" in allowed.log, "the log names the open socket")
