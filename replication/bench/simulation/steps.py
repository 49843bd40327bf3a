"""The steps of a run: work and faults, each with plain values, so that a list of them is a plan.

A step without anything to act on does nothing.  A number picks one of some things, counted round and round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from replication.bench.simulation.disk import Operation
from replication.bench.simulation.writing import MasterHost, RollBackError
from replication.wire.grammar import StreamName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from replication.bench.simulation.host import Host
    from replication.bench.simulation.network import Connection, Pipe
    from replication.bench.simulation.world import World
    from replication.bench.simulation.writing import Job

    Draw = Callable[[Random], Any]

T = TypeVar("T")


class Kind(NamedTuple):
    """A kind of step: what does it, how often it is drawn, its values; ``fault`` if a plan may lack it."""

    function: Callable[..., None]
    weight: int
    values: Sequence[Draw]
    fault: bool


KINDS: Final[dict[str, Kind]] = {}


def step(weight: int, *values: Draw, fault: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function, which takes the world and these values, a kind of step."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        KINDS[function.__name__] = Kind(function, weight, values, fault)
        return function

    return register


def one_of(*values: object) -> Draw:
    """Return a function that draws one of ``values``."""
    return lambda chance: values[int(chance.random() * len(values))]


def between(least: int, most: int) -> Draw:
    """Return a function that draws a number."""
    return lambda chance: least + int(chance.random() * (most - least + 1))


# Facts as numbers of rows, and how much those are filled: no line holds the longest.
_rows, _size, _many = between(0, 5), one_of(0, 0, 0, 40, 240), between(1, 4)


def contents(chance: Random) -> list[list[int]]:
    """Draw some facts."""
    return [[_rows(chance), _size(chance)] for _ in range(_many(chance))]


picks = between(0, 7)
flag = one_of(False, True)


def do(world: World, name: str, *values: Any) -> None:
    """Do one step of a plan."""
    KINDS[name].function(world, *values)


# ---- writing


@step(5, picks, contents, flag, fault=False)
def append(world: World, which: int, facts: Sequence[tuple[int, int]], turn: bool) -> None:
    """Append facts; without a ``turn``, the next step comes before the reactor runs."""
    for master, stream in _pick(_streams(world), which):
        master.append(stream, _contents(world, facts))
        _done(world, turn)


@step(5, picks, contents, one_of([], [], ["x"], ["x", "y"]), fault=False)
def reserve(world: World, which: int, facts: Sequence[tuple[int, int]], caches: Sequence[str]) -> None:
    """Begin a block, which stays open."""
    for master, stream in _pick(_streams(world), which):
        # Without a sequence, only one master writes a stream that all have: copies do not distinguish their IDs.
        master.write(stream, _contents(world, facts), caches if master is world.hosts[0] or world.linear else ())
        _done(world)


@step(1, picks, between(2, 10), flag)
def spike(world: World, which: int, times: int, stalls: bool) -> None:
    """Append more than the queue of a peer that does not read."""
    for master, stream in _pick(_streams(world), which):
        if stalls:
            for connection in _pick(_alive(world), which):
                connection.down.held = True
        for _ in range(times):
            master.append(stream, world.rows(1, 1, 2))
            _done(world)


@step(6, picks, one_of("commit", "commit", "roll back", "cancel", "drop"), flag, fault=False)
def finish(world: World, which: int, how: str, turn: bool) -> None:
    """End a block: by commit, error, cancellation or garbage collection."""
    for job in _pick(_jobs(world, is_open=True), which):
        match how:
            case "commit":
                job.outcome.callback(None)
            case "roll back":
                job.outcome.errback(RollBackError())
            case "cancel":
                job.running.cancel()
            case _:
                job.drop()
        _done(world, turn)


@step(1, picks)
def stop_waiting(world: World, which: int) -> None:
    """Cancel a task during its commit."""
    for job in _pick(_jobs(world, is_open=False), which):
        job.running.cancel()
        _done(world)


# ---- disks


@step(2, picks, flag, flag)
def disk_becomes(world: World, which: int, held: bool, failing: bool) -> None:
    """Let the operations of a disk wait, or fail."""
    for host in _pick(world.hosts, which):
        host.store.held, host.store.failing = held, failing
        _done(world)


@step(2, picks, between(0, 9))
def disk_fails_once(world: World, which: int, works_for: int) -> None:
    """Let one operation of a disk fail, after some that succeed."""
    for host in _pick(world.hosts, which):
        host.store.works_for = works_for


@step(3, picks, fault=False)
def back_up(world: World, which: int) -> None:
    """Take a backup of the disk of a worker; in a world that restores, of any process.

    A master whose backup has a stream without facts is not the one that was followed (docs/protocol/following.md E7).
    """
    for host in _pick(_restorable(world), which):
        if not any(isinstance(each, MasterHost) and each.lacks_facts() for each in host.sharing):
            host.save()


@step(4, picks)
def restore(world: World, which: int) -> None:
    """Replace a disk by its backup."""
    for host in _pick([each for each in _restorable(world) if each.backup is not None], which):
        host.restore()
        _done(world)


@step(4, picks, picks, flag, fault=False)
def disk_answers(world: World, which: int, first: int, fails: bool) -> None:
    """End one waiting operation of a disk, in any order."""
    for store in _pick([each.store for each in world.hosts if each.store.waiting], which):
        for operation in _pick(store.waiting, first):
            store.release(operation, Operation.fail if fails else Operation.succeed)
            _done(world)


@step(2, picks, fault=False)
def disk_works(world: World, which: int) -> None:
    """End all waiting operations of a disk."""
    for host in _pick([each for each in world.hosts if each.store.held], which):
        host.store.release_all()
        _done(world)


# ---- processes


@step(2, picks, flag, between(0, 3))
def kill(world: World, which: int, power: bool, lands: int) -> None:
    """Kill a process; some of its commits reach the disk."""
    for host in _pick(_running(world), which):
        for operation in host.store.waiting[:lands]:
            if operation.what.startswith("commit"):
                operation.land()
        host.kill(power=power)
        _done(world)


@step(1, picks)
def stop(world: World, which: int) -> None:
    """Stop a process."""
    for host in _pick(_running(world), which):
        host.stop()
        _done(world)


@step(4, picks, fault=False)
def start(world: World, which: int) -> None:
    """Start a process."""
    for host in _pick([each for each in world.hosts if not each.running], which):
        host.start()
        _done(world)


# ---- links


@step(2, picks, one_of(0, 1, 1))
def hold_pipe(world: World, which: int, way: int) -> None:
    """Let a process stop reading: a master, or more often a worker."""
    for connection in _pick(_alive(world), which):
        connection.pipes[way].held = True


@step(1, flag, flag)
def new_connections_become(world: World, held_up: bool, held_down: bool) -> None:
    """Delay the first bytes of each connection."""
    world.network.new_held = held_up, held_down


@step(3, picks, between(1, 600), fault=False)
def deliver(world: World, which: int, size: int) -> None:
    """Deliver some bytes, which may end inside a line."""
    for pipe in _pick([each for each in _held_pipes(world) if each.carried], which):
        pipe.deliver(size)
        _done(world)


@step(2, picks, fault=False)
def release_pipe(world: World, which: int) -> None:
    """Let a process read again."""
    for pipe in _pick(_held_pipes(world), which):
        pipe.held = False
        _done(world)


@step(1, one_of(7, 50, 1 << 20))
def read_size(world: World, size: int) -> None:
    """Set how many bytes one read brings at most."""
    world.network.read_size = size


@step(2, picks, flag, flag)
def cut(world: World, which: int, worker_knows: bool, master_knows: bool) -> None:
    """Break a connection; one end, both or none is notified."""
    for connection in _pick(_alive(world), which):
        connection.cut([connection.client] * worker_knows + [connection.server] * master_knows)
        _done(world)


@step(1, picks)
def unplug(world: World, which: int) -> None:
    """Drop everything from and to a host."""
    for host in _pick(world.hosts, which):
        world.network.unplug(host.name)
        _done(world)


@step(1, fault=False)
def plug(world: World) -> None:
    """Connect all hosts again."""
    if world.network.unplugged:
        world.network.unplugged.clear()
        _done(world)


# ---- workers


@step(2, picks, flag, flag, one_of(1, 2, 5, 1_000))
def catch_up_becomes(world: World, which: int, held: bool, fail: bool, rows: int) -> None:
    """Let pages wait or fail; their limit falls inside facts."""
    for worker in _pick([*world.workers.values()], which):
        worker.pages_held, worker.pages_fail, worker.page_rows = held, fail, rows


@step(3, picks, flag, fault=False)
def page_comes(world: World, which: int, fails: bool) -> None:
    """Answer one request for a page."""
    for request in _pick(world.page_requests, which):
        if fails:
            request.fail("502")
        else:
            request.deliver_answer()
        _done(world)


@step(3, one_of(True, True, False), one_of(True, False, False), one_of("a", "a", "caches"))
def functions_become(world: World, raising: bool, hanging: bool, stream: str) -> None:
    """Let the application's functions of a stream raise, or hang."""
    for worker in world.workers.values():
        worker.release_functions()
        worker.raising |= {stream} if raising else set()
        worker.hanging |= {stream} if hanging else set()
    _done(world)


