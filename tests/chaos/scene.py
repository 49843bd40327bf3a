"""A scene: two writers, a relay, followers of every kind, and programs that append; all of it real processes.

master ──┬── proxy ──┬── writer1   writes events, copies orders
writer1 ─┘           ├── copy      copies both; with PostgreSQL, in a database of the server; reads segments, too
                     ├── seen      a function whose effects are in its database, and one that undoes them
                     ├── plain     the same without the second one
                     └── relay ── proxy ──┬── far-copy
                                          └── far-seen
"""

from __future__ import annotations

import http.client
import ssl
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import attrs

from replication.bench.cluster import free_ports
from tests.chaos.ledger import Append, read_ledger
from tests.chaos.needs import POSTGRES, libfaketime
from tests.chaos.proxy import HARMLESS, Proxies, Proxy
from tests.system.daemons import CHECKOUT, Daemon, environment
from tests.system.databases import OpenFile, PostgresDatabase, SqliteDatabase
from tests.system.test_kills import rows_of, table

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.certificates import Authority, Identity
    from tests.postgres import PostgresServer

STREAMS: Final = {"orders": "master", "events": "writer1"}  # with their writers
FUNCTIONS: Final = ("seen", "plain", "far-seen")
PATIENCE: Final = 180.0  # seconds in which everything must be as if there had been no fault
DISK: Final = 128  # MiB
SERVERS: Final = "servers"  # a file with the folders of the PostgreSQL servers
YEAR: Final = 365
# Nothing here is unique, so that effects that are there twice can be counted.
APP = """
STREAMS = ("orders", "events")
TABLE = "CREATE TABLE IF NOT EXISTS effects (stream TEXT, token INTEGER, ord INTEGER, writer TEXT, row TEXT)"


async def apply(facts, txn):
    await txn.execute(TABLE)
    rows = [(txn.stream, fact.token, n, txn.writer, text) for fact in facts for n, text in enumerate(fact.texts)]
    await txn.executemany("INSERT INTO effects VALUES (?, ?, ?, ?, ?)", rows)


def register(worker):
    for each in STREAMS:
        worker.on(each)(apply)
"""
UNDO = """

def undo(stream):
    async def delete(writer, to, txn):
        await txn.execute(TABLE)
        await txn.execute("DELETE FROM effects WHERE stream = ? AND writer = ? AND token > ?", [stream, writer, to])

    return delete


def undoing(worker):
    register(worker)
    for each in STREAMS:
        worker.on_reset(each)(undo(each))
"""


@attrs.frozen
class Plan:
    """What a seed decides about a scene."""

    seed: str
    database: str
    tls: bool = False
    clocks: bool = False  # whether the clocks of some daemons are those of libfaketime
    standby: bool = False
    small_disk: bool = False

    def __str__(self) -> str:
        """Return the words of one line."""
        extras = ("tls", "clocks", "standby", "small_disk")
        return ", ".join([self.database, *(each.replace("_", " ") for each in extras if getattr(self, each))])


@attrs.frozen
class Loss:
    """Facts that a writer's database has lost, as it may: a restored backup, or a failover.

    Attributes:
        stream: whose facts.
        begin: the time from which acknowledged facts may be lost.
        end: the time from which no acknowledged fact may be lost.
        kept: the rows after the loss.

    """

    stream: str
    begin: float
    end: float
    kept: frozenset[tuple[object, ...]]


Rows = list[tuple[object, ...]]


@attrs.frozen
class Follower:
    """Where the facts of a follower are.

    ``daemon``: its process.  ``database``: the copy in PostgreSQL, if it is not a file.
    """

    daemon: Daemon
    file: Path
    database: PostgresDatabase | None = None

    def rows(self, stream: str) -> Rows:
        """Return ID, order, writer and text of each row: of a function's effects in the order in which they came."""
        if self.daemon.name in FUNCTIONS:
            return rows_of(
                self.file, f"SELECT token, ord, writer, row FROM effects WHERE stream = '{stream}' ORDER BY rowid"
            )
        if self.database is not None:
            return self.database.server.sql(
                f"SELECT stream_id, ord, instance_name, row FROM stream_{stream} ORDER BY 1, 2",
                database=self.database.database,
            )
        return table(self.file, stream)


