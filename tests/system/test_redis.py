"""A worker that follows over a real Redis, which is killed, restarted, locked and cut off.

The writer is a master whose facts the test publishes on the channel, as a Synapse does, and sometimes fails to publish.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import Self
from urllib.parse import parse_qs, urlsplit

from hiredis import Reader

from replication.bench.cluster import free_ports
from replication.net.redis_connection import encode
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.answering import answering
from tests.certificates import Authority
from tests.redis import PATIENCE, Monitor, RedisServer
from tests.system.daemons import LOCAL, Daemon, append, get_json, until
from tests.system.peers import Peer
from tests.system.test_kills import table

DATA = Path(__file__).parents[1] / "data/synapse-modern"
CHANNEL = "example.com"


class Homeserver:
    """The processes of a homeserver: they publish the facts of a master, and answer REPLICATE with its position."""

    def __init__(self, redis: RedisServer, http: str) -> None:
        self.redis = redis
        self.http = http
        self.published = Counter[str]()  # everything that these processes have published
        self.requests = 0  # REPLICATEs received
        self.position = 0  # the last token that was published or announced
        self._ended = False
        self._subscription: socket.socket | None = None
        self._thread = Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self.subscribe()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        if self._subscription is not None:
            with suppress(OSError):  # Redis may have closed it
                self._subscription.shutdown(socket.SHUT_RDWR)
            self._thread.join(PATIENCE)
            self._subscription.close()

    def publish(self, *messages: str) -> None:
        if messages:  # else Redis may be away
            self.published.update(messages)
            self.redis.publish(*messages)

    def write(self, count: int, *, lost: int = 0) -> None:
        """Append facts; the first ``lost`` of them are not published."""
        facts = [Fact(Token(0), ('["fact"]',))] * count
        ids = append(self.http, "orders", facts)
        self.position = ids[-1]
        self.publish(*[f'RDATA orders master {each} ["fact"]' for each in ids[lost:]])

    def announce(self) -> None:
        self.publish(f"POSITION orders master {self.position} {self.position}")

    def subscribe(self) -> None:
        """Subscribe, as each process does again after Redis was away."""
        if self._subscription is not None:
            self._subscription.close()
        self._subscription = socket.create_connection(("127.0.0.1", self.redis.port), PATIENCE)
        self._subscription.settimeout(None)
        self._subscription.sendall(encode(b"SUBSCRIBE", CHANNEL.encode()))
        until(self.redis.subscribers, "the homeserver subscribes")

    def _listen(self) -> None:
        reader = Reader()
        while not self._ended:
            subscription = self._subscription
            assert subscription is not None
            try:
                data = subscription.recv(65536)
            except OSError:
                data = b""
            if not data:
                reader = Reader()
                if not self._ended:
                    time.sleep(0.02)  # until the test subscribes again
                continue
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if reply[0] == b"message" and reply[2] == b"REPLICATE ":
                    self.requests += 1
                    self.announce()


def make_worker(folder: Path, redis: RedisServer, *options: str, url: str = "") -> Daemon:
    folder.mkdir(exist_ok=True)
    return Daemon(
        folder, "worker", f"--connect={url or redis.url}", f"--server-name={CHANNEL}", LOCAL[1], *options, name="worker"
    )


def position(worker: Daemon) -> int:
    """Return the applied position of the one stream; -1 if none is known."""
    streams = get_json(f"http://{worker.address('HTTP')}", "/v1/streams")["streams"]
    found = [each["position"] for stream in streams if stream["name"] == "orders" for each in stream["writers"]]
    return found[0] if found else -1


def test_a_copy_equals_the_writer_after_redis_connections_and_the_worker_were_killed(
    tmp_path: Path, redis: RedisServer
) -> None:
    """The worker publishes only REPLICATE, once for each of its connections."""
    with Daemon(tmp_path, "master", f"--server-name={CHANNEL}", "--stream=orders", *LOCAL) as master:
        http = master.address("HTTP")
        with (
            Homeserver(redis, http) as homeserver,
            make_worker(tmp_path / "worker", redis, f"--catch-up=http://{http}") as worker,
        ):
            until(lambda: homeserver.requests == 1, "the worker sends REPLICATE")
            monitors = [Monitor(redis)]
            homeserver.write(20)
            until(lambda: position(worker) == homeserver.position, "facts are followed live")

            homeserver.publish(
                "NEW_COMMAND 1", "POSITION typing w x 1", "RDATA orders master x [1]", "LOCK_RELEASED []"
            )
            homeserver.write(10, lost=10)  # before the worker can connect again, and receive an older position
            redis.drop_subscribers()
            homeserver.subscribe()
            until(lambda: homeserver.requests == 2, "the worker connects again")
            until(lambda: position(worker) == homeserver.position, "facts that were missed are fetched")

            redis.kill()
            homeserver.write(5, lost=5)
            redis.start()
            monitors.append(Monitor(redis))
            homeserver.subscribe()
            until(lambda: homeserver.requests == 3, "the worker connects to the new Redis")
            homeserver.write(5)
            until(lambda: position(worker) == homeserver.position, "facts are followed again")

            worker.kill()
            homeserver.write(10, lost=3)
            worker.start()
            until(lambda: homeserver.requests == 4, "the new process sends REPLICATE")
            homeserver.write(3)
            until(lambda: position(worker) == homeserver.position, "the new process follows")

            copied = table(tmp_path / "worker/replication-worker1.db", "orders")
            assert copied == table(tmp_path / "replication.db", "orders")
            assert len(copied) == 53
            status = get_json(f"http://{worker.address('HTTP')}", "/v1/connections")["connections"]
            assert [each["name"] for each in status] == [CHANNEL]
            assert "unknown commands are skipped: NEW_COMMAND" in worker.log_of(1)
            assert homeserver.published["REPLICATE "] == 0
            published = Counter(line for each in monitors for line in each.lines() if line.startswith('"PUBLISH"'))
            for message in homeserver.published:
                del published[f'"PUBLISH" "{CHANNEL}" {quoted(message)}']
            assert published == {
                f'"PUBLISH" "{CHANNEL}" "REPLICATE "': 3
            }  # a fourth was published before the monitor began
            subscribed = {line for each in monitors for line in each.lines() if line.startswith('"SUBSCRIBE"')}
            assert subscribed == {f'"SUBSCRIBE" "{CHANNEL}"'}


def test_hundreds_of_followers_behind_a_relay_take_one_subscription(tmp_path: Path, redis: RedisServer) -> None:
    """Each receives the position of the writer, then every fact once and in order."""
    served = f"--server-name={CHANNEL}", "--stream=orders", *LOCAL
    with Daemon(tmp_path, "master", *served) as master, Homeserver(redis, master.address("HTTP")) as homeserver:
        homeserver.write(3)
        history = f"--catch-up=http://{master.address('HTTP')}"
        relay = make_worker(tmp_path / "relay", redis, history, LOCAL[0])
        with relay, ExitStack() as stack:
            until(lambda: position(relay) == homeserver.position, "the relay has all facts")
            peers = [stack.enter_context(Peer(relay.address("the wire"))) for _ in range(300)]
            for peer in peers:
                peer.send(b"REPLICATE\n")
                peer.read_until(f"POSITION orders master {homeserver.position} {homeserver.position}")
            assert redis.subscribers() == 2, "the homeserver and the relay"
            first = homeserver.position + 1
            homeserver.write(200)
            expected = [f'RDATA orders master {token} ["fact"]' for token in range(first, homeserver.position + 1)]
            for peer in peers:
                peer.read_until(expected[-1])
                assert [line for line in peer.lines if line.startswith("RDATA")] == expected
            assert redis.subscribers() == 2


def quoted(message: str) -> str:
    return '"' + message.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_a_wrong_password_is_named_and_the_right_one_is_found_without_a_restart(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("first\n")
    with RedisServer() as redis:
        # exactly the permissions that the error message names
        redis.call(*f"ACL SETUSER us on >second resetchannels &{CHANNEL} -@all +subscribe +publish +ping".split())
        url = f"redis://us@127.0.0.1:{redis.port}"
        with make_worker(tmp_path / "worker", redis, f"--redis-password-file={password}", url=url) as worker:
            until(lambda: "WRONGPASS" in worker.log, "the error is logged")
            assert "redis_password_file" in worker.log
            assert "first" not in worker.log
            redis.call("ACL", "SETUSER", "us", ">first")
            until(redis.subscribers, "the worker subscribes")
            redis.publish("POSITION orders master 1 1")
            until(lambda: f"following {CHANNEL} at redis://…@" in worker.log, "the worker follows")


def test_a_unix_socket_and_another_process_with_the_same_name(tmp_path: Path, redis: RedisServer) -> None:
    with make_worker(tmp_path / "worker", redis, url=f"redis+unix://{redis.path}") as worker:
        until(redis.subscribers, "the worker subscribes")
        redis.publish("POSITION orders master 1 1")
        until(lambda: f"following {CHANNEL}" in worker.log, "the worker follows")
        redis.publish("POSITION typing worker1 1 1")
        until(lambda: "another process has the instance name worker1" in worker.log, "the worker stops")
        until(lambda: redis.subscribers() == 0, "the worker disconnects")
        http = f"http://{worker.address('HTTP')}"
        metrics = get_json(http, "/v1/connections")
        assert metrics == {"connections": []}


def test_certificates_are_checked_by_both_ends(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    known, own = authority.issue("server", "localhost"), authority.issue("own")
    shown = Authority(tmp_path, "stranger").issue("shown")
    (tmp_path / "tls.toml").write_text(f'[tls]\ncertificate = "{shown.certificate}"\nprivate_key = "{shown.key}"')
    (port,) = free_ports(1)
    options = ["--tls-cert-file", str(known.certificate), "--tls-key-file", str(known.key), "--tls-auth-clients", "yes"]
    with RedisServer("--tls-port", str(port), "--tls-ca-cert-file", str(tmp_path / "authority.pem"), *options) as redis:
        shows = f"--config={tmp_path}/tls.toml"
        worker = make_worker(tmp_path / "worker", redis, shows, url=f"rediss://localhost:{port}")
        with worker:
            until(lambda: "authority that is not trusted" in worker.log, "an unknown authority is refused")
        worker.environment["SSL_CERT_FILE"] = str(tmp_path / "authority.pem")
        with worker:
            until(lambda: "the peer does not trust the authority" in worker.log, "Redis refuses its certificate")
            shown.key.write_bytes(own.key.read_bytes())
            shown.certificate.write_bytes(own.certificate.read_bytes())
            until(redis.subscribers, "the worker reads the files again, and subscribes")
        other = make_worker(tmp_path / "other", redis, url=f"rediss://127.0.0.1:{port}")
        other.environment["SSL_CERT_FILE"] = str(tmp_path / "authority.pem")
        with other:
            until(lambda: "the certificate is for another host" in other.log, "another host is refused")


class Recording:
    """What the processes of a Synapse 1.163 have published, and the facts in it, by stream and writer."""

    def __init__(self) -> None:
        with gzip.open(DATA / "redis.txt.gz", "rt") as file:
            lines = [line.rstrip("\n").split("\t", 2) for line in file]
        self.messages = [
            message for _, channel, message in lines if channel == "alpha.test" and message != "REPLICATE "
        ]
        self.facts: dict[tuple[str, str], dict[int, list[str]]] = {}
        self.positions: dict[tuple[str, str], int] = {}  # at the end
        begun: dict[tuple[str, str], list[str]] = {}
        for message in self.messages:
            match message.split(" ", 4):
                case ["RDATA", stream, writer, token, row]:
                    rows = begun.setdefault((stream, writer), [])
                    rows.append(row)
                    if token != "batch":
                        self.facts.setdefault((stream, writer), {})[int(token)] = begun.pop((stream, writer))
                        self._reach(stream, writer, int(token))
                case ["POSITION", stream, writer, _, new]:
                    self._reach(stream, writer, int(new))

    def _reach(self, stream: str, writer: str, token: int) -> None:
        self.positions[stream, writer] = max(token, self.positions.get((stream, writer), 0))

    def answer(self, path: str, _: str | None) -> tuple[int, bytes]:
        """Answer a request for missed facts, of which the recording has nearly all."""
        parts = urlsplit(path)
        if not parts.path.endswith("/updates"):
            return 404, b"{}"
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        facts = self.facts.get((parts.path.split("/")[3], query["instance"]), {})
        wanted = [each for each in sorted(facts) if int(query["from"]) < each <= int(query["upto"])]
        updates = [[token, json.loads(row)] for token in wanted for row in facts[token]]
        return 200, json.dumps({"updates": updates, "upto_token": int(query["upto"]), "limited": False}).encode()


def test_what_a_synapse_has_published_is_copied_whole_and_once(tmp_path: Path, redis: RedisServer) -> None:
    """`caches` has a tenth of its tokens twice, `backfill` descends, publishers were cut off.

    Two writers of `device_lists` send some facts both.
    """
    recording = Recording()
    (tmp_path / "all.toml").write_text("access_tokens = true")  # so that rows can be compared
    with (
        answering(recording.answer) as url,
        Daemon(
            tmp_path,
            "worker",
            f"--connect={redis.url}",
            "--server-name=alpha.test",
            f"--catch-up={url}",
            "--config=all.toml",
            LOCAL[1],
        ) as worker,
    ):
        until(lambda: redis.subscribers("alpha.test"), "the worker subscribes")
        for start in range(0, len(recording.messages), 500):
            redis.publish(*recording.messages[start : start + 500], channel="alpha.test")
        http = f"http://{worker.address('HTTP')}"

        def positions() -> dict[tuple[str, str], int]:
            streams = get_json(http, "/v1/streams")["streams"]
            return {(each["name"], of["instance"]): of["position"] for each in streams for of in each["writers"]}

        until(lambda: positions() == recording.positions, "everything is applied")
        sent: dict[str, dict[int, list[str]]] = {}
        for (stream, _), facts in recording.facts.items():
            sent.setdefault(stream, {}).update(facts)
        doubled = sum(len(of) for key, of in recording.facts.items() if key[0] == "device_lists")
        assert doubled > len(sent["device_lists"])
        for stream, facts in sent.items():
            rows = [
                (token, json.loads(str(row))) for token, _, _, row in table(tmp_path / "replication-worker1.db", stream)
            ]
            assert rows == [(token, json.loads(row)) for token in sorted(facts) for row in facts[token]], stream
        (connection,) = get_json(http, "/v1/connections")["connections"]
        assert connection["unknown_commands"] == connection["not_followed"] == []
        assert connection["skipped"].keys() == {"not needed"}
