"""One run: a seed gives a plan, the plan runs in a world; a plan that fails is made shorter (docs/simulation.md)."""

from __future__ import annotations

import gc
import json
from functools import cache
from itertools import accumulate
from random import Random
from traceback import format_exc
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from replication.bench.simulation.steps import KINDS, do
from replication.bench.simulation.world import MASTERS, WORKERS, World

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

USUAL_STEPS: Final = 11.0  # the mean of an exponential distribution: most plans are short, and some are long
WITH_FAULT: Final = 0.5  # of the plans have a kind of fault
SHRINKING_RUNS: Final = 2_000  # at most

RETENTION: Final[Mapping[str, Any]] = {
    "masters": {"master": ("a",)},
    "workers": {
        "relay": (None, ()),
        "plain": (None, ()),
        "copy": (None, ()),
        "apply": (None, ("a",)),
        "far": (None, ()),
    },
    "relays": {"copy": "relay", "apply": "plain", "far": "plain"},
    "without_copies": ("plain",),
    "retention": "1s",
}

# What World() is called with, and how often a seed has it.
WORLDS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    # a worker with a function; or with copies
    "function": (5, {"masters": {"master": ("a",)}, "workers": {"apply": (None, ("a", "caches"))}}),
    "copy": (4, {"masters": {"master": ("a",)}, "workers": {"copy": (None, ())}}),
    # the master, too, is restored from backups
    "restored": (
        2,
        {
            "masters": {"master": ("a",)},
            "workers": {"copy": (None, ()), "apply": (None, ("a",))},
            "restores": True,
        },
    ),
    # the same with several writers of one stream
    "restored-shared": (
        2,
        {
            "masters": {"master": ("a",), "second": ("a",)},
            "workers": {"copy": (None, ()), "apply": (None, ("a",))},
            "restores": True,
            "shared": True,
        },
    ),
    # the same with one writer, behind a relay
    "restored-relay": (
        2,
        {
            "masters": {"master": ("a",)},
            "workers": {"relay": (None, ()), "copy": (None, ()), "apply": (None, ("a",)), "near": (None, ("a",))},
            "relays": {"copy": "relay", "apply": "relay"},
            "restores": True,
        },
    ),
    # the master deletes facts; workers behind a relay with copies, and behind one without
    "retention": (2, RETENTION),
    # it deletes also what followers lack
    "forced-retention": (1, {**RETENTION, "forces": True}),
    # a worker of each kind
    "kinds": (1, {"masters": MASTERS, "workers": WORKERS}),
    # two masters; each worker follows both
    "two-masters": (
        1,
        {
            "masters": {"master": ("a",), "second": ("b", "c")},
            "workers": {"copy": (None, ()), "apply": (None, ("a", "b")), "few": (("b", "c", "caches"), ("c",))},
        },
    ),
    "relay": (
        2,
        {
            "masters": {"master": ("a",)},
            "workers": {"relay": (None, ()), "apply": (None, ("a", "caches"))},
            "relays": {"apply": "relay"},
        },
    ),
    # workers behind one relay, and behind two
    "relays": (
        1,
        {
            "workers": {
                "relay": (None, ()),
                "second": (None, ()),
                "copy": (None, ()),
                "apply": (None, ("a", "caches")),
                "few": (("b",), ()),
            },
            "relays": {"second": "relay", "copy": "relay", "apply": "second", "few": "second"},
        },
    ),
    # workers behind a relay that stores nothing, of two masters
    "plain-relay": (
        1,
        {
            "masters": {"master": ("a",), "second": ("b",)},
            "workers": {"relay": (None, ()), "copy": (None, ()), "apply": (None, ("a", "b"))},
            "relays": {"copy": "relay", "apply": "relay"},
            "without_copies": ("relay",),
        },
    ),
    # writers of one stream, whose facts are applied in the order of their tokens (I17)
    "linear": (
        2,
        {"masters": {"master": ("a",), "second": ("a",)}, "workers": {"apply": (None, ("a",))}, "linear": ("a",)},
    ),
    "linear-three": (
        1,
        {
            "masters": {"master": ("a",), "second": ("a",), "third": ("a",)},
            "workers": {"copy": (None, ()), "apply": (None, ("a",))},
            "linear": ("a",),
        },
    ),
    "linear-relay": (
        1,
        {
            "masters": {"master": ("a",), "second": ("a",)},
            "workers": {"relay": (None, ()), "apply": (None, ("a",)), "near": (None, ("a",))},
            "relays": {"apply": "relay"},
            "linear": ("a",),
        },
    ),
    # workers that catch up from segments first
    "segments": (
        1,
        {
            "masters": {"master": ("a",)},
            "workers": {"copy": (None, ()), "apply": (None, ("a", "caches"))},
            "segments": ("copy", "apply"),
        },
    ),
}


