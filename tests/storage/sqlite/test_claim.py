"""One process writes an SQLite file, whatever names the file has: real processes, links, and files of version 0.1."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from replication.errors import StoreError
from replication.storage.sqlite.session import SqliteSession
from replication.storage.sqlite.store import SqliteStore
from replication.wire.grammar import InstanceName
from tests.storage.pump import Pump

ROOT = Path(__file__).parents[3]
ME = InstanceName("master")

WRITE = """
import sys
from replication.errors import StoreError
from replication.storage.sqlite.store import SqliteStore
from tests.storage.pump import Pump

print("ready", flush=True)
sys.stdin.readline()
pump = Pump()
store = SqliteStore(sys.argv[1], pump)
try:
    pump.wait(store.open())
    pump.wait(store.claim("master"))
except StoreError as error:
    print(error, flush=True)
else:
    print("claimed", flush=True)
    sys.stdin.readline()
"""

# The first child closes the claim and ends, the second one lives on.
FORK = """
import os, time, warnings
from replication.storage.sqlite import claim

warnings.simplefilter("ignore")
first = os.fork()
if not first:
    for each in [*claim._claims]:
        claim._close(each)
    os._exit(0)
os.waitpid(first, 0)
if not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(60)  # the test kills it; if the test fails, it ends by itself
sys.stdin.readline()
"""

# SQLite changes the mode of a file that no other connection has opened.
LEAVE_WAL = """
import sqlite3, sys
print(*sqlite3.connect(sys.argv[1], timeout=0).execute("PRAGMA journal_mode = DELETE").fetchone())
"""


class Process:
    """Another process that opens the file to write it, once it is let ``go``."""

    def __init__(self, test: SynchronousTestCase, path: str, program: str = WRITE) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, path], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        test.addCleanup(self.kill)
        self.pid = self._process.pid
        self.line()

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go(self) -> None:
        """Let it open the file or, the second time, end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


class ClaimCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = str(self.folder / "facts.db")

    def store(self, path: str = "", *, read_only: bool = False) -> SqliteStore:
        """Open a store that may write, and claim its file."""
        store = SqliteStore(path or self.path, self.pump, read_only=read_only, busy_timeout=0.0)
        self.addCleanup(lambda: self.pump.wait(store.close()))
        self.pump.wait(store.open())
        if not read_only:
            self.pump.wait(store.claim(ME))
        return store

    def close(self, store: SqliteStore) -> None:
        self.pump.wait(store.close())

    def refusal(self, path: str = "") -> str:
        return str(self.assertRaises(StoreError, self.store, path))

    def other_process(self) -> Process:
        """Start another process that has claimed the file."""
        process = Process(self, self.path)
        process.go()
        self.assertEqual(process.line(), "claimed")
        return process

    def files(self) -> list[str]:
        return sorted(each.name for each in self.folder.iterdir())

    def descriptors(self) -> int:
        """Return how many descriptors of the file this process has."""
        found, file = 0, Path(self.path).stat()
        for each in Path("/dev/fd").iterdir():
            with contextlib.suppress(OSError):
                found += os.path.samestat(os.fstat(int(each.name)), file)
        return found


