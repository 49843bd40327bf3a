"""Mistakes between processes, planted with real ones and found."""

from __future__ import annotations

import json
import socket
import ssl
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import product
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from replication import config
from replication.cli import peer_checks, tls_checks
from replication.cli.main import main
from replication.cli.peer_checks import check_endpoint, check_process, check_wire, check_writers
from replication.urls import Url
from replication.web.blocking_client import HttpClient
from tests.answering import answering
from tests.certificates import DAY, Authority, Identity
from tests.system.daemons import LOCAL, Daemon, append, get_json, until
from tests.system.test_skips import APP, command, follow, order, writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.postgres import PostgresServer

CLIENT_AUTH = ExtendedKeyUsageOID.CLIENT_AUTH
HTTP = "--http=tcp:0:interface=127.0.0.1"


@pytest.fixture(autouse=True)
def look_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_checks, "LOOK_AGAIN", 0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the daemons."""
    return tmp_path_factory.mktemp("daemons")


@pytest.fixture(scope="module")
def master(folder: Path) -> Iterator[Daemon]:
    """Start a master that requires a secret."""
    (folder / "secret").write_text("xyz")
    (folder / "secret").chmod(0o600)
    with Daemon(folder, "master", "--stream=orders", "--secret-file=secret", *LOCAL) as daemon:
        daemon.address("HTTP")
        yield daemon


def wire(endpoint: str, server_name: str = "localhost") -> list[str]:
    return [str(each) for each in check_wire(Url(endpoint), server_name, None)]


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9092", "tpc:127.0.0.1:9092", "tcp:[::1]:9092", "tcp:db1"])
def test_what_is_no_endpoint_is_found(endpoint: str) -> None:
    """Nothing was found, so the writer seemed to be right."""
    (found,) = check_endpoint(Url(endpoint))
    assert str(found).startswith(f"{endpoint}: this is no endpoint; cure: write tcp:HOST:PORT")
    for other in ("unix:/run/wire", "redis://127.0.0.1:6379", r"tcp:\:\:1:9092", "tls:db1:9092"):
        assert [*check_endpoint(Url(other))] == []


def test_a_writer_that_can_be_followed_is_no_finding(master: Daemon) -> None:
    assert wire(f"tcp:{master.address('the wire')}") == []


def test_a_unix_socket_is_checked_like_a_port(tmp_path: Path) -> None:
    """Nothing was found, also where no process listened."""
    place = f"unix:{tmp_path / 'wire'}"
    assert wire(place) == [
        f"{place}: cannot connect: No such file or directory; cure: start the writer, or correct connect"
    ]
    with Daemon(tmp_path, "master", f"--listen=unix:{tmp_path / 'wire'}", LOCAL[1]) as master:
        master.address("HTTP")
        assert wire(place) == []
        assert "its server name is 'localhost', not 'other'" in wire(f"unix:path={tmp_path / 'wire'}", "other")[0]


def test_a_closed_port_is_found() -> None:
    assert "cannot connect: Connection refused; cure: start the writer" in wire("tcp:127.0.0.1:1")[0]


def test_an_http_port_and_a_silent_one_are_found(master: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_checks, "PATIENCE", 0.5)
    (found,) = wire(f"tcp:{master.address('HTTP')}")
    assert "no SERVER line arrives; cure: name a writer's --listen port, not --http; or tls: for TLS" in found


def test_another_server_name_is_found(master: Daemon) -> None:
    (found,) = wire(f"tcp:{master.address('the wire')}", "example.com")
    assert "its server name is 'localhost', not 'example.com'" in found


@contextmanager
def listening(greeting: bytes, identity: Identity | None = None, pause: float | None = None) -> Iterator[int]:
    """Serve one greeting to each connection, with TLS if there is an identity; with ``pause`` more, again and again."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with suppress(OSError), closing(connection):
                        if identity is None:
                            connection.sendall(greeting)
                            while pause is not None:
                                time.sleep(pause)
                                connection.sendall(b"x")
                            continue
                        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                        context.load_cert_chain(identity.certificate, identity.key)
                        with context.wrap_socket(connection, server_side=True) as secured:
                            secured.sendall(greeting)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_another_program_is_found() -> None:
    for greeting, found in ((b"220 mail\r\n", "it sends '220 mail', which is no SERVER line"), (b"", "it closes the")):
        with listening(greeting) as port:
            assert found in wire(f"tcp:127.0.0.1:{port}")[0]


