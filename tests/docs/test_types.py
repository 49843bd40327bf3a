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
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

MYPY = "[mypy]\nplugins = mypy_zope:plugin\ncheck_untyped_defs = True\nignore_missing_imports = True\n"

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


@pytest.fixture(params=["mypy", "pyright"])
def checker(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Return the command of a type checker."""
    name: str = request.param
    if find_spec(name) is None:
        why = f"{name} is not installed"
        if os.environ.get("TOX_ENV_NAME") == "types":
            pytest.fail(why)
        pytest.skip(why)
    if name == "pyright":
        return [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    config = tmp_path / "mypy.ini"
    config.write_text(MYPY)
    return [sys.executable, "-m", "mypy", "--config-file", str(config)]


def check(checker: list[str], folder: Path) -> tuple[int, str]:
    """Return the exit status and the output of a checker over the programs in a folder."""
    files = sorted(str(each) for each in folder.glob("*.py"))
    done = subprocess.run([*checker, *files], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_examples_have_no_errors(checker: list[str], tmp_path: Path) -> None:
    """In a folder of their own; without those that import Spark, which is not installed there."""
    folder = shutil.copytree(CHECKOUT / "examples", tmp_path / "examples")
    for name in ("per_minute.py", "room_table.py"):
        (folder / name).unlink()
    status, output = check(checker, folder)
    assert status == 0, output


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


def test_each_mistake_is_found_on_its_line(checker: list[str], tmp_path: Path) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    _, output = check(checker, tmp_path)
    wrong = [number for number, line in enumerate(MISTAKES.split("\n"), 1) if line.endswith("# wrong")]
    assert sorted({int(each) for each in re.findall(r"mistakes\.py:(\d+):.*error", output)}) == wrong, output


def test_misspelt_names_are_found(checker: list[str], tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for number, (program, right, wrong) in enumerate(MISSPELT):
        text = (CHECKOUT / "examples" / program).read_text(encoding="utf-8")
        assert right in text, (program, right)
        (tmp_path / "examples" / f"program{number}.py").write_text(text.replace(right, wrong))
    status, output = check(checker, tmp_path / "examples")
    assert status == 1
    missing = [wrong for _, _, wrong in MISSPELT if f'"{wrong.rpartition(".")[2].strip("()")}"' not in output]
    assert missing == [], output
