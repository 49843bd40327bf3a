"""A retention behind relays and at a worker that writes: what is kept for followers, and what a late one receives."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, fixed_ports, get_json, until
from tests.system.test_kills import has, rows_of, table
from tests.system.test_relay import appending
from tests.system.test_restores import APP, SEEN

if TYPE_CHECKING:
    from pathlib import Path

RETENTION = "--retention=1s"
AT = "SELECT stream_id FROM stream_positions WHERE stream_name = '{}' AND instance_name = 'writer'"
WRITING = 'instance_name = "writer"\nwrites = ["orders"]\nconnect = "tcp:127.0.0.1:1"\n'
CURE = "facts of orders by writer up to {} are gone: get them from segments, or begin after {}"


def has_followers(address: str) -> bool:
    """Return whether the writer at an HTTP address knows a follower."""
    return bool(get_json(f"http://{address}", "/v1/followers")["followers"])


class Chain:
    """A worker that writes and deletes facts after a second, a relay with copies, and one without."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        (folder / "function.py").write_text(APP)
        (folder / "writing.toml").write_text(WRITING)
        (folder / "plain.toml").write_text("copy = false\n")
        self.writer = Daemon(folder, "worker", "--config=writing.toml", RETENTION, name="writer")
        at_writer = stack.enter_context(fixed_ports(self.writer))
        self.http = at_writer[1]
        self.relay = self.worker("relay", at_writer)
        self.plain = self.worker("plain", at_writer, "--config=plain.toml")
        self.at_relay = stack.enter_context(fixed_ports(self.relay))
        self.at_plain = stack.enter_context(fixed_ports(self.plain))

    def worker(self, name: str, place: tuple[str, str], *options: str) -> Daemon:
        """Return a worker that follows what is at ``place``, a wire and an HTTP; it is not started."""
        wire, http = place
        follow = (f"--instance-name={name}", f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        return Daemon(self.folder, "worker", *follow, *options, name=name)

    def append(self, count: int) -> int:
        """Append facts, and return the last ID."""
        return append(self.http, "orders", [Fact(Token(0), (f'"{number}"',)) for number in range(count)])[-1]

    def is_at(self, token: int, *names: str) -> None:
        """Wait until workers have stored this position."""
        for name in names:
            file = self.folder / f"replication-{name}.db"
            until(partial(has, file, AT.format("orders"), [(token,)]), f"{name} is at {token}")

    def copied(self, name: str) -> int:
        """Return how many rows a copy has."""
        return len(table(self.folder / f"replication-{name}.db", "orders"))

    def status(self) -> tuple[int, list[str]]:
        """Return up to where facts are deleted, and the notes."""
        (stream,) = [
            each for each in get_json(f"http://{self.http}", "/v1/streams")["streams"] if each["name"] == "orders"
        ]
        return stream["writers"][0]["gone"], stream["notes"]


def test_facts_are_kept_for_followers_behind_relays_and_a_late_one_receives_where_to_begin(tmp_path: Path) -> None:
    with ExitStack() as stack:
        chain = Chain(tmp_path, stack)
        stack.enter_context(chain.worker("near", chain.at_relay, "--app=function"))
        far = stack.enter_context(chain.worker("far", chain.at_plain))
        first = chain.append(50)
        chain.is_at(first, "relay", "near", "far")
        known = partial(get_json, f"http://{chain.http}", "/v1/followers")
        until(lambda: {"relay", "near", "far"} <= {each["name"] for each in known()["followers"]}, "all are known")
        assert far.terminate() == 0
        last = chain.append(50)
        chain.is_at(last, "relay", "near")
        kept = [f"stream 'orders': facts up to {last} are kept for follower far"]
        until(lambda: chain.status()[1] == kept, "facts are kept for the follower that is away")
        assert chain.status()[0] <= first
        far.start()
        until(lambda: chain.status() == (last, []), "all facts are deleted")
        assert chain.copied("far") == 100
        assert len(rows_of(tmp_path / "replication-near.db", SEEN)) == 100

        stack.enter_context(chain.worker("late", chain.at_relay))
        chain.is_at(last, "late")
        assert chain.copied("late") == 100, "the copy of the relay has what the writer has deleted"

        other = stack.enter_context(chain.worker("other", chain.at_plain))
        until(lambda: CURE.format(last, last) in other.log, "the log has the ID")
        until(lambda: "next attempt in" in other.log, "the log has when it is tried again")
        with pytest.raises(HTTPError) as refused:
            get_json(f"http://{chain.at_plain[1]}", "/v1/streams/orders/updates?instance=writer&from=0&upto=10")
        assert refused.value.code == 410
        assert json.load(refused.value)["gone_upto"] == last
        assert other.terminate() == 0
        other.options += ("--skip-gone",)
        other.start()
        newest = chain.append(3)
        chain.is_at(newest, "other", "late", "far", "relay")
        assert chain.copied("other") == 3


def test_a_worker_that_writes_and_relays_keeps_what_a_folder_and_followers_of_both_kinds_lack(tmp_path: Path) -> None:
    """It deletes its own facts only; those that it follows have a writer that deletes them."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "both.toml").write_text(
        f'relay = true\nretention_segments = "{tmp_path}/archive"\nwrites = ["orders"]\ninstance_name = "writer"\n'
    )
    with ExitStack() as stack:
        master = stack.enter_context(Daemon(tmp_path, "master", "--stream=events", *LOCAL))
        wire, http = master.address("the wire"), master.address("HTTP")
        options = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--config=both.toml", RETENTION)
        both = Daemon(tmp_path, "worker", *options, name="both")
        wire, address = stack.enter_context(fixed_ports(both))
        follow = ("--instance-name=copy", f"--connect=tcp:{wire}", f"--catch-up=http://{address}")
        stack.enter_context(Daemon(tmp_path, "worker", *follow, name="copy"))
        facts = [Fact(Token(0), (f"{number}",)) for number in range(20)]
        (event,) = {append(http, "events", facts)[-1]}
        (order,) = {append(address, "orders", facts)[-1]}
        for stream, writer, last in (("events", "master", event), ("orders", "writer", order)):
            at = AT.replace("'writer'", f"'{writer}'").format(stream)
            until(partial(has, tmp_path / "replication-copy.db", at, [(last,)]), f"the copy has {stream}")
        for place in (http, address):
            until(partial(has_followers, place), "the copy is known")

        def streams() -> dict[str, Any]:
            return {each["name"]: each for each in get_json(f"http://{address}", "/v1/streams")["streams"]}

        kept = f"stream 'orders': facts up to {order} are kept for the segments in {tmp_path}/archive"
        until(lambda: streams()["orders"]["notes"] == [kept], "facts are kept for the folder")
        assert streams()["events"]["notes"] == []
        assert len(table(tmp_path / "replication-writer.db", "events")) == 20


def test_a_relay_whose_backup_was_made_under_load_fetches_the_rest_and_takes_no_follower_back(tmp_path: Path) -> None:
    backup, file = tmp_path / "backup.db", tmp_path / "replication-relay.db"
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=events")
        wire, http = stack.enter_context(fixed_ports(master))
        follow = ("--instance-name=relay", f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        relay = Daemon(tmp_path, "worker", *follow, name="relay")
        wire, address = stack.enter_context(fixed_ports(relay))
        follow = ("--instance-name=copy", f"--connect=tcp:{wire}", f"--catch-up=http://{address}")
        copy = stack.enter_context(Daemon(tmp_path, "worker", *follow, name="copy"))

        def copied() -> int:
            with closing(sqlite3.connect(tmp_path / "replication-copy.db", timeout=30)) as database:
                try:
                    return int(database.execute("SELECT COUNT(*) FROM stream_events").fetchone()[0])
                except sqlite3.OperationalError:  # no table yet
                    return 0

        with appending(http):
            until(lambda: copied() > 200, "facts arrive")
            with closing(sqlite3.connect(file, timeout=30)) as source, closing(sqlite3.connect(backup)) as target:
                source.backup(target, pages=5, sleep=0.001)
            reached = copied()
            until(lambda: copied() > reached + 200, "more facts arrive")
            relay.kill()
            for each in ("-wal", "-shm"):
                (tmp_path / f"{file.name}{each}").unlink(missing_ok=True)
            shutil.copy(backup, file)
            reached = copied()
            relay.start()
            until(lambda: copied() > reached + 200, "facts arrive again")
        (last,) = append(http, "events", [Fact(Token(0), ('"last"',))])
        at = AT.replace("'writer'", "'master'").format("events")
        want = table(tmp_path / "replication.db", "events")
        for name in ("relay", "copy"):
            until(partial(has, tmp_path / f"replication-{name}.db", at, [(last,)]), f"{name} is at the end")
            assert table(tmp_path / f"replication-{name}.db", "events") == want
        assert "went back" not in copy.log
