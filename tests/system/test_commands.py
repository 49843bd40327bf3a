"""Commands other than RDATA, and in-memory streams, between real processes that are killed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from replication.streams.facts import Fact
from replication.wire import grammar
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, fixed_ports, get_json, until
from tests.system.peers import Peer
from tests.transcripts.lines import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MASTER = """
[[streams]]
name = "typing"
row = ["room_id", "user_ids"]
key = ["room_id"]
in_memory = true

[[streams]]
name = "federation"
row = ["type", "data"]
in_memory = true
"""

# An application that sends every command that a worker can send.
APP = """
from twisted.internet.task import LoopingCall
from replication.wire.commands import RemoteServerUp

def register(worker):
    syncing = []  # an open context ends with its last reference

    def send():
        if worker.remote_server_up(f"{worker.instance_name}.example"):
            worker.federation_ack(2)
            worker.user_ip("@seen:h", "token", "192.0.2.1")
            if not worker.served.users_syncing():
                syncing.append(worker.user_syncing("@syncs:h"))
                syncing[-1].__enter__()
    LoopingCall(send).start(0.2)

    @worker.on_command(RemoteServerUp)
    def store(command, peer):
        with open(f"{worker.instance_name}-servers", "a") as servers:
            print(command.server, file=servers)
"""


def send(http: str, stream: str, *rows: Any) -> list[int]:
    """Append a fact of one row for each of ``rows``."""
    return append(http, stream, [Fact(Token(0), (grammar.encode_row(row),)) for row in rows])


def page(http: str, stream: str, after: int = 0, upto: int = 10**9) -> list[Any]:
    """Return the facts in memory, as a Synapse requests them."""
    query = f"?from_token={after}&upto_token={upto}"
    answer = get_json(f"http://{http}", f"/_synapse/replication/get_repl_stream_updates/{stream}/x{query}")
    assert isinstance(answer["updates"], list)
    return answer["updates"]


def tables(database: Path) -> list[str]:
    """Return the names of a database's tables."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def is_so(ask: Callable[[], object], wanted: object) -> bool:
    """Whether the answer is the wanted one now."""
    return ask() == wanted


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "master.toml").write_text(MASTER)
    with Daemon(tmp_path, "master", "--config=master.toml", *LOCAL) as daemon:
        yield daemon


def test_trap_29_a_stream_without_a_table_goes_on_when_its_writer_was_killed(tmp_path: Path) -> None:
    """No follower stops, is reset, or ignores new facts; one that was killed receives the facts in memory."""
    (tmp_path / "master.toml").write_text(MASTER)
    copy = tmp_path / "replication-copy.db"

    def copied() -> list[int]:
        if "stream_typing" not in tables(copy):
            return []  # the worker has connected, and creates its table now
        with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True, timeout=30)) as database:
            return [token for (token,) in database.execute("SELECT stream_id FROM stream_typing ORDER BY stream_id")]

    with ExitStack() as stack:
        daemon = Daemon(tmp_path, "master", "--config=master.toml")
        wire, http = stack.enter_context(fixed_ports(daemon))
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        worker = stack.enter_context(Daemon(tmp_path, "worker", "--instance-name=copy", *follow))
        until(lambda: "following" in worker.log, "the worker follows")
        tokens: list[int] = []
        for number in range(3):
            tokens += send(http, "typing", ["!a", [f"@{number}"]], ["!b", []])
            until(partial(is_so, copied, tokens), f"{tokens} are copied")
            assert [token for token, _ in page(http, "typing")] == tokens[-2:]
            worker.kill()
            tokens_missed = send(http, "typing", ["!a", ["missed"]], ["!a", ["last"]])
            assert [row for _, row in page(http, "typing")] == [["!b", []], ["!a", ["last"]]]
            worker.start()
            tokens.append(tokens_missed[-1])
            until(partial(is_so, copied, tokens), f"{tokens} are copied, {tokens_missed[0]} is gone")
            daemon.kill()
            daemon.start()
            daemon.address("HTTP")
            assert page(http, "typing") == []
        assert tokens == sorted(set(tokens))
        assert "went back" not in "".join(worker.log_of(start) for start in range(1, worker.starts + 1))


