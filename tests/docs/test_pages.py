"""The blocks of the tutorial, the how-tos and the reference do what they show."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.page_runner import PageRunner
from tests.docs.pages import DOCS, blocks, page, pages, section
from tests.postgres import find_binaries

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

ALONE = [  # pages that need nothing but this package
    "tutorial.md",
    "how-to/back-up.md",
    "how-to/choose-how-to-write.md",
    "how-to/choose-how-to-read.md",
    "how-to/share-work.md",
    "how-to/delete-facts.md",
    "how-to/embed-in-twisted.md",
    "how-to/use-from-asyncio.md",
    "how-to/use-tls.md",
    "how-to/keep-rooms.md",
    "how-to/invalidate-caches.md",
    "how-to/share-presence.md",
    "how-to/send-commands.md",
    "command-line.md",
    "configuration.md",
    "http.md",
]
ON_POSTGRES = [
    "how-to/write-from-any-language.md",
    "how-to/write-from-several-processes.md",
    "how-to/move-to-postgresql.md",
    "how-to/write-an-outbox-on-postgresql.md",
    "how-to/keep-a-master-available.md",
]
ON_SPARK = ["how-to/replay-on-spark.md"]
BESIDE_A_SYNAPSE = ["how-to/follow-a-synapse.md", "how-to/be-synapse-main-process.md"]  # tests/interop/test_how_to.py


@pytest.mark.parametrize("name", ALONE)
def test_every_block_does_what_it_shows(name: str, tmp_path: Path, default_ports: None) -> None:
    with PageRunner(tmp_path) as runner:
        runner.run(page(name))


def test_a_master_answers_the_requests_of_synapses_workers(tmp_path: Path, default_ports: None) -> None:
    """That part of a page needs no Synapse."""
    with PageRunner(tmp_path) as runner:
        runner.run(section(page("how-to/be-synapse-main-process.md"), "## Answer the requests of workers"))


@pytest.mark.parametrize("name", ON_POSTGRES)
def test_every_block_about_postgresql_does_what_it_shows(
    name: str, tmp_path: Path, default_ports: None, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server of the tests' own, which the environment names."""
    binaries = find_binaries()
    assert binaries is not None
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    for variable, value in (("PGHOST", "127.0.0.1"), ("PGPORT", str(postgres.port)), ("PGUSER", "postgres")):
        monkeypatch.setenv(variable, value)
    try:
        with PageRunner(tmp_path) as runner:
            runner.run(page(name).replace("sleep 2;", "sleep 9;"))  # for a machine that is busy
    finally:
        postgres.sql("DROP DATABASE IF EXISTS shop WITH (FORCE)")


@pytest.mark.parametrize("name", ON_SPARK)
def test_every_block_about_spark_does_what_it_shows(
    name: str, tmp_path: Path, spark_runs: None, default_ports: None, request: pytest.FixtureRequest
) -> None:
    """With fewer facts, unless ``--full`` is given."""
    text = page(name)
    if not request.config.getoption("--full"):
        text = re.sub(r"\b\d{5,7}\b", fewer, text)
    with PageRunner(tmp_path) as runner:
        runner.run(text)


def fewer(number: re.Match[str]) -> str:
    """Return a number of facts, or an ID, where there are 5,000 and then 500 instead of a million and 50,000."""
    thousands, rest = divmod(int(number[0]), 10_000)
    return str({100: 5_000, 105: 5_500, 5: 500}[thousands] + rest)


def test_every_page_with_commands_is_performed() -> None:
    found = {
        str(each.relative_to(DOCS))
        for each in pages()
        if any(block.language == "console" for block in blocks(each.read_text(encoding="utf-8")))
    }
    assert found == {*ALONE, *ON_POSTGRES, *ON_SPARK, *BESIDE_A_SYNAPSE}
