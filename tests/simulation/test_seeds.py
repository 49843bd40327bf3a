"""Random runs of masters and workers with all faults, from seeds; ``replication simulate`` runs more of them.

``test_faults.py`` and ``test_traps.py`` have the interesting single cases.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from replication.bench.simulation.run import WORLDS, Plan, make_plan, run
from replication.bench.simulation.seeds import run_some

SEEDS = range(1, 9)


@pytest.mark.parametrize("world", WORLDS)
def test_every_invariant_holds(world: str) -> None:
    totals, failed = run_some(SEEDS, world)
    assert failed is None, f"replication simulate --world {world} --seed {failed.seed}: {failed.failure}"
    assert totals.seeds == len(SEEDS)


# A backup is taken while IDs are open and a larger one is complete.  They are committed, and the backup is restored.
OPEN_AT_A_BACKUP = (
    '[1003602,"restored",[["reserve",3,[[1,40],[3,240],[0,240],[5,0]],[]],["append",7,[[0,240],[0,240]],false],'
    '["reserve",2,[[5,0],[5,0],[1,40],[0,40]],[]],["back_up",3],["finish",6,"commit",false],'
    '["append",3,[[4,240],[2,0],[2,0]],true],["restore",1],["heal",0.3]]]'
)


def test_facts_that_a_restore_lost_below_the_largest_id_of_the_backup_leave_no_follower() -> None:
    assert run(Plan.decode(OPEN_AT_A_BACKUP)).failure == ""


# A follower requests facts up to a position from before the restore.  The page ends at a position that no follower has
# received yet: the writer has published it while none was connected.
PUBLISHED_TO_NONE = (
    '[8002530,"restored",[["catch_up_becomes",5,true,true,5],["back_up",6],'
    '["append",0,[[1,0],[2,240],[5,240],[3,40]],true],["unplug",0],["restore",2],["reserve",1,[[0,0],[1,0]],[]],'
    '["heal",0.3]]]'
)


def test_a_page_may_reach_what_was_published_while_no_follower_was_connected() -> None:
    assert run(Plan.decode(PUBLISHED_TO_NONE)).failure == ""


# An idle writer reads the position of another writer, and is killed before it stores that position as its own.
KILLED_WHILE_IT_FOLLOWS = (
    '[1,"linear-three",[["append",1,[[1,0]],true],["advance",3.0],["append",0,[[1,0]],true],'
    '["disk_becomes",1,true,false],["advance",1.0],["disk_answers",0,0,false],["kill",1,false,0],'
    '["kill",0,false,0],["start",0],["advance",3.0],["heal",0.3]]]'
)


def test_no_follower_goes_back_when_another_process_sends_the_position_of_a_killed_writer() -> None:
    assert run(Plan.decode(KILLED_WHILE_IT_FOLLOWS)).failure == ""


# A follower reads lines of its first connection only after the writer was restored and has started again.
READ_AFTER_A_RESTORE = (
    '[30000987,"restored-shared",[["back_up",5],["new_connections_become",false,true],["restore",1],'
    '["advance",11.0],["spike",2,2,false],["restore",1],["spike",0,6,false],["heal",0.3]]]'
)


def test_lines_of_an_old_connection_are_not_taken_for_those_of_a_restored_writer() -> None:
    assert run(Plan.decode(READ_AFTER_A_RESTORE)).failure == ""


# A restore loses the facts 3 and 4, which were open at the backup, and the worker with a function is started again.
STARTED_AFTER_A_LOSS = (
    '[251006,"restored",[["reserve",4,[[4,0],[4,0]],["x"]],["spike",1,3,false],["back_up",6],["heal",0.3],'
    '["restore",6],["stop",2],["heal",0.3]]]'
)


def test_a_function_that_is_started_again_goes_back_from_facts_that_a_restore_lost() -> None:
    assert run(Plan.decode(STARTED_AFTER_A_LOSS)).failure == ""


def test_a_seed_gives_the_same_trace_in_another_process() -> None:
    """Whatever the order of a set of texts is there."""
    seeds = [2, 3, 5, 7, 11, 13]
    program = f"""
from replication.bench.simulation.run import make_plan, run
for seed in {seeds}:
    print("\\n".join(run(make_plan(seed)).trace))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True)
    assert there.stdout.splitlines() == [line for seed in seeds for line in run(make_plan(seed)).trace]