class NameTests(ClaimCase):
    """The claim is the file's, not a name's."""

    def test_trap_34_a_second_process_is_refused_under_every_name_until_the_first_one_is_killed(self) -> None:
        process = self.other_process()
        (self.folder / "symbolic.db").symlink_to("facts.db")
        (self.folder / "hard.db").hardlink_to(self.path)
        (self.folder / "folder").symlink_to(".")
        before = self.files()
        for name in ("facts.db", "symbolic.db", "hard.db", "folder/facts.db"):
            path = str(self.folder / name)
            self.assertEqual(
                self.refusal(path),
                f"database {path!r} is written by process {process.pid} already: stop that, or name another database",
            )
        self.assertEqual(self.files(), before, "a second WAL beside a hard link would damage the database")
        process.kill()
        for name in ("facts.db", "hard.db"):
            self.assertIn(f"{name}' has 2 names (hard links)", self.refusal(str(self.folder / name)))
        (self.folder / "hard.db").unlink()
        self.store(str(self.folder / "symbolic.db"))

    def test_a_file_that_is_mounted_alone_is_refused(self) -> None:
        """As a volume of a container: a WAL in the container's folder was lost with the container."""
        path = str(self.folder / "a \\b.db")
        mount = ["unshare", "--mount", "--map-root-user", "sh", "-c", 'mount --bind "$0" "$0" && exec "$@"', path]
        Path(path).touch()
        try:
            subprocess.run([*mount, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SkipTest(f"no mounts here: {error}") from error
        command = [*mount, sys.executable, "-c", WRITE, path]
        refused = subprocess.run(command, cwd=ROOT, input="\n", capture_output=True, text=True, check=True).stdout
        self.assertIn(f"database {path!r} is mounted as a single file", refused)
        self.store(path)

    def test_files_beside_the_database_do_not_matter(self) -> None:
        process = self.other_process()
        for each in self.files():
            if "claim" in each:
                (self.folder / each).unlink()
        self.assertIn(f"is written by process {process.pid} already", self.refusal())

    def test_nothing_is_left_beside_the_database(self) -> None:
        store = self.store()
        self.pump.wait(store.check())
        self.assertEqual(self.files(), ["facts.db", "facts.db-shm", "facts.db-wal"])
        self.close(store)
        self.assertEqual((self.files(), self.descriptors()), (["facts.db"], 0))

    def test_of_processes_that_start_at_once_one_writes_the_new_file(self) -> None:
        processes = [Process(self, self.path) for _ in range(5)]
        for each in processes:
            each.go()
        lines = [each.line() for each in processes]
        self.assertEqual(lines.count("claimed"), 1, lines)
        winner = processes[lines.index("claimed")]
        self.assertEqual(sum(f"is written by process {winner.pid} already" in each for each in lines), 4, lines)

    def test_a_new_file_has_the_mode_that_sqlite_gives_it(self) -> None:
        sqlite = self.folder / "sqlite.db"
        with contextlib.closing(sqlite3.connect(sqlite)) as database:
            database.execute("CREATE TABLE mine (a)")
        self.store()
        self.assertEqual(Path(self.path).stat().st_mode, sqlite.stat().st_mode)

    def test_a_file_that_is_exchanged_before_sqlite_opens_it_is_refused(self) -> None:
        connect = SqliteSession.connect

        def exchange(session: SqliteSession) -> None:
            Path(self.path).rename(f"{self.path}.away")
            connect(session)

        self.patch(SqliteSession, "connect", exchange)
        self.assertIn("was moved or deleted: restart with the file in its place", self.refusal())

    def test_a_process_without_a_free_descriptor_is_named(self) -> None:
        def refuse(*_: object) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        self.patch(fcntl, "fcntl", refuse)
        self.assertIn("Too many open files; raise the limit of open files (ulimit -n", self.refusal())

    def test_a_disk_without_room_for_another_file_is_waited_for(self) -> None:
        def refuse(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch(os, "open", refuse)
        with self.assertRaises(StoreError) as caught:
            self.store()
        self.assertIn("; make room on the disk, or free inodes (df -i)", str(caught.exception))
        self.assertTrue(caught.exception.temporary)

    def test_a_system_without_such_locks_is_named(self) -> None:
        def refuse(*_: object) -> bytes:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        patch = self.patch(fcntl, "fcntl", refuse)
        for _ in range(2):
            message = self.refusal()
            self.assertIn(f"database {self.path!r} cannot be claimed: ", message)
            self.assertIn("No locks available; does its folder exist on a local disk", message)
            self.assertLessEqual(self.descriptors(), 1)
        patch.restore()
        self.close(self.store())
        self.assertEqual(self.descriptors(), 0)


class OneProcessTests(ClaimCase):
    """Stores of one process.  To close any descriptor of a file drops all of SQLite's locks of the process on it."""

    def is_locked(self) -> bool:
        """Return whether another process finds a lock of SQLite on the file."""
        outcome = subprocess.run(
            [sys.executable, "-c", LEAVE_WAL, self.path], capture_output=True, text=True, check=False
        )
        if outcome.returncode:
            self.assertIn("database is locked", outcome.stderr)
        return outcome.returncode != 0

    def test_a_refused_store_leaves_the_first_one_its_locks(self) -> None:
        first = self.store()
        self.assertIn(f"is written by process {os.getpid()} already", self.refusal())
        self.assertTrue(self.is_locked())
        self.close(first)
        self.assertFalse(self.is_locked())

    def test_a_store_that_closes_leaves_a_reader_its_locks(self) -> None:
        first = self.store()
        reader = self.store(read_only=True)
        self.pump.wait(reader.stored_positions())
        self.close(first)
        self.assertTrue(self.is_locked())
        second = self.store()
        self.close(reader)
        self.close(second)
        self.assertFalse(self.is_locked())

    def test_an_application_keeps_the_locks_of_its_own_connection(self) -> None:
        first = self.store()
        with contextlib.closing(sqlite3.connect(self.path)) as mine:
            mine.execute("SELECT * FROM stream_positions").fetchall()
            self.close(first)
            self.assertTrue(self.is_locked())

    def test_a_store_may_be_opened_again_and_again(self) -> None:
        """Nothing is left open, or claimed."""
        for _ in range(3):
            self.close(self.store())
            self.assertEqual(self.descriptors(), 0)

    def test_attempts_while_another_process_writes_share_one_descriptor(self) -> None:
        process = self.other_process()
        for _ in range(3):
            self.refusal()
            self.assertLessEqual(self.descriptors(), 1)
        process.kill()
        self.close(self.store())
        self.assertEqual(self.descriptors(), 0)

    def test_a_child_of_fork_keeps_no_claim_of_a_parent_that_was_killed(self) -> None:
        """A pool of workers, as of multiprocessing or Celery, may be forked after the start, and outlive its parent."""
        process = Process(self, self.path, f"{WRITE}{FORK}")
        process.go()
        self.assertEqual(process.line(), "claimed")
        process.go()
        child = int(process.line())
        self.addCleanup(os.kill, child, signal.SIGKILL)
        self.assertIn(f"is written by process {process.pid} already", self.refusal())
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self.close(self.store())

    def test_a_process_that_has_just_ended_has_no_id(self) -> None:
        self.store()
        system = fcntl.fcntl

        def answer(descriptor: int, command: int, *rest: bytes) -> bytes | int:
            if command == getattr(fcntl, "F_OFD_GETLK", 92):
                return rest[0]  # the kind is not read
            return system(descriptor, command, *rest)

        patch = self.patch(fcntl, "fcntl", answer)
        self.assertIn("is written by process unknown already", self.refusal())
        patch.restore()


class FormerVersionTests(ClaimCase):
    """Version 0.1 locked a file beside the database: the configured name of the database with ``-claim``."""

    def former(self, path: str, process: str = "4711\n") -> IO[str]:
        """Return a claim file that is locked as by version 0.1."""
        claim = Path(f"{path}-claim").open("a+")  # noqa: SIM115 - the caller closes it
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claim.write(process)
        claim.flush()
        self.addCleanup(claim.close)
        return claim

    def test_a_process_of_version_0_1_is_not_joined(self) -> None:
        for process, shown in (("4711\n", "4711"), ("", "unknown")):
            with self.former(self.path, process):
                self.assertIn(f"is written by process {shown} already: stop that", self.refusal())
                self.assertIn("facts.db-claim", self.files(), "it is in use")
            Path(f"{self.path}-claim").unlink()
        self.close(self.store())

    def test_the_claim_file_of_version_0_1_is_removed_once_its_process_has_ended(self) -> None:
        link = self.folder / "symbolic.db"
        link.symlink_to("facts.db")
        for name in (self.path, str(link)):
            self.former(name).close()
        store = self.store(str(link))
        self.assertEqual(self.files(), ["facts.db", "facts.db-shm", "facts.db-wal", "symbolic.db"])
        self.close(store)

    def test_a_process_of_version_0_1_that_starts_at_the_same_time_is_refused_or_not_joined(self) -> None:
        """It has opened the file before it is removed, or it has made a new one by then."""
        self.former(self.path).close()
        opened = self.enterContext(Path(f"{self.path}-claim").open("a+"))
        store = self.store()
        self.assertRaises(BlockingIOError, fcntl.flock, opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.close(store)

        self.former(self.path).close()
        flock = fcntl.flock

        def exchange(claim: IO[str], how: int) -> None:
            patch.restore()
            Path(f"{self.path}-claim").unlink()
            self.former(self.path, "4712\n")
            flock(claim, how)

        patch = self.patch(fcntl, "flock", exchange)
        self.assertIn("is written by process 4712 already", self.refusal())
        self.assertEqual(Path(f"{self.path}-claim").read_text(), "4712\n")
