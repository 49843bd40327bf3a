"""Random tests of masters and workers with all faults: kills, cut links, disks that hang or fail.

A failure prints its steps and the lines on the wire.
``test_faults.py`` and ``test_traps.py`` have the interesting single cases.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar, TypeVar

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from replication.wire.grammar import StreamName
from tests.simulation.disk import Operation
from tests.simulation.world import MASTERS, WORKERS, World
from tests.simulation.writing import RollBackError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from unittest import TestCase

    from tests.simulation.following import WorkerHost
    from tests.simulation.host import Host
    from tests.simulation.network import Connection, Pipe
    from tests.simulation.writing import Job, MasterHost

T = TypeVar("T")

STEPS = 80
STEPS_BEFORE_HEALING = 15  # at least: else everything is always well

picks = st.integers(0, 7)  # which of some things: counted round and round
# Facts as numbers of rows, and how much those are filled: no line holds the longest.
contents = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 0, 40, 240])), min_size=1, max_size=4)


def pick(things: Sequence[T], which: int) -> T:
    """Return one of ``things``."""
    return things[which % len(things)]


class Following(RuleBasedStateMachine):
    """One master, and a worker of each kind."""

    masters: ClassVar[Mapping[str, Sequence[str]]] = MASTERS
    workers: ClassVar[Mapping[str, tuple[Sequence[str] | None, Sequence[str]]]] = WORKERS
    relays: ClassVar[Mapping[str, str]] = {}
    without_copies: ClassVar[Sequence[str]] = ()
    linear: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.masters, self.workers, self.relays, self.without_copies, self.linear)
        self.steps = 0  # since everything was well
        self.world.__enter__()

    def teardown(self) -> None:
        """At the end all faults are healed, and everything must converge."""
        try:
            if sys.exc_info()[0] is None and self.steps:
                self.heal()
        finally:
            note("\n".join(self.world.trace))
            self.world.__exit__()

    # ---- writing

    @precondition(lambda self: self.streams())
    @rule(which=picks, facts=contents, turn=st.booleans())
    def append(self, which: int, facts: list[tuple[int, int]], turn: bool) -> None:
        """Append facts; without a ``turn``, the next step comes before the reactor runs."""
        master, stream = pick(self.streams(), which)
        master.append(stream, self.rows(facts))
        self.done(turn)

    @precondition(lambda self: self.streams())
    @rule(which=picks, facts=contents, caches=st.sampled_from([(), (), ("x",), ("x", "y")]))
    def reserve(self, which: int, facts: list[tuple[int, int]], caches: tuple[str, ...]) -> None:
        master, stream = pick(self.streams(), which)
        # Without a sequence, only one master writes a stream that all have: copies do not distinguish their IDs.
        master.write(stream, self.rows(facts), caches if master is self.hosts[0] or self.linear else ())
        self.done()

    @precondition(lambda self: self.streams())
    @rule(which=picks, times=st.integers(2, 10), stalls=st.booleans())
    def spike(self, which: int, times: int, stalls: bool) -> None:
        """Append more than the queue of a peer that does not read."""
        master, stream = pick(self.streams(), which)
        if stalls and self.alive():
            pick(self.alive(), which).down.held = True
        for _ in range(times):
            master.append(stream, self.world.rows(1, 1, 2))
            self.done()

    @precondition(lambda self: self.jobs(is_open=True))
    @rule(which=picks, how=st.sampled_from(["commit", "commit", "roll back", "cancel", "drop"]), turn=st.booleans())
    def finish(self, which: int, how: str, turn: bool) -> None:
        """A block ends: by commit, error, cancellation or garbage collection."""
        job = pick(self.jobs(is_open=True), which)
        match how:
            case "commit":
                job.outcome.callback(None)
            case "roll back":
                job.outcome.errback(RollBackError())
            case "cancel":
                job.running.cancel()
            case "drop":
                job.drop()
        self.done(turn)

    @precondition(lambda self: self.jobs(is_open=False))
    @rule(which=picks)
    def stop_waiting(self, which: int) -> None:
        """A task is cancelled during its commit."""
        pick(self.jobs(is_open=False), which).running.cancel()
        self.done()

    # ---- disks

    @rule(which=picks, held=st.booleans(), failing=st.booleans())
    def disk_becomes(self, which: int, held: bool, failing: bool) -> None:
        store = pick(self.hosts, which).store
        store.held, store.failing = held, failing
        self.done()

    @precondition(lambda self: any(each.store.waiting for each in self.hosts))
    @rule(which=picks, first=picks, fails=st.booleans())
    def disk_answers(self, which: int, first: int, fails: bool) -> None:
        """One waiting call of a disk ends, in any order."""
        store = pick([each.store for each in self.hosts if each.store.waiting], which)
        store.release(pick(store.waiting, first), Operation.fail if fails else Operation.succeed)
        self.done()

    @precondition(lambda self: any(each.store.held for each in self.hosts))
    @rule(which=picks)
    def disk_works(self, which: int) -> None:
        pick([each.store for each in self.hosts if each.store.held], which).release_all()
        self.done()

    # ---- processes

    @precondition(lambda self: self.running())
    @rule(which=picks, power=st.booleans(), lands=st.integers(0, 3))
    def kill(self, which: int, power: bool, lands: int) -> None:
        """A process is killed; some of its commits reach the disk."""
        host = pick(self.running(), which)
        for operation in host.store.waiting[:lands]:
            if operation.what.startswith("commit"):
                operation.land()
        host.kill(power=power)
        self.done()

    @precondition(lambda self: self.running())
    @rule(which=picks)
    def stop(self, which: int) -> None:
        pick(self.running(), which).stop()
        self.done()

    @precondition(lambda self: len(self.running()) < len(self.hosts))
    @rule(which=picks)
    def start(self, which: int) -> None:
        pick([each for each in self.hosts if not each.running], which).start()
        self.done()

    # ---- links

    @precondition(lambda self: self.alive())
    @rule(which=picks, way=st.sampled_from([0, 1, 1]))
    def hold_pipe(self, which: int, way: int) -> None:
        """A process stops reading: a master, or more often a worker."""
        pick(self.alive(), which).pipes[way].held = True

    @rule(held_up=st.booleans(), held_down=st.booleans())
    def new_connections_become(self, held_up: bool, held_down: bool) -> None:
        """The first bytes of a connection are delayed."""
        self.world.network.new_held = held_up, held_down
        self.steps += 1

    @precondition(lambda self: any(each.carried for each in self.held_pipes()))
    @rule(which=picks, size=st.integers(1, 600))
    def deliver(self, which: int, size: int) -> None:
        """Some bytes are delivered, which may end inside a line."""
        pick([each for each in self.held_pipes() if each.carried], which).deliver(size)
        self.done()

    @precondition(lambda self: self.held_pipes())
    @rule(which=picks)
    def release_pipe(self, which: int) -> None:
        pick(self.held_pipes(), which).held = False
        self.done()

    @rule(size=st.sampled_from([1, 7, 100, 1 << 20]))
    def read_size(self, size: int) -> None:
        self.world.network.read_size = size

    @precondition(lambda self: self.alive())
    @rule(which=picks, worker_knows=st.booleans(), master_knows=st.booleans())
    def cut(self, which: int, worker_knows: bool, master_knows: bool) -> None:
        """A connection breaks; one end, both or none is notified."""
        connection = pick(self.alive(), which)
        notified = [connection.client] * worker_knows + [connection.server] * master_knows
        connection.cut(notified)
        self.done()

    @rule(which=picks)
    def unplug(self, which: int) -> None:
        self.world.network.unplug(pick(self.hosts, which).name)
        self.done()

    @precondition(lambda self: self.world.network.unplugged)
    @rule()
    def plug(self) -> None:
        self.world.network.unplugged.clear()
        self.done()

    # ---- workers

    @rule(which=picks, held=st.booleans(), fail=st.booleans(), rows=st.sampled_from([1, 2, 5, 1_000]))
    def catch_up_becomes(self, which: int, held: bool, fail: bool, rows: int) -> None:
        """Pages are delayed or fail; their limit falls inside facts."""
        worker = pick(self.all_workers, which)
        worker.pages_held, worker.pages_fail, worker.page_rows = held, fail, rows
        self.steps += 1

    @precondition(lambda self: self.world.page_requests)
    @rule(which=picks, fails=st.booleans())
    def page_comes(self, which: int, fails: bool) -> None:
        request = pick(self.world.page_requests, which)
        if fails:
            request.fail("502")
        else:
            request.deliver_answer()
        self.done()

    @rule(raising=st.booleans(), hanging=st.booleans(), stream=st.sampled_from(["a", "caches"]))
    def functions_become(self, raising: bool, hanging: bool, stream: str) -> None:
        """The application's functions raise or hang."""
        for worker in self.all_workers:
            worker.release_functions()
            worker.raising |= {stream} if raising else set()
            worker.hanging |= {stream} if hanging else set()
        self.done()

    @precondition(lambda self: self.running_workers())
    @rule(which=picks, other=picks, ahead=st.integers(-2, 2), timeout=st.sampled_from([1.0, 10.0]))
    def wait_for(self, which: int, other: int, ahead: int, timeout: float) -> None:
        worker = pick(self.running_workers(), which)
        masters = self.world.masters.values()
        followed = [(master, StreamName(each)) for master in masters for each in master.streams if worker.follows(each)]
        master, stream = pick(followed, other)
        worker.wait_for(stream, master.name, master.histories[stream].published + ahead, timeout)
        self.done()

    # ---- time

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 3.0, 11.0, 40.0]))
    def advance(self, seconds: float) -> None:
        self.world.trace.append(f"---- {seconds} s")
        self.world.advance(seconds)

    @precondition(lambda self: self.steps > STEPS_BEFORE_HEALING)
    @rule()
    def heal(self) -> None:
        """Without faults, every follower soon is complete (I10), and then quiet (I11)."""
        self.world.heal()
        self.world.converge()
        self.world.check_quiet()
        self.steps = 0

    # ---- inside

    def done(self, turn: bool = True) -> None:
        self.steps += 1
        if turn:
            self.world.turn()

    @property
    def hosts(self) -> list[Host]:
        return self.world.hosts

    @property
    def all_workers(self) -> list[WorkerHost]:
        return [*self.world.workers.values()]

    def running(self) -> list[Host]:
        return [each for each in self.hosts if each.running]

    def streams(self) -> list[tuple[MasterHost, StreamName]]:
        """Return the masters that can write now, with each of their streams."""
        masters = [each for each in self.world.masters.values() if each.running]
        return [(each, StreamName(stream)) for each in masters for stream in each.streams]

    def running_workers(self) -> list[WorkerHost]:
        return [each for each in self.all_workers if each.running]

    def rows(self, facts: list[tuple[int, int]]) -> list[list[list[object]]]:
        return [[self.world.row(size) for _ in range(rows)] for rows, size in facts]

    def jobs(self, *, is_open: bool) -> list[Job]:
        all_jobs = [job for master in self.world.masters.values() for job in master.jobs]
        return [job for job in all_jobs if not job.ended and job.open is is_open]

    def alive(self) -> list[Connection]:
        return [each for each in self.world.network.connections if not each.dead]

    def held_pipes(self) -> list[Pipe]:
        return [pipe for each in self.alive() for pipe in each.pipes if pipe.held and not pipe.target.resting]


