"""Faults of databases: full disks, torn files, backups, and servers that end; some of them lose facts, as they may."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import struct
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from replication.bench.processes import BenchError
from tests.chaos.faults import Fault
from tests.chaos.needs import MOUNT, POSTGRES
from tests.chaos.scene import STREAMS, Loss
from tests.system.databases import PostgresDatabase, SqliteDatabase, limit_files

if TYPE_CHECKING:
    from tests.chaos.scene import Scene

WAL_HEADER: Final = 32  # bytes
FRAME_HEADER: Final = 24
SHM_HEADER: Final = 136  # of the file -shm
LOST_COMMITS: Final = "has lost commits of this process"


def any_stream(scene: Scene) -> str:
    """Return a stream."""
    return scene.chance.choice(list(STREAMS))


class OnSqlite(Fault):
    """A fault of a writer's SQLite file."""

    def fits(self, scene: Scene) -> bool:
        return isinstance(scene.homes["orders"], SqliteDatabase)


class OnServer(Fault):
    """A fault of the PostgreSQL server."""

    needs = (POSTGRES,)

    def fits(self, scene: Scene) -> bool:
        return bool(scene.servers)


# ---- faults that lose nothing


class FileLimit(Fault):
    """No file of a daemon may grow: its database has no room for what comes."""

    def inject(self, scene: Scene) -> None:
        name = scene.chance.choice([each for each in scene.daemons if not scene.daemons[each].before])
        self._pid = scene.daemons[name].pid
        self._limit(scene.chance.choice((2**16, 2**18, 2**20)))

    def heal(self, scene: Scene) -> None:
        if any(not each.ended and each.pid == self._pid for each in scene.daemons.values()):
            self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class FullDisk(OnSqlite):
    """The file system of both writers' databases is full."""

    needs = (MOUNT,)
    weight = 4

    def fits(self, scene: Scene) -> bool:
        return scene.plan.small_disk

    def inject(self, scene: Scene) -> None:
        with self._ballast(scene).open("wb", buffering=0) as file:
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def heal(self, scene: Scene) -> None:
        self._ballast(scene).unlink(missing_ok=True)

    def _ballast(self, scene: Scene) -> Path:
        return scene.folder / "disk/ballast"


class TornWal(OnSqlite):
    """After a SIGKILL the WAL ends with a part of a commit that nothing has acknowledged."""

    weight = 4

    def inject(self, scene: Scene) -> None:
        stream = any_stream(scene)
        name, wal = STREAMS[stream], _wal(scene, stream)
        scene.held.add(name)
        scene.kill(name)
        _, valid = _frames(wal)
        if valid:  # a start on a full disk may leave a WAL with commits, and -shm without their number
            frame = FRAME_HEADER + _page_size(wal)
            data = wal.read_bytes()
            torn = data[WAL_HEADER : WAL_HEADER + frame * scene.chance.randrange(1, 4)]
            end = WAL_HEADER + valid * frame
            garbage = random.Random(len(data)).randbytes(len(torn))
            # A full disk tears it even earlier.
            with suppress(OSError), wal.open("r+b", buffering=0) as file:
                file.seek(end)
                file.write((torn if scene.chance.random() < 0.5 else garbage)[: scene.chance.randrange(1, len(torn))])
        scene.held.discard(name)
        scene.start(name)


class RestoreFollower(Fault):
    """A follower's database is deleted, or replaced by an older copy of it."""

    weight = 2

    def inject(self, scene: Scene) -> None:
        followers = [name for name, each in scene.followers.items() if each.database is None]
        name = scene.chance.choice(followers)
        database = SqliteDatabase(scene.folder)
        database.file, database.backup = scene.followers[name].file, scene.folder / f"{name}-backup.db"
        with suppress(sqlite3.OperationalError):
            database.back_up()
        scene.act(scene.chance.uniform(0.5, 3))
        scene.held.add(name)
        scene.kill(name)
        if scene.chance.random() < 0.5 and database.backup.exists():
            database.restore()
        else:
            database.empty()
        scene.held.discard(name)
        scene.start(name)


class ServerAway(OnServer):
    """The server is stopped, as for maintenance or by a crash, and started later."""

    weight = 2

    def inject(self, scene: Scene) -> None:
        with suppress(BenchError):  # it has stopped itself, by another fault
            scene.servers[0].stop(scene.chance.choice(("fast", "immediate")))
            scene.kills["PostgreSQL"] += 1

    def heal(self, scene: Scene) -> None:
        if ask_server(scene, "SELECT 1") is None:  # else the end of another fault has started it
            restart_server(scene)


