"""A decision about a fact, stored in the database of a worker that is stopped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from replication.cli import retry, skip, skipped
from replication.cli.main import main
from replication.cli.parser import Parser
from replication.storage.blocking import use_store
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import IStreamStore, Write
from replication.streams.skips import SkippedFact, SkipState
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

ORDERS, MASTER, WORKER = StreamName("orders"), InstanceName("master"), InstanceName("worker1")
SKIPPED = SkippedFact(ORDERS, MASTER, Fact(Token(3), ('["a"]',)), SkipState.SKIPPED, "ValueError: no", "function")


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Return the URL of a worker's database: the master's position is 5, and fact 3 was skipped."""
    url = f"sqlite:///{tmp_path}/worker.db"
    fill(url)
    return url


def fill(url: str) -> None:
    async def commit(store: IStreamStore) -> None:
        write = Write(ORDERS, MASTER, Token(5), expected=Token(0), follower=WORKER, skipped=[SKIPPED])
        await store.transaction().commit([write])

    use_store(url, commit, read_only=False)


def listed(url: str, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    capsys.readouterr()
    assert main(["skipped", "--json", "--database", url]) == 0
    return [(each["token"], each["state"]) for each in json.loads(capsys.readouterr().out)["skipped"]]


def test_a_skip_is_requested_once_and_keeps_the_position(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["skip", "orders", "master", "7", "--database", database]) == 0
    assert capsys.readouterr().out == 2 * "fact 7 of orders by master: skip requested\n"
    assert listed(database, capsys) == [(7, "skip requested"), (3, "skipped")]

    async def drop(store: IStreamStore) -> None:
        dropped = SkippedFact(ORDERS, MASTER, Fact(Token(7), ()), SkipState.DROPPED)
        write = Write(ORDERS, MASTER, Token(5), expected=Token(5), follower=WORKER, skipped=[dropped])
        await store.transaction().commit([write])

    use_store(database, drop, read_only=False)
    assert main(["retry", "orders", "master", "7", "--database", database]) == 1
    assert main(["skip", "orders", "master", "7", "--database", database]) == 0
    assert listed(database, capsys) == [(7, "skip requested"), (3, "skipped")]

    async def positions(store: IStreamStore) -> Any:
        return await store.applied_positions(ORDERS, WORKER)

    assert use_store(database, positions, read_only=True) == {MASTER: 5}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("skip", "orders", "master", "5"), "fact 5 is applied: the position of 'master' in 'orders' is 5"),
        (
            ("skip", "orders", "unknown", "7"),
            "no position of 'unknown' in stream 'orders' is stored here for 'worker1' (--instance-name); known",
        ),
        (("skip", "stock", "master", "7"), "known writers: none"),
        (("retry", "orders", "master", "7"), "fact 7 of stream 'orders' by 'master' was not skipped here"),
    ],
)
def test_what_cannot_be_is_refused(
    database: str, words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--database", database]) == 1
    assert error in capsys.readouterr().err
    assert listed(database, capsys) == [(3, "skipped")]


def test_no_fact_of_a_copy_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error advised to drop the copy."""
    url = f"sqlite:///{tmp_path}/copy.db"

    async def copy(store: IStreamStore) -> None:
        await store.declare(StreamDefinition(ORDERS))
        await store.transaction().commit([Write(ORDERS, MASTER, Token(5), [Fact(Token(5), ("[1]",))])])

    use_store(url, copy, read_only=False)
    assert main(["skip", "orders", "master", "7", "--database", url]) == 1
    assert "stream 'orders' is copied here, and a copy is complete: others read it" in capsys.readouterr().err


def test_a_retry_is_requested_once(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["retry", "orders", "master", "3", "--json", "--database", database]) == 0
    (first, _) = capsys.readouterr().out.splitlines()
    assert json.loads(first)["rows"] == [["a"]]
    assert listed(database, capsys) == [(3, "retry requested")]


def test_a_request_is_taken_back_until_the_worker_has_started(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> int:
        return main([*words, "--database", database])

    assert run("skip", "orders", "master", "7") == run("retry", "orders", "master", "3") == 0
    for command, token in (("skip", "3"), ("retry", "7"), ("skip", "8"), ("retry", "8")):
        assert run(command, "orders", "master", token, "--cancel") == 1
        why = f"no {command} of fact {token} of stream 'orders' by 'master' is requested here"
        assert why in capsys.readouterr().err
    assert run("skip", "orders", "master", "7", "--cancel") == run("retry", "orders", "master", "3", "--cancel") == 0
    assert capsys.readouterr().out.splitlines() == [
        "fact 7 of orders by master: dropped",
        "fact 3 of orders by master: skipped: ValueError: no",
    ]
    assert listed(database, capsys) == [(3, "skipped"), (7, "dropped")]
    assert run("skip", "orders", "master", "7", "--cancel") == 1, "it is taken back already"

    async def requests(store: IStreamStore) -> Any:
        requested = SkipState.SKIP_REQUESTED, SkipState.RETRY_REQUESTED
        return await store.skipped_facts(WORKER, ORDERS, states=requested, limit=9)

    assert [*use_store(database, requests, read_only=True)] == [], "what a start reads"
    assert run("skip", "orders", "master", "7") == 0
    assert listed(database, capsys) == [(7, "skip requested"), (3, "skipped")]


@pytest.mark.parametrize("command", ["skip", "retry"])
def test_what_a_running_worker_has_done_cannot_be_taken_back(
    command: str, api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "orders", "master", "3", "--cancel"])
    assert (ended.value.code, api.calls) == (2, [])
    assert "--cancel needs --database: a running worker carries out each request at once" in capsys.readouterr().err


def test_no_database_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skip", "orders", "master", "7", "--database", f"sqlite:///{tmp_path}/no.db"]) == 1
    assert not (tmp_path / "no.db").exists()
    assert "no.db" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("orders", "master", "x"), ("orders", "a b", "3"), ("orders", "master", "3", "--http=http://h")]
)
def test_a_wrong_command_line_is_refused(database: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["skip", *words, "--database", database])
    assert ended.value.code == 2


class FakeApi:
    """Notes calls, and answers with one fact."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bytes | None]] = []

    def close(self) -> None:
        """Do nothing."""

    def call(self, method: str, path: str, body: bytes | None = None, headers: object = None, *, form: Any) -> Any:
        self.calls.append((method, path, body))
        fact = {
            "stream": "orders",
            "instance": "master",
            "token": 3,
            "state": "skipped",
            "since": 0.0,
            "decided_by": "command",
            "error": "",
            "rows": [["a"]],
        }
        answer = {"skipped": [fact]} if method == "GET" else fact
        msgspec.convert(answer, form)
        return answer


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    made = FakeApi()
    monkeypatch.setattr(Parser, "open_client", lambda *_: made)
    return made


def test_a_running_worker_is_called_over_http(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"instance": "master", "token": 3}'
    assert skip.main(["orders", "master", "3"]) == retry.main(["a/b", "master", "3"]) == 0
    assert api.calls == [("POST", "/v1/streams/orders/skip", body), ("POST", "/v1/streams/a%2Fb/retry", body)]
    assert capsys.readouterr().out == 2 * "fact 3 of orders by master: skipped\n"
    assert skipped.main(["--stream", "a b", "--limit", "7"]) == 0
    assert api.calls[-1] == ("GET", "/v1/skipped?limit=7&stream=a+b", None)
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("orders", "master", "3", "skipped", "1970-01-01", "00:00:00Z", "command", "-", '[["a"]]'),
    ]


def test_a_worker_on_postgresql_is_named(postgres: PostgresServer, capsys: pytest.CaptureFixture[str]) -> None:
    with postgres.database() as name:
        url = postgres.url(name)
        fill(url)
        assert main(["skip", "orders", "master", "7", "--database", url, "--instance-name", "other"]) == 1
        assert main(["skip", "orders", "master", "7", "--database", url]) == 0
        assert listed(url, capsys) == [(7, "skip requested"), (3, "skipped")]

        async def claimed(store: IStreamStore) -> int:
            await store.claim(WORKER)
            return main(["skip", "orders", "master", "8", "--database", url])

        assert use_store(url, claimed, read_only=False) == 1
        printed = capsys.readouterr().err
        assert "another process writes as 'worker1'" in printed
        assert "; while the worker runs, give --http URL instead of --database" in printed