def test_a_program_that_sends_byte_after_byte_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte began the wait for the next one: the doctor did not end for an hour."""
    monkeypatch.setattr(tls_checks, "PATIENCE", 0.3)
    with listening(b"x", pause=0.02) as port:
        assert "no SERVER line arrives" in wire(f"tcp:127.0.0.1:{port}")[0]


@pytest.mark.parametrize("headers", [b"X: ", b"\r\n", b"Content-Length: 99999\r\n\r\n"])
def test_an_answer_of_http_that_never_ends_is_found(
    headers: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each byte of it began the wait for the next one: the doctor did not end."""
    monkeypatch.setattr(peer_checks, "WHOLE", 0.3)
    with listening(b"HTTP/1.1 200 OK\r\n" + headers, pause=0.02) as port:
        assert main(["doctor", "--http", f"http://127.0.0.1:{port}"]) == 1
    assert f"http://127.0.0.1:{port} did not answer in time: the process there hangs" in capsys.readouterr().out


def test_certificates_of_a_writer_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    good = authority.issue("good", "127.0.0.1", valid=(-DAY, 20 * DAY))
    for identity, found, cure in (
        (good, None, ""),
        (
            authority.issue("soon", "127.0.0.1", valid=(-DAY, 3 * DAY)),
            "its certificate expires in 3.0 days",
            "renew it there",
        ),
        (authority.issue("old", "127.0.0.1", valid=(-2 * DAY, -DAY)), "certificate has expired", "renew it there, and"),
        (authority.issue("young", "127.0.0.1", valid=(DAY, 2 * DAY)), "certificate is not yet valid", "set the clocks"),
        (
            authority.issue("host", "db1.example", "10.0.0.1"),
            "IP address mismatch",
            "connect to a name that it has (db1.example, 10.0.0.1), or renew it there with the name 127.0.0.1",
        ),
        # Python 3.13 refuses the empty list of names itself.
        (
            authority.issue("none"),
            "its certificate is refused",
            ("connect to a name that it has, or", "issue one without"),
        ),
        (authority.issue("client", "127.0.0.1", purpose=CLIENT_AUTH), "purpose", "issue one for servers there, as"),
        (
            Authority(tmp_path, "stranger").issue("strange", "127.0.0.1"),
            "its certificate is refused",
            "SSL_CERT_FILE names the certificates to trust; the authority of this one must be among them",
        ),
    ):
        with listening(b"SERVER localhost\n", identity) as port:
            lines = wire(f"tls:127.0.0.1:{port}")
            assert (not lines) if found is None else (found in lines[0]), lines
            assert not lines or lines[0].partition("; cure: ")[2].startswith(cure), lines
    with listening(b"SERVER localhost\n") as port:
        assert "TLS fails" in wire(f"tls:127.0.0.1:{port}")[0]


def doctor(folder: Path, *words: str) -> tuple[int, str]:
    done = command(folder, "doctor", *words)
    return done.returncode, done.stdout


def worker_file(folder: Path, master: Daemon, http: str = "", **keys: str) -> str:
    lines = [f'{key} = "{value}"' for key, value in keys.items()]
    writer = f'connect = "tcp:{master.address("the wire")}"\nhttp = "{http or "http://" + master.address("HTTP")}"'
    (folder / "worker.toml").write_text("\n".join([*lines, "[writers.master]", writer, ""]))
    return "--config=worker.toml"