class Scene:
    """The processes, and what they have done to each other.

    Leave the ``with`` block to end all of them.
    """

    def __init__(self, plan: Plan, folder: Path, chance: random.Random) -> None:
        self.plan, self.folder, self.chance = plan, folder, chance
        self.stack = ExitStack()
        self.proxies = self.stack.enter_context(Proxies())
        self.kills: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()  # of daemons that ended by themselves, by the last line of the log
        self.losses: list[Loss] = []
        self.failed_over = False
        self.ways_out = 0  # how often ``plain`` needed --accept-new-history
        self.held: set[str] = set()  # daemons that a fault keeps down
        self.servers: list[PostgresServer] = []
        self.authority: Authority | None = None
        self.identity: Identity | None = None
        self.ports: dict[str, tuple[int, int]] = {}
        self.through: dict[str, tuple[Proxy, Proxy]] = {}
        self.daemons: dict[str, Daemon] = {}
        self._started: dict[str, float] = {}
        self._appenders: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start everything."""
        try:
            self._build()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill everything."""
        for each in self._appenders.values():
            _kill(each)
        for name in self.daemons:
            self.kill(name)
        self.stack.close()

    def _build(self) -> None:
        (self.folder / "effects.py").write_text(APP + UNDO)
        if self.plan.tls:
            self._make_certificates()
        if self.plan.small_disk:
            self._mount()
        if self.plan.database == POSTGRES:
            self._start_servers()
        for name in ("master", "writer1", "relay"):
            wire, web = free_ports(2)
            self.ports[name] = wire, web
            self.through[name] = Proxy(self.proxies, wire), Proxy(self.proxies, web)
        self.homes = {stream: self._home(stream, name) for stream, name in STREAMS.items()}
        near, far = tuple(STREAMS.values()), ("relay",)
        self.daemons = {
            each.name: each
            for each in (
                self._daemon("master", "master", ()),
                self._daemon("writer1", "worker", ("master",)),
                self._daemon("relay", "worker", near),
                self._daemon("copy", "worker", near, *self._segments_of_copy()),
                self._daemon("seen", "worker", near, 'app = "effects:undoing"'),
                self._daemon("plain", "worker", near, 'app = "effects:register"'),
                self._daemon("far-copy", "worker", far),
                self._daemon("far-seen", "worker", far, 'app = "effects:undoing"'),
            )
        }
        followers = ("relay", "copy", "seen", "plain", "far-copy", "far-seen")
        self.followers = {name: self._follower(name) for name in followers}
        for each in self.daemons.values():
            self.stack.enter_context(each)

    # ---- making

    def _make_certificates(self) -> None:
        from tests.certificates import DAY, Authority

        self.authority = Authority(self.folder, valid=(-YEAR * DAY, YEAR * DAY))
        self.identity = self.issue("server")

    def issue(self, name: str) -> Identity:
        """Return a certificate for servers of this scene, which is valid whatever the clocks show."""
        from tests.certificates import DAY

        assert self.authority is not None
        return self.authority.issue(name, "127.0.0.1", valid=(-YEAR * DAY, YEAR * DAY))

    def _mount(self) -> None:
        (self.folder / "disk").mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "chaos", str(self.folder / "disk")]
        subprocess.run(command, check=True)
        self.stack.callback(subprocess.run, ["umount", "--lazy", str(self.folder / "disk")], check=True)

    def _start_servers(self) -> None:
        from tests.postgres import PostgresServer

        primary = self.stack.enter_context(PostgresServer(fsync=False))
        for each in ("master", "writer1", "copy"):
            primary.sql(f"CREATE DATABASE {each}")
        self.servers = [primary]
        if self.plan.standby:
            self.servers.append(self.stack.enter_context(primary.standby()))
        (self.folder / SERVERS).write_text("".join(f"{each.folder}\n" for each in self.servers))

    def _home(self, stream: str, name: str) -> SqliteDatabase | PostgresDatabase:
        if self.plan.database == POSTGRES:
            return PostgresDatabase(self.servers[0], name, stream)
        folder = self.folder / ("disk" if self.plan.small_disk else "") / name
        folder.mkdir()
        return OpenFile(folder, stream)

    def url(self, database: str) -> str:
        """Return the URL of a database of the servers."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.servers)
        return f"postgresql://postgres@{hosts}/{database}"

    def _daemon(self, name: str, role: str, follows: tuple[str, ...], *lines: str) -> Daemon:
        stream = next((each for each, writer in STREAMS.items() if writer == name), None)
        text = [f'instance_name = "{name}"', "ping_after = 2", "give_up_after = 6", *lines]
        text.append(f'database = "{self._url_of(name, stream)}"')
        if stream is not None:
            text.append(f'{"stream" if role == "master" else "writes"} = ["{stream}"]')
        if name in self.ports:
            listen = [*map(self._listen, self.ports[name])]
            text += [f'listen = ["{listen[0]}"]', f'http = "{listen[1]}"']
        scheme, web = ("tls", "https") if self.plan.tls else ("tcp", "http")
        if follows == ("relay",):
            wire_proxy, http_proxy = self.through["relay"]
            text.append(f'connect = ["{scheme}:127.0.0.1:{wire_proxy.port}"]')
            text.append(f'catch_up = ["{web}://127.0.0.1:{http_proxy.port}"]')
        else:
            for each in follows:
                wire_proxy, http_proxy = self.through[each]
                text.append(f'[writers.{each}]\nconnect = "{scheme}:127.0.0.1:{wire_proxy.port}"')
                text.append(f'http = "{web}://127.0.0.1:{http_proxy.port}"')
        (self.folder / f"{name}.toml").write_text("\n".join(text) + "\n")
        daemon = Daemon(self.folder, role, f"--config={name}.toml", name=name)
        if self.authority is not None:
            daemon.environment["SSL_CERT_FILE"] = str(self.authority.certificate)
        if self.plan.clocks and name in ("master", "seen", "relay"):
            self._give_clock(daemon)
        return daemon

    def _url_of(self, name: str, stream: str | None) -> str:
        if self.plan.database == POSTGRES and (stream is not None or name == "copy"):
            return self.url(name)
        home = self.homes.get(stream or "")
        return f"sqlite:///{self.folder}/{name}.db" if home is None else home.url

    def _listen(self, port: int) -> str:
        return f"tcp:{port}:interface=127.0.0.1" if self.identity is None else self.identity.listen(port)

    def _segments_of_copy(self) -> list[str]:
        for writer in STREAMS.values():
            (self.folder / f"segments-{writer}").mkdir()
        return [f"catch_up = {[str(self.folder / f'segments-{writer}') for writer in STREAMS.values()]}"]

    def _give_clock(self, daemon: Daemon) -> None:
        self.step_clock(daemon.name, 0)
        daemon.before = [
            "env",
            f"LD_PRELOAD={libfaketime()}",
            f"FAKETIME_TIMESTAMP_FILE={self.folder}/{daemon.name}.clock",
            "FAKETIME_NO_CACHE=1",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
        ]

    def step_clock(self, name: str, seconds: int) -> None:
        """Let the clock of a daemon differ by so many seconds from now on."""
        new = self.folder / "new.clock"
        new.write_text(f"{seconds:+}\n")
        new.rename(self.folder / f"{name}.clock")

    def _follower(self, name: str) -> Follower:
        database = PostgresDatabase(self.servers[0], "copy") if self.plan.database == POSTGRES else None
        return Follower(self.daemons[name], self.folder / f"{name}.db", database if name == "copy" else None)

    # ---- appending

    def ledger(self, stream: str) -> dict[str, Append]:
        """Return what has been appended to a stream."""
        return read_ledger(self._ledger_of(stream))

    def _ledger_of(self, stream: str) -> Path:
        return self.folder / f"{stream}.ledger"

    def start_appending(self, stream: str) -> None:
        """Start the program that appends to a stream."""
        web = "https" if self.plan.tls else "http"
        _, proxy = self.through[STREAMS[stream]]
        authority = str(self.authority.certificate) if self.authority else ""
        url = f"{web}://127.0.0.1:{proxy.port}"
        program = str(CHECKOUT / "tests/chaos/appender.py")
        arguments = [url, stream, str(self._ledger_of(stream)), self.plan.seed.partition(":")[0], authority]
        with (self.folder / f"{stream}-appender.log").open("ab") as log:
            command = [sys.executable, program, *arguments]
            self._appenders[stream] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment()
            )

    def kill_appender(self, stream: str) -> None:
        """SIGKILL the program that appends to a stream, and start it again."""
        if (process := self._appenders.get(stream)) is not None:
            _kill(process)
            self.kills["appender"] += 1
            self.start_appending(stream)

    def stop_appending(self) -> None:
        """Let the programs end once all that they have sent is acknowledged; AssertionError if that takes too long."""
        for each in self._appenders.values():
            assert each.stdin is not None
            each.stdin.close()
        for stream, each in self._appenders.items():
            self.until(lambda each=each: each.poll() is not None, f"every append to {stream} is acknowledged")  # type: ignore[misc]
        self._appenders.clear()

    # ---- processes

    def kill(self, name: str) -> None:
        """SIGKILL a daemon."""
        daemon = self.daemons[name]
        if not daemon.ended:
            self.kills[name] += 1
        self._note_exit(daemon)
        process = daemon._process
        daemon.kill()
        if daemon.before and process is not None:
            for each in Path("/dev/shm").glob(f"*faketime_*_{process.pid}"):
                each.unlink(missing_ok=True)

    def start(self, name: str) -> None:
        """Start a daemon that was killed."""
        self._started[name] = time.monotonic()
        self.daemons[name].start()

    def keep_up(self) -> None:
        """Start what has ended by itself, as a supervisor does; not twice within a second."""
        for name, daemon in self.daemons.items():
            if daemon.ended and name not in self.held and time.monotonic() - self._started.get(name, 0.0) > 1:
                self._note_exit(daemon)
                self.start(name)

    def keep_up_with(self, name: str) -> None:
        """Start a daemon that a fault has kept down, and that has ended by itself."""
        self.held.discard(name)
        self._note_exit(self.daemons[name])
        self.start(name)

    def is_ready(self, name: str) -> bool:
        """Return whether a writer or the relay answers that it is ready."""
        web = "https" if self.plan.tls else "http"
        context = ssl.create_default_context(cafile=self.authority.certificate) if self.authority else None
        url = f"{web}://127.0.0.1:{self.ports[name][1]}/health/ready"
        try:
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return bool(answer.status == http.client.OK)
        except (OSError, http.client.HTTPException):
            return False

    def _note_exit(self, daemon: Daemon) -> None:
        """Count the reason of a daemon that has ended by itself."""
        process = daemon._process
        if process is not None and process.poll() is not None:
            reason = (daemon.log.strip().splitlines() or [""])[-1][:150] if process.returncode else "after SIGTERM"
            self.exits[f"{daemon.name}: status {process.returncode}: {reason}"] += 1

    def act(self, seconds: float) -> None:
        """Let some time pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.keep_up()
            time.sleep(0.05)

    def until(self, condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
        """Let time pass until the result of ``condition`` is true, and return that.

        Where this process has to wait for a processor, so have the daemons: that time does not count.
        """
        spent = 0.0
        while not (answer := condition()):
            if spent >= patience:
                raise AssertionError(f"not within {patience:g} s: {what}")
            begin = time.monotonic()
            self.keep_up()
            self.let_plain_out()
            time.sleep(0.1)
            spent += min(time.monotonic() - begin, 0.3)
        return answer

    def let_plain_out(self) -> None:
        """If the functions without ``on_reset`` have stopped, follow the cure in their log."""
        plain = self.daemons["plain"]
        cure = "--accept-new-history"
        if cure in plain.options or plain.ended:
            return
        if "register a function with @worker.on_reset(" in plain.log:
            self.ways_out += 1
            plain.kill()
            plain.options += (cure,)
            self.start("plain")

    def forget_way_out(self) -> None:
        """Let the next start of ``plain`` be an ordinary one."""
        plain = self.daemons["plain"]
        plain.options = tuple(each for each in plain.options if each != "--accept-new-history")

    def heal_proxies(self) -> None:
        """Pass all bytes as they come."""
        for pair in self.through.values():
            for each in pair:
                each.toxin = HARMLESS

    def logs(self) -> dict[str, str]:
        """Return what all processes of each daemon have logged."""
        found = {}
        for name, daemon in self.daemons.items():
            with suppress(FileNotFoundError):
                found[name] = "".join(daemon.log_of(start + 1) for start in range(daemon.starts))
        return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