@step(2, picks, picks, between(-2, 2), one_of(1.0, 10.0), fault=False)
def wait_for(world: World, which: int, other: int, ahead: int, timeout: float) -> None:
    """Wait for a position near the published one."""
    for worker in _pick([each for each in world.workers.values() if each.running], which):
        masters = world.masters.values()
        streams = [(each, StreamName(name)) for each in masters for name in each.streams if worker.follows(name)]
        for master, stream in _pick(streams, other):
            worker.wait_for(stream, master.name, master.histories[stream].published + ahead, timeout)
            _done(world)


# ---- time


@step(4, one_of(0.1, 0.3, 0.3, 1.0, 1.0, 3.0, 3.0, 11.0, 11.0, 40.0), fault=False)
def advance(world: World, seconds: float) -> None:
    """Let time pass."""
    world.advance(seconds)


@step(1, one_of(*[0.3] * 9, 30.0), fault=False)
def heal(world: World, quiet: float) -> None:
    """End all faults: every follower soon is complete (I10), and then quiet (I11) for so many seconds."""
    world.heal()
    world.converge()
    world.check_quiet(quiet)


# ---- inside


def _done(world: World, turn: bool = True) -> None:
    if turn:
        world.turn()


def _pick(things: Sequence[T], which: int) -> Sequence[T]:
    """Return one of ``things``; none if there is none."""
    return [things[which % len(things)]] if things else ()


def _running(world: World) -> list[Host]:
    return [each for each in world.hosts if each.running]


def _restorable(world: World) -> list[Host]:
    return world.hosts if world.restores else [*world.workers.values()]


def _streams(world: World) -> list[tuple[MasterHost, StreamName]]:
    """Return the masters that can write now, with each of their streams."""
    masters = [each for each in world.masters.values() if each.running]
    return [(each, StreamName(stream)) for each in masters for stream in each.streams]


def _contents(world: World, facts: Sequence[tuple[int, int]]) -> list[list[list[object]]]:
    return [[world.row(size) for _ in range(rows)] for rows, size in facts]


def _jobs(world: World, *, is_open: bool) -> list[Job]:
    jobs = [job for master in world.masters.values() for job in master.jobs]
    return [job for job in jobs if not job.ended and job.open is is_open]


def _alive(world: World) -> list[Connection]:
    return [each for each in world.network.connections if not each.dead]


def _held_pipes(world: World) -> list[Pipe]:
    return [pipe for each in _alive(world) for pipe in each.pipes if pipe.held and not pipe.target.resting]
