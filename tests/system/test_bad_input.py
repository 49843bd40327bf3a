"""Bad input over real sockets to real processes: an answer with the reason, and no effect on other connections."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import Daemon, run_command, until
from tests.system.peers import Peer, ask, listen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = {"Authorization": "Bearer open sesame"}
JSON = {"Content-Type": "application/json"}
LINE_LIMIT = 16_384
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(256))


class Cluster:
    """A master, and two peers that send valid lines, which must receive all facts."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        (folder / "secret").write_text("open sesame\n")
        (folder / "master.toml").write_text("ping_after = 0.2\ngive_up_after = 3600.0\n")
        self.master = stack.enter_context(
            Daemon(
                folder,
                "master",
                "--config=master.toml",
                "--stream=orders",
                "--secret-file=secret",
                "--listen=tcp:0:interface=127.0.0.1",
                "--http=tcp:0:interface=127.0.0.1",
            )
        )
        self.wire, self.http = self.master.address("the wire"), f"http://{self.master.address('HTTP')}"
        self.bystanders = [stack.enter_context(Peer(self.wire)) for _ in range(2)]
        for number, peer in enumerate(self.bystanders):
            peer.send(b"NAME bystander%d\nPING 1\nREPLICATE\n" % number)
            peer.read_until("POSITION caches")

    def faults(self) -> dict[str, int]:
        """Return how many connections were closed, by what was wrong."""
        _, text = ask(f"{self.http}/metrics", headers=SECRET)
        found = re.findall(r'replication_faults_total\{kind="([^"]*)"\} ([0-9]+)', text)
        return {kind: int(count) for kind, count in found}

    def append(self, row: object = "fact", count: int = 1) -> int:
        """Append a fact of ``count`` equal rows, and return its ID."""
        rows = ",".join([f'"{row}"'] * count)
        body = f'{{"rows":[{rows}]}}'.encode()
        status, answer = ask(f"{self.http}/v1/streams/orders/facts", body, {**SECRET, **JSON})
        assert status == 200, answer
        return int(answer["ids"][0])

    def check(self) -> None:
        """Check that the daemon is up, and that the other connections receive facts and no ERROR."""
        token = self.append()
        for peer in self.bystanders:
            peer.send(b"PING 1\n")
            assert peer.read_until(f"RDATA orders master {token} ") == f'RDATA orders master {token} "fact"'
            assert not [line for line in peer.lines if line.startswith("ERROR")]
        assert ask(f"{self.http}/health")[0] == 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("master"))


