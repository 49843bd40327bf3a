"""Blocks of ``sh`` need what a test has not, such as a cluster or root.  Here they are read, or their test is named."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from replication.cli.main import COMMANDS, load
from replication.service import Options
from tests.docs.pages import DOCS, blocks, pages
from tests.system.daemons import CHECKOUT, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *pages()]
# Where the commands of a page run: a test, or the script that runs all tests.
RUN_BY = {
    "README.md": "tests/docs/test_readme.py::test_every_block_does_what_it_shows",
    "CONTRIBUTING.md": ".ci/run::env_list",
    "docs/mutation-testing.md": "tox.ini::[testenv:mutants]",
    "docs/operations.md": "tests/system/test_compose.py::COMPOSE",
    "docs/simulation.md": "tests/docs/test_shell_blocks.py::test_the_simulation_runs",
    "docs/spark.md": "tests/system/test_cluster.py::spark-submit",
    "docs/tutorial.md": "tests/docs/test_pages.py::tutorial.md",
    "docs/how-to/back-up.md": "tests/system/test_backups.py::pg_basebackup",
    "docs/how-to/follow-a-synapse.md": "tests/interop_modern/cluster.py::follow-a-synapse.md",
    "docs/how-to/invalidate-caches.md": "tests/system/test_members.py::examples/members.py",
    "docs/how-to/relay.md": "tests/system/test_relay.py::relay",
    "docs/how-to/run-under-systemd.md": "tests/system/test_systemd.py::def test_",
}


def shell_blocks() -> Iterator[tuple[Path, str]]:
    """Yield every block of ``sh``, with its page."""
    for each in PAGES:
        for block in blocks(each.read_text(encoding="utf-8")):
            if block.language == "sh":
                yield each, block.body


def commands(body: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block."""
    for line in body.replace("\\\n", " ").splitlines():
        for command in line.split(" && "):
            if words := shlex.split(command, comments=True):
                yield words


SHOWN = [
    pytest.param(each, words, id=f"{each.name}: {' '.join(words)[:60]}")
    for each, body in shell_blocks()
    for words in commands(body)
    if "replication" in words[:4] and not words[0].startswith(("docker", "useradd"))
]


def test_every_page_with_shell_commands_names_its_test() -> None:
    assert {str(each.relative_to(CHECKOUT)) for each, _ in shell_blocks()} == {*RUN_BY}
    for place in RUN_BY.values():
        file, _, text = place.partition("::")
        assert text in (CHECKOUT / file).read_text(encoding="utf-8"), place


@pytest.mark.parametrize(("path", "body"), [pytest.param(*each, id=each[0].name) for each in shell_blocks()])
def test_bash_can_read_a_block(path: Path, body: str) -> None:
    read = subprocess.run(["bash", "-n"], input=body, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, ""), path


@pytest.mark.parametrize(("path", "words"), SHOWN)
def test_a_command_takes_the_options_that_a_page_shows(
    path: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without running it; with the files of the page, and those of the checkout."""
    monkeypatch.setenv("SYNAPSE", "postgresql://replication@localhost/synapse")
    (tmp_path / "examples").mkdir()
    (tmp_path / "conf").symlink_to(CHECKOUT / "conf")
    for block in blocks(path.read_text(encoding="utf-8")):
        name = block.file or next(iter(re.findall(r"^# (\w+\.toml)$", block.body, re.MULTILINE)), None)
        if name is not None:
            (tmp_path / name).write_text(block.body)
            (tmp_path / "examples" / name).write_text(block.body)
    in_examples = any(word.startswith("../conf") for word in words)
    monkeypatch.chdir(tmp_path / "examples" if in_examples else tmp_path)
    words = [re.sub(r"\$SYNAPSE\b", "postgresql://replication@localhost/synapse", each) for each in words]
    at = words.index("replication")
    if words[0].endswith("twistd"):
        options = Options()
        options.parseOptions(words[at + 1 :])
        assert options.subCommand in ("master", "worker")
    else:
        assert words[at + 1] in COMMANDS
        load(words[at + 1]).make_parser().parse_args(words[at + 2 :])


def test_the_simulation_runs() -> None:
    """As docs/simulation.md shows, with fewer seeds."""
    (body,) = [body for each, body in shell_blocks() if each == DOCS / "simulation.md" and "simulate" in body]
    for words in commands(body.replace("100000", "20")):
        ran = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, env=environment(), check=False
        )
        assert ran.returncode == 0, ran.stderr
