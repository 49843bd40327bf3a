"""The newest Synapse, in an environment of its own: ``tox -e interop-modern``, or ``pytest tests/interop_modern``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.environment import make_environment
from tests.interop_modern.cluster import Cluster
from tests.interop_modern.homeserver import Homeserver
from tests.redis import HOW_TO_GET_IT
from tests.synapse.reading import READER_SQL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the lengths of ``mixed_faults.py`` and ``lag.py``."""
    parser.addoption("--minutes", type=float, default=60.0, help="how long mixed_faults.py makes faults")
    parser.addoption("--seconds", type=float, default=30.0, help="how long each of the eight phases of lag.py is")
    parser.addoption("--spare", action="store_true", help="lag.py: run our workers only while a processor is free")


@pytest.fixture(scope="session")
def synapse(request: pytest.FixtureRequest) -> Path:
    """Install the newest Synapse, and return its Python."""
    if shutil.which("redis-server") is None:
        if os.environ.get("CI"):
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    requirements = Path(__file__).parent / "requirements-newest.txt"
    environment = request.config.cache.mkdir("synapse-newest")
    return make_environment(environment, sys.executable, requirements, upgrade=True)


@pytest.fixture(scope="session")
def cluster(synapse: Path, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a homeserver, its users, and our worker beside it; most tests of this folder share them, in order."""
    folder = tmp_path_factory.mktemp("homeserver")
    with postgres.database() as name, Homeserver(synapse, folder, postgres.url(name)) as homeserver:
        postgres.sql(READER_SQL, database=name)
        with Cluster(folder, homeserver, postgres, name) as cluster:
            yield cluster