def test_commands_of_workers_reach_the_master_and_the_other_workers_once(tmp_path: Path, master: Daemon) -> None:
    (tmp_path / "sender.py").write_text(APP)
    wire, http = master.address("the wire"), master.address("HTTP")
    send(http, "federation", ["e", {}], ["e", {}])
    follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--app=sender")
    with Daemon(tmp_path, "worker", "--instance-name=one", *follow, name="one") as one:
        until(lambda: get_json(f"http://{http}", "/v1/users")["users"], "a user syncs")
        with Daemon(tmp_path, "worker", "--instance-name=two", *follow, name="two") as two:
            until(lambda: received(tmp_path, "one"), "one receives the server of two")
            until(lambda: received(tmp_path, "two"), "two receives the server of one")
            assert received(tmp_path, "one") == {"two.example"}
            assert received(tmp_path, "two") == {"one.example"}
            until(lambda: len(syncing(http)) == 2, "the user syncs at both")
            assert [token for token, _ in page(http, "federation")] == [3]
            assert two.terminate() == 0
        until(lambda: len(syncing(http)) == 1, "a worker that stops cleanly ends its syncs")
        until(lambda: get_json(f"http://{http}", "/v1/users/@seen:h")["seen"], "the user was seen")
        one.kill()
    assert len(syncing(http)) == 1, "a worker that was killed may start again soon"
    assert master.terminate() == 0
    with closing(sqlite3.connect(tmp_path / "replication.db")) as database:
        seen = database.execute("SELECT user_id, access_token, ip, device_id FROM users_last_seen").fetchall()
    assert seen == [("@seen:h", "token", "192.0.2.1", None)]


def received(folder: Path, instance: str) -> set[str]:
    """Return the servers that an instance has received; its file may be missing or empty."""
    file = folder / f"{instance}-servers"
    return set(file.read_text().split()) if file.exists() else set()


def syncing(http: str) -> dict[str, int]:
    """Return the instances at which the user of APP syncs."""
    where: dict[str, int] = get_json(f"http://{http}", "/v1/users/@syncs:h")["syncing"]
    return where


def test_unusual_valid_commands_do_no_harm(master: Daemon) -> None:
    wire, http = master.address("the wire"), master.address("HTTP")
    send(http, "federation", ["e", {}], ["e", {}])
    until(lambda: len(page(http, "federation")) == 2, "the master has both facts")
    with Peer(wire) as peer, Peer(wire) as other:
        other.read_until("PING")  # a command that is sent before the peer is registered does not reach it
        odd = [json.dumps([text, text, text, None, 2**63 - 1]) for text in ("\0", "\ud800", "é" * 500, "", "%s")]
        peer.send("".join(f"USER_IP @odd:h {each}\n" for each in odd).encode())
        peer.send(b"USER_SYNC abcde @u:h end 1\nCLEAR_USER_SYNC unknown\nCLEAR_USER_SYNC \n")
        peer.send(b"USER_SYNC abcde @odd:h start -9223372036854775808\n" * 1_000)
        peer.send(
            b"FEDERATION_ACK s -5\nFEDERATION_ACK s 9223372036854775807\nREMOTE_SERVER_UP \nREMOTE_SERVER_UP %s\n"
        )
        assert other.read_until("REMOTE_SERVER_UP %s") == "REMOTE_SERVER_UP %s"
        assert len(get_json(f"http://{http}", "/v1/users/@odd:h")["seen"]) == len(odd)
        assert page(http, "federation") == []
        (token,) = send(http, "federation", ["e", {}])
        assert [each for each, _ in page(http, "federation")] == [token]
        peer.send(b"PING 1\nFOO\n")
        assert not [line for line in peer.read_to_the_end() if line.startswith("REMOTE_SERVER_UP")]


def test_every_malformed_line_is_answered_with_the_reason(master: Daemon) -> None:
    """From a master or a worker, at any time (docs/protocol/wire.md A7)."""
    wire = master.address("the wire")
    for line, complaint in MALFORMED:
        with Peer(wire) as peer:
            peer.send(line.encode() + b"\n")
            output = peer.read_to_the_end()[-1]
        assert output.startswith("ERROR line 1: "), line
        if line.split(" ")[0] not in ("RDATA", "POSITION"):  # a worker may send neither
            assert complaint in output
