"""mypy and pyright check the programs of examples/, and find a method that is misspelt there.

Both are installed in tox's environment ``types`` only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.system.daemons import CHECKOUT

# for the programs, beside the options of setup.cfg: with these, mypy reads what it has found out about the package
RELAXED = """
allow_untyped_defs = True
allow_incomplete_defs = True
allow_untyped_calls = True
allow_any_generics = True
ignore_missing_imports = True
"""

MISSPELT = [
    ("shop.py", "fact.write(", "fact.wrte("),
    ("shop.py", "fact.execute(", "fact.exceute("),
    ("shop.py", "fact.token", "fact.tokn"),
    ("shop.py", ").reserve()", ").resrve()"),
    ("counts.py", "txn.execute(", "txn.excute("),
    ("counts.py", "fact.rows", "fact.rwos"),
    ("reader.py", "worker.wait_for(", "worker.wait_fr("),
    ("reader.py", "@worker.cached(", "@worker.cahced("),
    ("presence.py", "worker.user_syncing(", "worker.user_synching("),
    ("reindex.py", "worker.send(", "worker.sned("),
    ("reindex.py", "@master.on_command(", "@master.on_comand("),
    ("rooms.py", "rooms.persist(", "rooms.perisst("),
]


MISTAKES = """
from collections.abc import Sequence

from replication import ApplyTransaction, Fact, Master, Rooms, Worker

master, worker = Master(streams=["orders"]), Worker()
rooms = Rooms(master)
Master(streams=[17])  # wrong
Worker(limits="small")  # wrong


@worker.on("orders")
async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
    await txn.execute("DELETE FROM counts")
    await txn.exceute("DELETE FROM counts")  # wrong
    await txn.execute(facts)  # wrong
    print(facts[0].tokn)  # wrong


@worker.on("stock")  # wrong
async def apply_stock(facts: Sequence[Fact]) -> None: ...


@worker.cached()
def price(order_id: str) -> int:
    return len(order_id)


async def use() -> None:
    async with master.stream("orders").reserve() as fact:
        await fact.write(["o1", "placed"])
        await fact.wrte(["o1", "placed"])  # wrong
        fact.stream_id.append(1)  # wrong
    async with master.stream("orders").reserve(2) as facts:
        await facts[0].write(["o1", "placed"])
        await facts.write(["o1", "placed"])  # wrong
    master.stream("orders").reserve("two")  # wrong
    await master.stream("orders").append("o1", kye="k")  # wrong
    await worker.wait_for("orders", "master", "seven")  # wrong
    worker.sned(7)  # wrong
    price(17)  # wrong
    price.invalidat("o1")  # wrong
    await rooms.vieww("!r:example.com")  # wrong
    await rooms.view(17)  # wrong
"""


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the errors that a type checker finds in all programs, each a line with file and line."""
    name: str = request.param
    if find_spec(name) is None:
        why = f"{name} is not installed"
        if os.environ.get("TOX_ENV_NAME") == "types":
            pytest.fail(why)
        pytest.skip(why)
    folder = tmp_path_factory.mktemp(name)
    files = write_programs(folder)
    if name == "pyright":
        options, cwd = ["--pythonpath", sys.executable], folder
    else:
        config = re.search(
            r"^\[mypy\]\n.*?(?=^\[coverage)", (CHECKOUT / "setup.cfg").read_text(), re.DOTALL | re.MULTILINE
        )
        assert config is not None
        (folder / "mypy.ini").write_text(f"{config[0]}[mypy-{','.join(Path(each).stem for each in files)}]{RELAXED}")
        options, cwd = ["--config-file", str(folder / "mypy.ini")], CHECKOUT
    command = [sys.executable, "-m", name, *options, *files]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.search(r"\.py:\d+:.*error", line)]


def write_programs(folder: Path) -> list[str]:
    """Write the examples, the mistakes and each example with a misspelt name; return their paths.

    The examples that import Spark are left out, because it is not installed there.
    """
    (folder / "mistakes.py").write_text(MISTAKES)
    for each in (CHECKOUT / "examples").glob("*.py"):
        if each.name not in ("per_minute.py", "room_table.py"):
            shutil.copy(each, folder)
    for number, (program, right, wrong) in enumerate(MISSPELT):
        text = (folder / program).read_text(encoding="utf-8")
        assert right in text, (program, right)
        (folder / f"misspelt{number}.py").write_text(text.replace(right, wrong))
    return sorted(str(each) for each in folder.glob("*.py"))


def in_file(errors: list[str], name: str) -> list[str]:
    """Return the errors of the files whose names begin with a pattern."""
    return [each for each in errors if re.search(rf"(^|[\s/]){name}\S*\.py:", each)]


def test_the_examples_have_no_errors(errors: list[str]) -> None:
    wrong = [*in_file(errors, "mistakes"), *in_file(errors, "misspelt")]
    assert [each for each in errors if each not in wrong] == []


def test_each_mistake_is_found_on_its_line(errors: list[str]) -> None:
    wrong = [number for number, line in enumerate(MISTAKES.split("\n"), 1) if line.endswith("# wrong")]
    found = {int(each) for each in re.findall(r"\.py:(\d+):", "\n".join(in_file(errors, "mistakes")))}
    assert sorted(found) == wrong, errors


def test_misspelt_names_are_found(errors: list[str]) -> None:
    for number, (_, _, wrong) in enumerate(MISSPELT):
        found = in_file(errors, rf"misspelt{number}\b")
        name = wrong.rpartition(".")[2].strip("()")
        assert any(f'"{name}"' in each for each in found), (wrong, found)