class KillSession(OnServer):
    """SIGKILL of a session of the server: it ends all others and recovers."""

    weight = 2

    def inject(self, scene: Scene) -> None:
        if pids := _sessions(scene):
            scene.kills["PostgreSQL"] += 1
            with suppress(ProcessLookupError):
                os.kill(scene.chance.choice(pids), signal.SIGKILL)
            scene.act(1)


class StopSessions(OnServer):
    """SIGSTOP of the server's sessions, and SIGCONT."""

    def inject(self, scene: Scene) -> None:
        self._pids = _sessions(scene)
        self._signal(signal.SIGSTOP)

    def heal(self, scene: Scene) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for each in self._pids:
            with suppress(ProcessLookupError):
                os.kill(each, number)


class FullServerDisk(OnServer):
    """No file of the server may grow beyond the middle of a WAL segment: it crashes, and may not recover."""

    def inject(self, scene: Scene) -> None:
        server = scene.servers[0]
        pid_file = server.folder / "data/postmaster.pid"
        if pid_file.exists():
            postmaster = int(pid_file.read_text().split()[0])
            limit_files(server, [postmaster, *_sessions(scene)], f"{scene.chance.randrange(2**20, 2**24)}:")

    def heal(self, scene: Scene) -> None:
        restart_server(scene)  # without the limit


# ---- faults that lose facts


class LosesFacts(Fault):
    """A fault after which acknowledged facts are gone, and allowed to be; `prepare` comes some time before."""

    def prepare(self, scene: Scene) -> None:
        """Begin: from now on, what is acknowledged may be lost."""

    def note(self, scene: Scene, stream: str, begin: float, kept: list[tuple[object, ...]]) -> None:
        """Note the loss, before the writer is started again."""
        scene.act(0.5)  # answers of the process that has ended arrive
        scene.losses.append(Loss(stream, begin, time.monotonic(), frozenset(kept)))


class RestoreStopped(LosesFacts):
    """A writer's database is replaced by a backup while the writer is down."""

    weight = 2

    def prepare(self, scene: Scene) -> None:
        self._stream = any_stream(scene)
        self._begin = time.monotonic()
        scene.homes[self._stream].back_up()

    def inject(self, scene: Scene) -> None:
        name, home = STREAMS[self._stream], scene.homes[self._stream]
        scene.held.add(name)
        scene.kill(name)
        if isinstance(home, SqliteDatabase):
            SqliteDatabase.restore(home)
        else:
            home.restore()
        self.note(scene, self._stream, self._begin, home.backup_rows())
        scene.held.discard(name)
        scene.start(name)


class RestoreRunning(RestoreStopped):
    """The backup is restored into the database while the writer runs: the writer ends."""

    def inject(self, scene: Scene) -> None:
        name, home = STREAMS[self._stream], scene.homes[self._stream]
        scene.held.add(name)
        appends_again(scene, self._stream)
        home.restore()
        scene.until(lambda: scene.daemons[name].ended, f"{name} notices that its database has lost commits", 60)
        self.note(scene, self._stream, self._begin, home.backup_rows())
        scene.keep_up_with(name)