def test_what_a_worker_would_not_find_at_its_writer_is_found(folder: Path, master: Daemon) -> None:
    assert doctor(folder, worker_file(folder, master, secret_file="secret", stream="orders")) == (0, "")
    (folder / "other").write_text("abc")
    (folder / "other").chmod(0o600)
    for found, options in (
        ("stream oders: no writer has it; cure: correct stream; did you mean orders?", {"stream": "oders"}),
        ("a wrong secret", {"secret_file": "other"}),
        ("is a wire port, not HTTP", {"http": f"http://{master.address('the wire')}"}),
        ("start the process, or correct the URL", {"http": "http://127.0.0.1:1"}),
    ):
        status, output = doctor(folder, worker_file(folder, master, **{"secret_file": "secret", **options}))
        lines = 2 if "instance_name" in options else 1  # its own table [writers.NAME] is no writer to connect to
        assert (status, found in output, output.count("\n")) == (1, True, lines), output


def test_a_worker_with_the_name_of_its_writer_is_found(folder: Path, master: Daemon) -> None:
    file = worker_file(folder, master, instance_name="master", secret_file="secret")
    (folder / "worker.toml").write_text((folder / "worker.toml").read_text().replace("writers.master", "writers.other"))
    status, output = doctor(folder, file)
    assert (status, "this writer has the instance name of this worker, 'master'" in output) == (1, True), output


def test_the_table_of_a_worker_itself_is_no_writer_to_follow(folder: Path, master: Daemon) -> None:
    """One file may serve all processes.  Its own address was called a writer that does not run, or an equal name."""
    file = worker_file(folder, master, secret_file="secret", instance_name="w1")
    with (folder / "worker.toml").open("a") as tables:
        tables.write('[writers.w1]\nconnect = "tcp:127.0.0.1:1"\nhttp = "http://127.0.0.1:1"\n')
    assert doctor(folder, file) == (0, "")


def test_a_process_that_answers_503_names_the_cure_itself() -> None:
    """It is there, so "start the process" would contradict its answer."""
    body = json.dumps({"error": "Service Unavailable", "detail": "has lost commits of this process: restart it"})
    with (
        answering(lambda _path, _authorization: (503, body.encode())) as url,
        closing(HttpClient(url)) as client,
    ):
        [finding] = check_process(client)
    assert (finding.what.endswith("restart it"), finding.cure) == (True, "do what the answer names")


@pytest.mark.parametrize("body", ["null", '"OK"', "[]", '{"name": "x", "version": {}}', '{"streams": [{"name": 1}]}'])
def test_another_program_with_json_is_found(body: str) -> None:
    """It was a traceback."""
    with (
        answering(lambda _path, _authorization: (200, body.encode())) as url,
        closing(HttpClient(url)) as client,
    ):
        [finding] = check_process(client)
    assert "answers other JSON than a replication daemon" in finding.what
    assert finding.cure.startswith("correct the URL")


def test_a_dead_url_of_catch_up_is_found(folder: Path, master: Daemon) -> None:
    wire, http = f"tcp:{master.address('the wire')}", f"http://{master.address('HTTP')}"
    for url, found in (
        (http, ""),
        ("http://127.0.0.1:1", "cannot reach http://127.0.0.1:1"),
        (f"http://{wire[4:]}", "is a wire port"),
    ):
        (folder / "worker.toml").write_text(f'connect = "{wire}"\ncatch_up = "{url}"\nsecret_file = "secret"\n')
        status, output = doctor(folder, "--config=worker.toml")
        assert (status, found in output, output.count("\n")) == (bool(found), True, bool(found)), output


def test_a_writer_that_is_elsewhere_is_found(folder: Path, master: Daemon) -> None:
    file = worker_file(folder, master, secret_file="secret")
    text = (folder / "worker.toml").read_text()
    (folder / "worker.toml").write_text(text + text[text.index("[writers") :].replace(".master]", ".w2]"))
    status, output = doctor(folder, file)
    found = f"writers.w2: the process at http://{master.address('HTTP')} is 'master', and sends no facts of 'w2'"
    assert (status, output) == (1, f"{found}; cure: give the address of w2, or of a relay that follows it\n")


def test_rights_at_a_relay_to_a_stream_that_no_writer_has_are_found(folder: Path, master: Daemon) -> None:
    (folder / "shop").write_text("abc")
    (folder / "shop").chmod(0o600)
    worker_file(folder, master, secret_file="secret", http_="unix:http", listen="unix:wire")
    file = folder / "worker.toml"
    table = '[access.shop]\nsecret_file = "shop"\nread = ["orders", "oders"]\n'
    file.write_text(file.read_text().replace("http_ =", "http =") + table)
    status, output = doctor(folder, "--config=worker.toml")
    found = "access.shop: no writer has a stream 'oders'; cure: correct read; did you mean orders?"
    assert (status, output) == (1, f"{found}\n")


