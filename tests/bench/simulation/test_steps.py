"""The kinds of steps."""

from __future__ import annotations

import json
from random import Random

import pytest

from replication.bench.simulation.steps import KINDS, do
from replication.bench.simulation.world import World


@pytest.mark.parametrize("name", KINDS)
def test_a_step_finds_something_to_act_on_or_does_nothing(name: str) -> None:
    """Its values are plain: JSON keeps them."""
    chance = Random(1)
    values = [draw(chance) for draw in KINDS[name].values]
    assert json.loads(json.dumps(values)) == values
    with World() as world:
        do(world, name, *values)
        do(world, "reserve", 0, [[1, 0]], [])
        do(world, "hold_pipe", 0, 1)
        do(world, "disk_becomes", 1, True, False)
        do(world, "unplug", 2)
        do(world, "append", 0, [[2, 0], [1, 240]], True)
        do(world, name, *values)
        do(world, "heal", 1.0)