WRONG = {
    "an unknown command": (b"FOO bar\n", "line 1: unknown command: 'FOO'", "unknown command"),
    "an unknown command with formats": (b"FOO 100% %s {0}\n", "in 'FOO 100% %s {0}'", "unknown command"),
    "a word in small letters": (b"PING 1\nping 1\n", "line 2: unknown command: 'ping'", "unknown command"),
    "a web browser": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "this is not an HTTP port", "unknown command"),
    "a TLS client": (CLIENT_HELLO, "line 1: the peer connects with TLS", "bad line"),
    "NUL": (b"\0\n", r"line 1: unknown command: '\x00'", "unknown command"),
    "a fact of a master": (b"RDATA orders master 3 []\n", "invalid command: RDATA", "wrong direction"),
    "a position of a master": (b"POSITION orders master 3 3\n", "invalid command: POSITION", "wrong direction"),
    "a name of a master": (b"SERVER localhost\n", "invalid command: SERVER", "wrong direction"),
    "too few fields": (b"USER_SYNC a b\n", "line 1: USER_SYNC takes", "bad line"),
    "a user with a device": (b"USER_SYNC a @u:h DEV start 1\n", "line 1: USER_SYNC takes", "bad line"),
    "a sync that neither starts nor ends": (b"USER_SYNC a @u:h stop 1\n", "line 1: USER_SYNC takes", "bad line"),
    "a time beyond 64 bits": (
        b'USER_IP @u:h ["","","",null,9223372036854775808]\n',
        "line 1: USER_IP takes",
        "bad line",
    ),
    "a command of newer releases": (b'LOCK_RELEASED ["a","b","c"]\n', "'LOCK_RELEASED'", "unknown command"),
    "a number with an underscore": (b"FEDERATION_ACK s 1_0\n", "not a plain integer", "bad line"),
    "a name with a control character": (b"REPLICATE orders a\x01b\n", "not a stream name", "bad line"),
    "invalid JSON": (b"USER_IP @u:h [1,2\n", "line 1: not JSON", "bad line"),
    "JSON that is deep": (b"USER_IP @u:h " + b"[" * 8_000 + b"\n", "line 1: not JSON", "bad line"),
    "bytes that are no text": (b"NAME \xff\n", "line 1: not UTF-8 at byte 6", "not UTF-8"),
    "half a character": (b"PING 1\nNAME \xe2\x82\n", "line 2: not UTF-8 at byte 6", "not UTF-8"),
    "a carriage return in a value": (b"REMOTE_SERVER_UP a\r\r\n", "REMOTE_SERVER_UP", "bad line"),
    "a line that is too long": (b"NAME " + b"x" * LINE_LIMIT + b"\n", "Line length exceeded: line 1", "line too long"),
    "one byte too many and no end": (b"x" * (LINE_LIMIT + 1), "Line length exceeded: line 1", "line too long"),
    "no end at all": (b"PING 1\n" + b"x" * 8_000_000, "Line length exceeded: line 2", "line too long"),
    "right lines after it": (b"FOO\n" + b"PING 1\n" * 200_000, "line 1: unknown command", "unknown command"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_answered_and_counted_and_disturbs_no_other_connection(cluster: Cluster, name: str) -> None:
    data, complaint, kind = WRONG[name]
    before = cluster.faults().get(kind, 0)
    with Peer(cluster.wire) as peer:
        peer.send(data)
        output = peer.read_to_the_end()
    assert output[-1].startswith("ERROR ")
    assert complaint in output[-1]
    assert [line.split(" ")[0] for line in output[:2]] == ["SERVER", "PING"]
    assert cluster.faults()[kind] == before + 1
    cluster.check()


def test_unusual_but_valid_lines_are_accepted(cluster: Cluster) -> None:
    """A byte at a time, a CR at the end, NUL in a text, a line of exactly the limit, a flood of blank lines."""
    faults = cluster.faults()
    with Peer(cluster.wire) as peer:
        for byte in b"NAME nc\r\n":
            peer.send(bytes([byte]))
        peer.send(b"NAME a\0b\nPING\n" + b"NAME " + b"x" * (LINE_LIMIT - 5) + b"\n")
        peer.send(b"\n" * 500_000 + b" \r\n" * 10_000)
        for byte in b"REPLICATE orders\n":
            peer.send(bytes([byte]))
        peer.read_until("POSITION orders master ")
        token = cluster.append("seen")
        peer.read_until(f"RDATA orders master {token} ")
        peer.send(b"FOO\n")
        assert "line 510006: unknown command" in peer.read_to_the_end()[-1]
    assert cluster.faults() == {**faults, "unknown command": faults.get("unknown command", 0) + 1}
    cluster.check()


def test_a_peer_that_disconnects_is_no_fault(cluster: Cluster) -> None:
    faults = cluster.faults()
    for reset in (False, True):
        with Peer(cluster.wire) as peer:
            peer.send(b"NAME half a li")
            peer.read_until("PING")
            peer.close(reset=reset)
    Peer(cluster.wire).close(reset=True)
    peers = [Peer(cluster.wire) for _ in range(50)]
    for peer in peers:
        peer.close()
    cluster.check()
    assert cluster.faults() == faults
    until(
        lambda: len(ask(f"{cluster.http}/v1/connections", headers=SECRET)[1]["connections"]) == len(cluster.bystanders),
        "only the bystanders are left",
    )


def test_a_flood_of_bad_peers_disturbs_no_other_connection(cluster: Cluster) -> None:
    """Some send nothing, some send garbage, and one sends commands without end and reads nothing."""
    with ExitStack() as stack:
        _silent, wrong = ([stack.enter_context(Peer(cluster.wire)) for _ in range(200)] for _ in range(2))
        for peer in wrong:
            peer.send(bytes(range(128, 256)) + b"\n")
        flooding = stack.enter_context(Peer(cluster.wire))
        flooding.socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                flooding.socket.send(b"REPLICATE\n" * 1_000)
        cluster.check()
        for peer in wrong:
            assert peer.read_to_the_end()[-1].startswith("ERROR line 1: not UTF-8")
        cluster.check()


def test_bystanders_are_pinged_throughout(cluster: Cluster) -> None:
    for peer in cluster.bystanders:
        peer.lines.clear()
        peer.read_until("PING ")
    cluster.check()


def test_http_refuses_with_the_right_status_and_a_reason(cluster: Cluster) -> None:
    updates, facts = "/v1/streams/orders/updates", "/v1/streams/orders/facts"
    ndjson = {"Content-Type": "application/x-ndjson"}
    before = cluster.append()
    cases: list[tuple[int, str, str, bytes | None, dict[str, str]]] = [
        (400, "instance", updates, None, {}),
        (400, "nonsense", f"{updates}?instance=master&from=0&upto=1&nonsense=1", None, {}),
        (400, "from", f"{updates}?instance=master&from=x&upto=1", None, {}),
        (400, "upto", f"{updates}?instance=master&from=2&upto=1", None, {}),
        (400, "limit", f"{updates}?instance=master&from=0&upto=1&limit=0", None, {}),
        (400, "not JSON", facts, b"{", JSON),
        (400, "not JSON", facts, b'{"rows":[NaN]}', JSON),
        (400, "rows", facts, b'{"row":[1]}', JSON),
        (400, "not UTF-8", facts, b'{"rows":["\xff"]}', JSON),
        (400, "line 2", facts, b'{"rows":[]}\n{"rows":1}\n', ndjson),
        (400, "not JSON", facts, b'{"rows":' + b"[" * 100_000, JSON),
        (404, "nothing", "/v1/nothing", None, {}),
        (404, "nowhere", "/v1/streams/nowhere/updates?instance=master&from=0&upto=1", None, {}),
        (404, "nowhere", "/v1/streams/nowhere/facts", b'{"rows":[]}', JSON),
        (405, "POST", facts, None, {}),
        (413, "send it in parts", facts, b"x" * (64 * 2**20 + 1), JSON),
        (415, "text/plain", facts, b'{"rows":[]}', {"Content-Type": "text/plain"}),
    ]
    for status, reason, path, body, headers in cases:
        got, answer = ask(cluster.http + path, body, {**SECRET, **headers})
        assert got == status, (path, answer)
        assert {"error", "detail"} <= set(answer) <= {"error", "detail", "lasting"}
        assert reason in answer["detail"]
    for shown in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic b3Blbg=="}):
        got, answer = ask(cluster.http + facts, b'{"rows":[]}', {**JSON, **shown})
        assert (got, "secret" in answer["detail"] or "Bearer" in answer["detail"]) == (401, True)
    assert cluster.append() == before + 1, "nothing was appended by any of it"
    cluster.check()


def test_a_request_that_is_not_http_ends_its_connection(cluster: Cluster) -> None:
    for data in (b"\xff\xfe\0\r\n" * 100, b"PING 1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 100_000):
        with Peer(cluster.http.removeprefix("http://")) as peer:
            peer.send(data)
            peer.read_to_the_end()
    cluster.check()


HELLO = b"SERVER localhost\n"
WRONG_MASTERS = {
    "an unknown command": b"FOO bar\n",
    "a command of workers": b"REPLICATE\n",
    "a name": b"NAME master\n",
    "a start of a sync": b"USER_SYNC abcde @u:h start 1\n",
    "an end of all syncs": b"CLEAR_USER_SYNC abcde\n",
    "an acknowledgement": b"FEDERATION_ACK sender 1\n",
    "an address of a user": b'USER_IP @u:h ["","","",null,1]\n',
    "a row without a token": b"RDATA stock fake x [1]\n",
    "a row that is no JSON": b"RDATA stock fake 9 [1\n",
    "a row that is too deep": b"RDATA stock fake 9 " + b"[" * 8_000 + b"\n",
    "a position of nothing": b"POSITION stock fake 1\n",
    "a line that is too long": b"RDATA stock fake 9 [" + b"1," * LINE_LIMIT + b"1]\n",
    "no end at all": b"x" * 100_000,
    "bytes that are no text": b"PING \xff\n",
    "the wrong name": b"SERVER other.example\n",
    "a web server": b"HTTP/1.1 400 Bad Request\r\n",
}


def test_a_worker_disconnects_from_a_faulty_master_and_reconnects(cluster: Cluster, tmp_path: Path) -> None:
    """The fake master sends valid lines before each wrong one, and behaves after it, so that the delay stays short."""
    with listen() as server, ExitStack() as stack:
        fake = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "secret").write_text("open sesame\n")
        options = (
            f"--connect={fake}",
            f"--connect=tcp:{cluster.wire}",
            f"--catch-up={cluster.http}",
            "--secret-file=secret",
        )
        worker = stack.enter_context(Daemon(tmp_path, "worker", *options, "--http=tcp:0:interface=127.0.0.1"))
        http = f"http://{worker.address('HTTP')}"

        def positions() -> dict[tuple[str, str], int]:
            _, answer = ask(f"{http}/v1/streams", headers=SECRET)
            return {
                (stream["name"], writer["instance"]): writer["position"]
                for stream in answer["streams"]
                for writer in stream["writers"]
            }

        def reach(wanted: dict[tuple[str, str], int], name: str) -> None:
            until(lambda: wanted.items() <= positions().items(), f"{wanted} after {name}")

        def accept(data: bytes) -> Peer:
            peer = stack.enter_context(Peer(server.accept()[0]))
            peer.send(data)
            return peer

        token = 1
        for number, (name, wrong) in enumerate(WRONG_MASTERS.items(), 1):
            token += 1
            peer = accept(HELLO + b"POSITION stock fake %d %d\n" % (token - 1, token - 1))
            peer.send(b'RDATA stock fake %d "right"\n' % token + wrong + b'RDATA stock fake 99 "never"\n')
            output = peer.read_to_the_end()
            assert output[:1] == ["NAME worker1"], name
            assert output[-1].startswith("ERROR "), name
            good = accept(HELLO + b"POSITION stock fake %d %d\n" % (token, token))
            good.read_until("REPLICATE")
            mine = cluster.append()
            reach({("orders", "master"): mine, ("stock", "fake"): token}, name)
            _, metrics = ask(f"{http}/metrics", headers=SECRET)
            counts = re.findall(r"replication_faults_total\{[^}]*\} ([0-9]+)", metrics)
            assert sum(map(int, counts)) == number, name
            good.close()
        last = accept(HELLO + b"POSITION stock fake %d %d\n" % (token, token))
        last.send(b'RDATA stock fake batch "a"\nRDATA stock fake 100 "b"\nPOSITION stock fake 100 120\n')
        reach({("stock", "fake"): 120}, "all")
        _, page = ask(f"{http}/v1/streams/stock/updates?instance=fake&from=0&upto=120", headers=SECRET)
        assert page["updates"] == [*[[each, "right"] for each in range(2, token + 1)], [100, "a"], [100, "b"]]
        assert worker.terminate() == 0
    cluster.check()


COMMANDS: dict[str, tuple[int, str]] = {
    "twistd -n replication": (2, "write master or worker"),
    "twistd -n replication master --nonsense": (2, "nonsense"),
    "twistd -n replication master --listen nonsense": (1, "nonsense"),
    "twistd -n replication master --listen tcp:{port}:interface=127.0.0.1 --http unix:http": (1, "{port}"),
    "twistd -n replication master --database sqlite:////nowhere/at/all.db --listen unix:wire --http unix:http": (
        1,
        "/nowhere/at/all.db",
    ),
    "twistd -n replication master --listen tcp:0": (1, "open to other hosts without TLS"),
    "twistd -n replication master --config wrong.toml": (1, "server_name"),
    "twistd -n replication worker --connect nonsense": (1, "nonsense"),
    "replication nonsense": (2, "nonsense"),
    "replication append nowhere 1 --http {http}": (1, "401"),
    "replication status --http http://127.0.0.1:1": (1, "127.0.0.1:1"),
}


def test_commands_that_cannot_work_print_the_reason_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    values = {"port": cluster.wire.rpartition(":")[2], "http": cluster.http}
    for number, (command, (status, culprit)) in enumerate(COMMANDS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "wrong.toml").write_text('server_nam = "x"\n')
        done = run_command(*command.format(**values).split(" "), folder=folder)
        assert done.returncode == status, (command, done)
        assert culprit.format(**values) in done.stderr, (command, done)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, (command, lines)
    cluster.check()


def test_a_slow_peer_that_still_sends_receives_its_error_line_when_it_reads_again(tmp_path: Path) -> None:
    """A socket that is closed with unread input is reset, and the peer loses what is on its way."""
    with ExitStack() as stack:
        cluster = Cluster(stack, tmp_path)
        slow = stack.enter_context(Peer(cluster.wire))
        slow.send(b"PING 1\nREPLICATE\n")
        slow.read_until("POSITION caches")
        while "slow peer" not in cluster.faults():
            cluster.append("x" * 16_000, count=50)
            for each in cluster.bystanders:
                each.read_what_is_there()
        slow.send(b"PING 2\n" * 10_000)
        assert slow.read_to_the_end()[-1] == "ERROR Failed to keep up"
        slow.close()
        until(lambda: len(ask(f"{cluster.http}/v1/connections", headers=SECRET)[1]["connections"]) == 2, "it is gone")
        cluster.check()