def test_two_processes_with_one_name_are_found(folder: Path, master: Daemon) -> None:
    host, port = master.address("the wire").split(":")
    url = (f"--http=http://{master.address('HTTP')}", "--secret-file=secret")
    with ExitStack() as stack:
        for _ in range(2):
            twin = stack.enter_context(closing(socket.create_connection((host, int(port)))))
            twin.sendall(b"NAME twin\nREPLICATE\n")
            twin.recv(10)
        until(lambda: "2 connections have the instance name 'twin'" in doctor(folder, *url)[1], "both are known")
    until(lambda: doctor(folder, *url) == (0, ""), "both are gone")


def test_two_connections_to_writers_are_no_processes_with_one_name(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        port = master.address("the wire").rpartition(":")[2]
        both = f"--connect=tcp:127.0.0.1:{port}", f"--connect=tcp:localhost:{port}"
        with Daemon(tmp_path, "worker", *both, f"--catch-up=http://{master.address('HTTP')}", HTTP) as worker:
            url = f"http://{worker.address('HTTP')}"
            until(lambda: len(get_json(url, "/v1/connections")["connections"]) == 2, "both are connected")
            until(lambda: doctor(tmp_path, f"--http={url}") == (0, ""), "nothing is found", 20.0)


def test_a_stopped_stream_and_skipped_facts_are_found(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    with (
        Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master,
        Daemon(tmp_path, "worker", *follow(master), "--app=shop", HTTP) as worker,
    ):
        append(master.address("HTTP"), "orders", [order(bad=True)])
        url = f"--http=http://{worker.address('HTTP')}"
        until(lambda: writer_of(worker.address("HTTP")).get("failed") == 2, "it fails")
        status, output = doctor(tmp_path, url)
        assert (status, output.count("\n")) == (1, 2)
        assert "it is not ready: stream orders of master is stopped" in output
        assert "its function cannot take fact 2: applying orders of master after" in output
        assert f"or replication skip orders master 2 {url.replace('=', ' ')}" in output
        assert command(tmp_path, "skip", "orders", "master", "2", url).returncode == 0
        until(lambda: doctor(tmp_path, url)[1].count("\n") == 1, "one finding is left")
        assert "facts that were skipped: 1; cure: `replication skipped --http" in doctor(tmp_path, url)[1]


def test_a_function_for_a_stream_that_no_writer_has_is_found(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.replace('on("orders")', 'on("oders")'))
    with (
        Daemon(tmp_path, "master", "--stream=orders", "--stream=quiet", *LOCAL) as master,
        Daemon(tmp_path, "worker", *follow(master), "--app=shop", HTTP) as worker,
    ):
        url = f"http://{worker.address('HTTP')}"
        what = "no writer has sent a position of it since the start, so no fact of it arrives"
        cure = "correct the name in @worker.on, or in stream; did you mean orders?"
        found = f"stream oders: {what}; cure: {cure}\n"
        until(lambda: doctor(tmp_path, f"--http={url}") == (1, found), "it is found", 20.0)
        master.kill()
        until(lambda: "no connection to the writer" in doctor(tmp_path, f"--http={url}")[1], "it is away", 20.0)
        assert "oders: no writer" not in doctor(tmp_path, f"--http={url}")[1], "one that is away may have it"


class Answers(BaseHTTPRequestHandler):
    """Answers as a worker that lags, and whose clock is an hour late."""

    error: str | None = None  # of the stream
    not_ready = ""
    writers: Sequence[Mapping[str, Any]] | None = None
    hidden = 0
    held = "stream 'orders': facts up to 9 are kept for follower late1"

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the header Date."""
        return super().date_time_string(time.time() - 3600)

    def do_GET(self) -> None:
        """Answer any call."""
        writer = {"instance": "master", "position": 2, "lag": 5000, "state": "live", "error": self.error}
        notes = ["an index is missing", self.held]
        answer: dict[str, Any] = {
            "role": "worker",
            "server_name": "localhost",
            "instance_name": "worker1",
            "status": "ok",
            "streams": [
                {
                    "name": "orders",
                    "writers": [writer] if self.writers is None else self.writers,
                    "open": 0,
                    "oldest_open": None,
                    "notes": notes,
                }
            ],
            "hidden": self.hidden,
            "connections": [],
        }
        fails = self.path == "/health/ready" and self.not_ready
        body = json.dumps({"detail": self.not_ready} if fails else answer).encode()
        self.send_response(503 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the standard library
        """Log nothing."""


def ask(**attributes: object) -> list[str]:
    """Return the findings at a process that answers so."""
    with HTTPServer(("127.0.0.1", 0), type("Given", (Answers,), attributes)) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with closing(HttpClient(f"http://127.0.0.1:{server.server_port}")) as client:
            found = [str(each) for each in check_process(client)]
        server.shutdown()
        thread.join(10)
    return found


def test_streams_that_rights_hide_are_found() -> None:
    words = "hide 2 streams, which were not checked; cure: use a secret or certificate with the right `admin`"
    assert [sum(words in each for each in ask(hidden=hidden)) for hidden in (0, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (
            "m went back: register a function with @worker.on_reset('orders'), or start once with --accept-new-history",
            "do what the error names, and restart the worker",
        ),
        (
            "m has another history: start once with --accept-new-history",
            "do what the error names; if you change an option",
        ),
        ("facts up to 9 are deleted: give a source, or --skip-gone", "do what the error names, and restart the worker"),
        ("applying orders of m after 7: NameError: x", "if the function is wrong, correct it and restart the worker"),
        ("the disk is full", "correct what the error names; the stream then goes on without a restart"),
    ],
)
def test_the_cure_of_a_stopped_stream_names_the_restart_that_is_needed(error: str, cure: str) -> None:
    found = ask(error=error)
    (stopped,) = [each for each in found if "it is stopped" in each]
    assert f"; cure: {cure}" in stopped
    assert not [each for each in found if "it lags" in each], "it lags because it is stopped"


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("stream orders of m is stopped", "that of the finding of each stopped stream"),
        ("no connection to the writer at tcp:h:1", "start the writer, or correct connect"),
        ("the store has not answered for 5 s", "correct what it names"),
    ],
)
def test_the_cure_of_a_process_that_is_not_ready_names_no_file(why: str, cure: str) -> None:
    (found,) = [each for each in ask(not_ready=why) if "it is not ready" in each]
    assert found.endswith(f"it is not ready: {why}; cure: {cure}")


@pytest.mark.parametrize(
    ("why", "found"),
    [
        ("stream quiet of m is stopped", True),
        ("the store has not answered for 5 s", True),
        ("stream quiet of m is stopped; no connection to the writer at tcp:h:1", False),
        ("m sends no facts: correct the address in [writers.m]", False),
    ],
)
def test_a_name_that_no_writer_has_is_found_beside_a_stopped_stream(why: str, *, found: bool) -> None:
    """A stopped stream hid it; only a writer that is away may have such a stream."""
    assert any("stream orders: no writer has sent" in each for each in ask(not_ready=why, writers=())) == found


def test_a_wrong_clock_and_a_lag_that_does_not_fall_are_found() -> None:
    found = ask()
    assert "its clock differs from this machine's by -3600 s" in found[0].replace("-3601", "-3600")
    assert found[1] == "stream orders: an index is missing; cure: do as the message advises"
    assert "start these followers, or forget one: curl -X DELETE http://127.0.0.1:" in found[2]
    assert "it lags by 5000 IDs, and the lag does not fall" in found[3]


def test_without_a_process_the_default_url_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--http", "http://127.0.0.1:1"]) == 1
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().out
    assert main(["doctor", "--connect", "tcp:127.0.0.1:1"]) == 1


def test_a_frozen_process_is_named_after_a_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system accepts connections for it, as after SIGSTOP; the doctor waited 60 s for its HTTP."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tls_checks, "PATIENCE", 0.3)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as wire,
        closing(socket.create_server(("127.0.0.1", 0))) as web,
    ):
        endpoint, url = (f"127.0.0.1:{each.getsockname()[1]}" for each in (wire, web))
        (tmp_path / "x.toml").write_text(f'[writers.master]\nconnect = "tcp:{endpoint}"\nhttp = "http://{url}"\n')
        assert main(["doctor", "--config", "x.toml", "--http", f"http://{url}", "--min-free", "1"]) == 1
        found = capsys.readouterr().out.splitlines()
    assert found[0].startswith(f"tcp:{endpoint}: no SERVER line arrives; cure: name a writer's --listen port")
    assert found[0].endswith("; or restart that process, if it hangs")
    why = f"http://{url} did not answer in time: the process there hangs or is suspended, or the network drops"
    cure = "cure: restart the process if it hangs; else correct the URL"
    assert [(why in each, cure in each) for each in found[1:]] == [(True, True)] * 2, found


def test_a_writer_without_a_source_of_missed_facts_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its HTTP is known by tcp: only; the worker follows until it has missed something, and stops then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments/manifest.json").write_text('{"version": 1, "segments": []}')
    what = "unix:x: no HTTP is known for {}: the worker cannot fetch facts that it has missed"
    cure = "; cure: give catch_up, or http in [writers.{}]"
    closed = "unix:x: cannot connect: No such file or directory; cure: start the writer, or correct connect"
    unreachable = (
        "http://127.0.0.1:1: cannot reach http://127.0.0.1:1: Connection refused; is the daemon running there?; "
        "cure: start the process, or correct the URL"
    )
    for text, found in (
        ('connect = "unix:x"', [what.format("the writers at unix:x") + cure.format("NAME")]),
        ('[writers.shop]\nconnect = "unix:x"', [what.format("the writer 'shop'") + cure.format("shop")]),
        ('connect = "unix:x"\ncatch_up = "segments"', []),
        ('connect = "unix:x"\n[writers.shop]\nhttp = "http://127.0.0.1:1"', [unreachable]),
    ):
        (tmp_path / "x.toml").write_text(text + "\n")
        main(["doctor", "--config", "x.toml", "--min-free", "1"])
        assert sorted(capsys.readouterr().out.splitlines()) == sorted([closed, *found])


def writers_of(folder: Path, *lines: str) -> list[str]:
    (folder / "worker.toml").write_text("\n".join(lines))
    return [str(each) for each in check_writers(config.load("worker", str(folder / "worker.toml")), None)]


def test_a_redis_without_a_source_of_missed_facts_is_found(tmp_path: Path) -> None:
    """The worker then stops at 0: a Redis keeps no fact."""
    place = "redis://127.0.0.1:1"
    (found,) = writers_of(tmp_path, f'connect = "{place}"')
    assert found == (
        f"{place}: no HTTP is known for the writers at {place}: the worker cannot fetch facts that it has missed; "
        "cure: give the URL of Synapse's database in catch_up, or http in [writers.NAME]"
    )
    assert writers_of(tmp_path, f'connect = "{place}"', f'catch_up = "{tmp_path}"') == []
    with answering(lambda *_: (200, b'{"upto_token": 0, "updates": [], "limited": false}')) as url:
        assert writers_of(tmp_path, f'connect = "{place}"', f'[writers.typist]\nhttp = "{url}"') == []


SYNAPSE = "/_synapse/replication/get_repl_stream_updates/events/"


def test_the_http_of_a_process_of_a_synapse_is_no_finding(tmp_path: Path) -> None:
    """It was "answers without JSON; is that a replication daemon?", and the page about Synapse demands that URL."""

    def answer(path: str, secret: str | None) -> tuple[int, bytes]:
        if path == "/health":
            return 200, b"OK"
        if not path.startswith(SYNAPSE):
            return 404, b"<html>No Such Resource</html>"
        if secret != "Bearer xyz":
            return 500, b'{"errcode": "M_UNKNOWN", "error": "Internal server error"}'
        return 200, b'{"upto_token": 0, "updates": [], "limited": false}'

    (tmp_path / "secret").write_text("xyz")
    lines = 'connect = "redis://127.0.0.1:1"', f'catch_up = "{tmp_path}"'
    with answering(answer) as url:
        writers = f'[writers.persister1]\nhttp = "{url}"'
        assert writers_of(tmp_path, *lines, f'secret_file = "{tmp_path}/secret"', writers) == []
        (found,) = writers_of(tmp_path, *lines, writers)
    assert found == (
        f"{url}: {url} is a Synapse's, and answers 500: a missing or wrong secret, or an error there; "
        "cure: name the file with its worker_replication_secret in secret_file"
    )


def test_the_http_of_a_synapse_without_the_resource_replication_is_found(tmp_path: Path) -> None:
    lines = 'connect = "redis://127.0.0.1:1"', f'catch_up = "{tmp_path}"'
    with answering(lambda *_: (404, b'{"errcode": "M_UNRECOGNIZED", "error": "Unrecognized request"}')) as url:
        (found,) = writers_of(tmp_path, *lines, f'[writers.persister1]\nhttp = "{url}"')
    assert found.endswith("cure: give the URL of a listener of that process with the resource replication")


SHARED = """
[[streams]]
name = "orders"
writers = ["north", "south"]
"""


def test_writers_of_one_database_that_are_exchanged_or_not_followed_are_found(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    (tmp_path / "writer.toml").write_text(SHARED)
    with postgres.database() as name, ExitStack() as stack:
        database, places, urls = f"--database={postgres.url(name)}", {}, []
        for each in ("north", "south"):
            options = ("--config=writer.toml", f"--instance-name={each}", database, "--stream=users", *LOCAL)
            daemon = stack.enter_context(Daemon(tmp_path, "master", *options))
            urls.append(f"http://{daemon.address('HTTP')}")
            places[each] = f'connect = "tcp:{daemon.address("the wire")}"\nhttp = "{urls[-1]}"\n'
        append(daemon.address("HTTP"), "orders", [order()])  # both then store a position

        def shows_both(url: str, stream: str) -> bool:
            return len(get_json(url, f"/v1/streams/{stream}")["writers"]) == 2

        for url, stream in product(urls, ("orders", "users")):
            until(partial(shows_both, url, stream), "each shows the other one")

        def findings(*writers: tuple[str, str], keys: str = "") -> list[str]:
            tables = [f"[writers.{each}]\n{places[place]}" for each, place in writers]
            (tmp_path / "worker.toml").write_text("\n".join([keys, *tables]))
            return doctor(tmp_path, "--config=worker.toml")[1].splitlines()

        assert findings(("north", "north"), ("south", "south")) == []
        exchanged = findings(("north", "south"), ("south", "north"))
        assert [each.partition(":")[0] for each in exchanged] == ["writers.north", "writers.south"]
        assert "is 'south', and sends no facts of 'north'; cure: give the address of north" in exchanged[0]
        for keys, streams in (("", "orders, users"), ('stream = "orders"', "orders"), ('stream = "caches"', None)):
            alone = findings(("north", "north"), keys=keys)
            expected = (
                f"writer south: it also writes {streams}, and is not followed: its facts do not arrive; cure: add"
            )
            assert [each.startswith(f"{expected} a table [writers.south]") for each in alone] == [True] * bool(streams)
        assert findings(("north", "north"), keys='instance_name = "south"') == [], "a worker does not follow itself"


@pytest.mark.parametrize(
    ("states", "found"),
    [
        (("writing", "elsewhere"), False),
        (("writing", "former", "live"), False),
        (("writing", "live", "elsewhere"), True),
        (("stopped", "catching up", "elsewhere"), True),
    ],
)
def test_a_worker_that_writes_and_follows_only_some_of_the_others_is_found(
    states: tuple[str, ...], *, found: bool
) -> None:
    extra = [
        {"instance": f"w{n}", "position": 2, "lag": 0, "state": each, "error": None} for n, each in enumerate(states)
    ]
    lines = [each for each in ask(writers=extra) if "is not followed" in each]
    assert [each.partition(":")[0] for each in lines] == ["writer w2"] * found
