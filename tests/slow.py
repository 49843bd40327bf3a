"""The tests that plain ``pytest`` leaves out, so that a contributor's loop takes two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).parent
# Real processes, servers that are killed, Spark, whole recordings, and the programs of the documents.
SLOW = [
    TESTS / each
    for each in (
        "bench",
        "cli/test_completion.py",
        "docs/test_pages.py",
        "docs/test_pictures.py",
        "docs/test_readme.py",
        "docs/test_types.py",
        "follower/test_audit.py",
        "rooms/test_graph.py",
        "simulation/test_planted_faults.py",
        "simulation/test_seeds.py",
        "spark",
        "storage/postgres",
        "storage/tables/test_rooms.py",
        "system",
        "transcripts",
        "writer/test_two_masters.py",
    )
]


def left_out(config: pytest.Config) -> list[Path]:
    """Return the slow folders and modules below what was asked for, without those that were named, or a part of them.

    ``pytest --all`` leaves out nothing.
    """
    if config.getoption("--all"):
        return []
    asked = [(config.invocation_params.dir / each.partition("::")[0]).resolve() for each in config.args]
    below = [path for path in SLOW if any(path.is_relative_to(each) for each in asked)]
    return [path for path in below if not any(each.is_relative_to(path) for each in asked)]


def name_of(path: Path) -> str:
    """Return what ``pytest`` takes from the checkout."""
    return str(path.relative_to(TESTS.parent))
