"""The nginx configuration of docs/http.md, Behind a proxy: lines, a worker's catch-up and errors pass through it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pytest

from replication.bench.cluster import free_ports
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.docs.pages import blocks, page
from tests.system.daemons import LOCAL, PATIENCE, Daemon, append, get_json, until
from tests.system.test_kills import has, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
PAGE = page("http.md")
BLOCK = next(each.body for each in blocks(PAGE) if each.language == "nginx")
GONE = next(each.body for each in blocks(PAGE) if each.language == "json" and '"Gone"' in each.body)
APPEND, UPDATES = "/v1/streams/orders/append", "/v1/streams/orders/updates"
POSITION = "SELECT stream_id FROM stream_positions WHERE stream_name = 'orders'"
PARTS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # of which nginx keeps temporary files


@pytest.fixture(autouse=True)
def nginx() -> None:
    """Need nginx; on CI a missing one is a failure."""
    if NGINX is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("nginx is missing: install Debian's package nginx")


@contextmanager
def proxy(folder: Path, block: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run nginx with a block in a file that its block ``http`` includes."""
    (folder / "conf.d").mkdir()
    (folder / "conf.d/replication.conf").write_text(block)
    temporary = "\n".join(f"{part}_temp_path {folder}/{part};" for part in PARTS)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; events {{}}\n"
        f"http {{ access_log {folder}/access.log; {temporary}\ninclude {folder}/conf.d/*.conf; }}\n"
    )
    with (folder / "nginx.log").open("wb") as log:
        command = [str(NGINX), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(PATIENCE)


@contextmanager
def behind_proxy(folder: Path, *options: str) -> Iterator[tuple[Daemon, str]]:
    """Run a master behind the proxy of the page, and yield it and the proxy's address."""
    with Daemon(folder, "master", *LOCAL, "--stream=orders", *options) as master:
        (port,) = free_ports(1)
        address, http = f"127.0.0.1:{port}", master.address("HTTP")
        block = BLOCK.replace("listen 8080", f"listen {address}").replace("127.0.0.1:9093", http)
        assert {address, f"http://{http}"} <= {*block.replace(";", " ").split()}
        with proxy(folder, block):
            until(partial(answers, address), "nginx answers")
            yield master, address


def request(address: str, method: str, path: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    connection = HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def answers(address: str) -> bool:
    """Whether the master answers through the proxy."""
    try:
        return request(address, "GET", "/health/live")[0] == 200
    except OSError:
        return False


def test_lines_are_answered_while_they_are_sent_and_a_worker_catches_up_through_the_proxy(tmp_path: Path) -> None:
    with behind_proxy(tmp_path) as (master, address):
        sending = HTTPConnection(address, timeout=PATIENCE)
        sending.putrequest("POST", APPEND)
        sending.putheader("Content-Type", "application/x-ndjson")
        sending.putheader("Transfer-Encoding", "chunked")
        sending.endheaders()
        line = b'{"rows": [["o1"]]}\n'
        sending.send(b"%x\r\n%s\r\n" % (len(line), line))
        answer: Any = sending.response_class(sending.sock, method="POST")
        answer.begin()
        assert (answer.status, json.loads(answer.readline())) == (200, [2]), "the body has not ended"
        sending.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(line), line))
        assert json.loads(answer.readline()) == [3]
        sending.close()
        assert append(address, "orders", [Fact(Token(0), ('"o2"',))]) == [4]
        status, body = request(address, "GET", APPEND)
        assert (status, request(master.address("HTTP"), "GET", APPEND)) == (405, (405, body))

        follow = (f"--connect=tcp:{master.address('the wire')}", f"--catch-up=http://{address}")
        with Daemon(tmp_path, "worker", "--instance-name=w1", *follow, name="w1"):
            file = tmp_path / "replication-w1.db"
            until(partial(has, file, POSITION, [(4,)]), "the worker has the position")
            assert len(table(file, "orders")) == 3
            until(lambda: get_json(f"http://{address}", "/v1/followers")["followers"], "the worker reports")
        requests = (tmp_path / "access.log").read_text()
        assert f"GET {UPDATES}?instance=master&from=0" in requests
        assert "PUT /v1/followers/w1 " in requests


def test_the_answer_410_of_the_page_is_that_of_a_master_behind_the_proxy(tmp_path: Path) -> None:
    with behind_proxy(tmp_path, "--retention=1s") as (_, address):
        assert append(address, "orders", [Fact(Token(0), ('"o1"',)), Fact(Token(0), ('"o2"',))]) == [2, 3]
        since = partial(request, address, "GET", f"{UPDATES}?since=0")
        until(lambda: since()[0] != 200, "the facts are deleted")
        assert since() == (410, GONE.strip().encode())
        status, body = request(address, "GET", f"{UPDATES}?since={json.loads(GONE)['since']}")
        assert (status, json.loads(body)["updates"]) == (200, [])


def test_the_location_alone_is_refused_where_the_server_block_stands(tmp_path: Path) -> None:
    location = BLOCK[BLOCK.index("location") : BLOCK.rindex("}")]
    with proxy(tmp_path, location) as refused:
        assert refused.wait(PATIENCE) != 0
    message = '"location" directive is not allowed here'
    assert message in (tmp_path / "error.log").read_text()
    assert message in PAGE