class CutWal(OnSqlite, LosesFacts):
    """After a SIGKILL the last commits of the WAL are gone, as if the disk had not kept what it had acknowledged."""

    weight = 2

    def inject(self, scene: Scene) -> None:
        stream = any_stream(scene)
        name, wal, home = STREAMS[stream], _wal(scene, stream), scene.homes[stream]
        assert isinstance(home, SqliteDatabase)
        scene.held.add(name)
        scene.kill(name)
        copied, valid = _frames(wal)
        if valid:
            keep = scene.chance.randrange(max(copied, valid - 40), valid + 1)
            os.truncate(wal, WAL_HEADER + keep * (FRAME_HEADER + _page_size(wal)) + scene.chance.randrange(20))
            Path(f"{home.file}-shm").unlink(missing_ok=True)
        with closing(sqlite3.connect(home.file)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        self.note(scene, stream, 0.0, home.rows())
        scene.held.discard(name)
        scene.start(name)


class FailOver(OnServer, LosesFacts):
    """The standby, which lacks the last commits, is promoted; the primary is gone."""

    weight = 30

    def fits(self, scene: Scene) -> bool:
        return len(scene.servers) > 1 and scene.servers[0] is not scene.servers[1] and not scene.failed_over

    def prepare(self, scene: Scene) -> None:
        primary, standby = scene.servers
        self._begin = time.monotonic()
        ((reached,),) = primary.sql("SELECT pg_current_wal_flush_lsn()")
        has_it = f"SELECT true WHERE pg_last_wal_replay_lsn() >= '{reached}'"
        scene.until(lambda: standby.sql(has_it), "the standby has what was acknowledged until now", 60)
        standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
        standby.sql("SELECT pg_reload_conf()")
        scene.until(lambda: not primary.sql("SELECT pid FROM pg_stat_replication"), "the standby is cut off", 60)

    def inject(self, scene: Scene) -> None:
        primary, standby = scene.servers
        names = list(STREAMS.values())
        scene.held |= {*names}
        for stream in STREAMS:
            appends_again(scene, stream)
        kept = {}
        for stream, home in scene.homes.items():
            assert isinstance(home, PostgresDatabase)
            home.server, home.url = standby, standby.url(home.database)
            kept[stream] = home.rows()
        primary.stop("immediate")
        scene.kills["PostgreSQL"] += 1
        standby.sql("SELECT pg_promote()")
        scene.failed_over = True
        scene.servers.reverse()
        copy = scene.followers["copy"].database
        assert copy is not None
        copy.server = standby
        for stream, name in STREAMS.items():
            scene.until(lambda name=name: scene.daemons[name].ended, f"{name} notices the failover", 60)  # type: ignore[misc]
            self.note(scene, stream, self._begin, kept[stream])
            scene.keep_up_with(name)


def appends_again(scene: Scene, stream: str) -> None:
    """Wait until the process that writes a stream now has acknowledged something: that is lost next."""
    begin, name = time.monotonic(), STREAMS[stream]

    def has() -> bool:
        if scene.daemons[name].ended:
            scene.start(name)
        return any(each.tried > begin and each.ids for each in scene.ledger(stream).values())

    scene.until(has, f"{name} appends")


def ask_server(scene: Scene, sql: str) -> list[tuple[Any, ...]] | None:
    """Return the rows of a query; None while the server is away or recovers."""
    import psycopg

    try:
        return scene.servers[0].sql(sql)
    except psycopg.OperationalError:
        return None


def restart_server(scene: Scene) -> None:
    """Start the server, whether it runs or not."""
    with suppress(BenchError):  # it does not
        scene.servers[0].stop("immediate")
    scene.servers[0].start()


def empty_wals(scene: Scene) -> None:
    """Move all that the WALs have into the databases, so that a cut cannot take it."""
    for home in scene.homes.values():
        if isinstance(home, SqliteDatabase):
            with closing(sqlite3.connect(home.file, timeout=30)) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _sessions(scene: Scene) -> list[int]:
    """Return the server's processes that serve daemons; none while it is away or recovers."""
    sql = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'replication %'"
    return [pid for (pid,) in ask_server(scene, sql) or ()]


def _wal(scene: Scene, stream: str) -> Path:
    home = scene.homes[stream]
    assert isinstance(home, SqliteDatabase)
    return Path(f"{home.file}-wal")


def _page_size(wal: Path) -> int:
    with wal.open("rb") as file:
        (size,) = struct.unpack(">I", file.read(12)[8:])
    return int(size)


def _frames(wal: Path) -> tuple[int, int]:
    """Return how many frames of a WAL may be in the database already, and how many are valid.

    The file ``-shm`` has both; no frame before the first number may be taken away.
    """
    path = Path(str(wal).removesuffix("-wal") + "-shm")
    if not wal.exists() or not path.exists():
        return 0, 0
    if len(shm := path.read_bytes()) < SHM_HEADER:
        return 0, 0
    (valid,), (copied,), (begun,) = (struct.unpack_from("=I", shm, at) for at in (16, 96, 128))
    return max(copied, begun), valid


FAULTS: Final[tuple[type[Fault], ...]] = (
    FileLimit,
    FullDisk,
    TornWal,
    RestoreFollower,
    ServerAway,
    KillSession,
    StopSessions,
    FullServerDisk,
)
LOSSES: Final[tuple[type[LosesFacts], ...]] = (RestoreStopped, RestoreRunning, CutWal, FailOver)
