"""The Synapse of these tests: a real one, in a Python environment of its own.

They are not among the tests that ``pytest`` runs by itself, since that environment has to be downloaded:
``tox -e interop``, or ``pytest tests/interop``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.environment import make_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

HERE = Path(__file__).parent
HOW_TO_GET_IT = "Synapse needs Python 3.9, which is missing: put python3.9 on the PATH, or run `pyenv install 3.9`"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for another release."""
    releases = sorted(each.stem.removeprefix("requirements-") for each in HERE.glob("requirements-*.txt"))
    parser.addoption("--synapse", choices=releases, default=releases[0], help="the release of Synapse to test with")


def find_python() -> str | None:
    """Return a working Python 3.9, from the PATH or from pyenv; a shim of pyenv may not work."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for each in (shutil.which("python3.9"), *sorted(pyenv.glob("versions/3.9.*/bin/python3.9"), reverse=True)):
        if each and subprocess.run([each, "-c", ""], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return str(each)
    return None


@pytest.fixture(scope="session")
def release(request: pytest.FixtureRequest) -> str:
    """Return the requirement of Synapse."""
    return str(request.config.getoption("--synapse"))


@pytest.fixture(scope="session")
def synapse_python(request: pytest.FixtureRequest, release: str) -> Path:
    """Return the Python with Synapse; the environment stays in pytest's cache until the requirements change."""
    found = find_python()
    if found is None:
        pytest.skip(HOW_TO_GET_IT)
    folder = request.config.cache.mkdir(f"synapse-{release}")
    return make_environment(folder, found, HERE / f"requirements-{release}.txt")


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """Return the URL of an empty database with UTF8 and locale C, which Synapse requires."""
    with postgres.database() as name:
        yield postgres.url(name)