class FollowingTwo(Following):
    """Two masters; each worker follows both."""

    masters: ClassVar = {"master": ("a",), "second": ("b", "c")}
    workers: ClassVar = {"copy": (None, ()), "apply": (None, ("a", "b")), "few": (("b", "c", "caches"), ("c",))}


class FollowingRelays(Following):
    """Workers behind one relay, and behind two."""

    workers: ClassVar = {
        "relay": (None, ()),
        "second": (None, ()),
        "copy": (None, ()),
        "apply": (None, ("a", "caches")),
        "few": (("b",), ()),
    }
    relays: ClassVar = {"second": "relay", "copy": "relay", "apply": "second", "few": "second"}


class FollowingPlainRelay(Following):
    """Workers behind a relay that stores nothing, of two masters."""

    masters: ClassVar = {"master": ("a",), "second": ("b",)}
    workers: ClassVar = {"relay": (None, ()), "copy": (None, ()), "apply": (None, ("a", "b"))}
    relays: ClassVar = {"copy": "relay", "apply": "relay"}
    without_copies: ClassVar = ("relay",)


class FollowingLinear(Following):
    """Three writers of one stream, whose facts are applied in the order of their tokens (I17).

    These faults were put back in by hand.  ``-k Linear --hypothesis-seed=1`` finds each, here and behind a relay:

    - facts of several writers that are not sorted (``streams/merge.py``): runs 8 and 4
    - a writer that is passed because it has nothing ready (``streams/merge.py``): runs 4 and 4
    - a writer that is not waited for while its connection is lost (``follower/merge.py``): runs 4 and 4
    - a writer that is not waited for after a start of the worker (``follower/merge.py``): behind a relay only, run 9
    """

    masters: ClassVar = {"master": ("a",), "second": ("a",), "third": ("a",)}
    workers: ClassVar = {"copy": (None, ()), "apply": (None, ("a",))}
    linear: ClassVar = ("a",)


class FollowingLinearRelay(Following):
    """Two writers of one stream, whose facts are applied in the order of their tokens, behind a relay too."""

    masters: ClassVar = {"master": ("a",), "second": ("a",)}
    workers: ClassVar = {"relay": (None, ()), "apply": (None, ("a",)), "near": (None, ("a",))}
    relays: ClassVar = {"apply": "relay"}
    linear: ClassVar = ("a",)


def simulated(case: type[Following]) -> type[TestCase]:
    """Return the test case of a simulation."""
    half = settings().max_examples // 2  # of the profile's: each of them takes half a second
    case.TestCase.settings = settings(max_examples=half, stateful_step_count=STEPS)
    return case.TestCase


TestFollowing = simulated(Following)
TestFollowingTwo = simulated(FollowingTwo)
TestFollowingRelays = simulated(FollowingRelays)
TestFollowingPlainRelay = simulated(FollowingPlainRelay)
TestFollowingLinear = simulated(FollowingLinear)
TestFollowingLinearRelay = simulated(FollowingLinearRelay)