_WORLDS: Final = tuple(WORLDS)
_WORLD_WEIGHTS: Final = [*accumulate(weight for weight, _ in WORLDS.values())]
_encode: Final = msgspec.json.encode  # of steps, in a fifth of the time of ``json.dumps``


class Plan(NamedTuple):
    """What a run does: the seed of its random numbers, the name of a world, and steps, each a name and its values."""

    seed: int
    world: str
    steps: Sequence[Sequence[Any]]

    def encode(self) -> str:
        """Return it as JSON."""
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the plan of a JSON text; ValueError or TypeError if it is none."""
        return cls(*json.loads(text))


class Outcome(NamedTuple):
    """The result of a run: ``failure`` is empty if every invariant held."""

    failure: str
    traceback: str
    trace: Sequence[str]  # steps, and lines on the wire
    facts: int  # that were committed
    seconds: float  # that passed in the world


@cache
def _weights(kinds: Sequence[str]) -> list[int]:
    return [*accumulate(KINDS[each].weight for each in kinds)]


def make_plan(seed: int, world: str = "") -> Plan:
    """Return the plan of a seed, in one world or in any.

    About half of the faults are left out of each plan, so that the others meet more often.
    """
    chance = Random(seed)
    if not world:
        (world,) = chance.choices(_WORLDS, cum_weights=_WORLD_WEIGHTS)
    kinds = tuple(name for name, kind in KINDS.items() if not kind.fault or chance.random() < WITH_FAULT)
    names = chance.choices(kinds, cum_weights=_weights(kinds), k=2 + int(chance.expovariate(1 / USUAL_STEPS)))
    names += ["heal", "append", "heal"]  # what comes after the last fault counts too
    return Plan(seed, world, [[name, *(draw(chance) for draw in KINDS[name].values)] for name in names])


def run(plan: Plan) -> Outcome:
    """Do the steps of a plan, and check the invariants after each.

    A failure counts if it comes again.  It does not if it came from killed processes of an earlier run: Python ends
    their coroutines when it collects the garbage.
    """
    outcome = _run_once(plan)
    if outcome.failure:
        gc.collect()
        outcome = _run_once(plan)
    return outcome


def _run_once(plan: Plan) -> Outcome:
    world = World(**WORLDS[plan.world][1], seed=plan.seed)
    failure = traceback = ""
    try:
        with world:
            for each in plan.steps:
                world.trace.append(f"---- {_encode(each).decode()}")
                do(world, *each)
    except Exception as error:  # noqa: BLE001 - a bug raises anything
        first = world.failures[0] if world.failures else f"{type(error).__name__}: {error}"
        failure, traceback = first.strip().splitlines()[-1].removeprefix("builtins."), format_exc()
    facts = sum(len(each.committed) for master in world.masters.values() for each in master.histories.values())
    return Outcome(failure, traceback, world.trace, facts, world.network.clock.now)


def shrink(plan: Plan, fails: Callable[[Plan], bool] = lambda plan: bool(run(plan).failure)) -> Plan:
    """Return a plan that fails with as few steps as possible: steps are left out while it still fails."""
    left = SHRINKING_RUNS
    size = max(1, len(plan.steps) // 2)
    while True:
        before, start = len(plan.steps), 0
        while start < len(plan.steps) and left:
            left -= 1
            shorter = plan._replace(steps=[*plan.steps[:start], *plan.steps[start + size :]])
            if fails(shorter):
                plan = shorter
            else:
                start += size
        if size == 1 and (len(plan.steps) == before or not left):
            return plan
        size = max(1, size // 2)
