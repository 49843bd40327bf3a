"""The Synapse that these tests talk to: a real one, from its package, in a Python environment of its own.

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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

HERE = Path(__file__).parent
HOW_TO_GET_IT = (
    "this Synapse runs on Python 3.9, which is missing: put python3.9 on the PATH, as in `pyenv install 3.9`"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let another release be tried."""
    releases = sorted(each.stem.removeprefix("requirements-") for each in HERE.glob("requirements-*.txt"))
    parser.addoption("--synapse", choices=releases, default=releases[0], help="the release of Synapse to talk to")


def find_python() -> str | None:
    """Return a Python 3.9 that runs: of the PATH (pyenv may have a shim there that does not), or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for each in (shutil.which("python3.9"), *sorted(pyenv.glob("versions/3.9.*/bin/python3.9"), reverse=True)):
        if each and subprocess.run([each, "-c", ""], check=False, stderr=subprocess.DEVNULL).returncode == 0:
            return str(each)
    return None


@pytest.fixture(scope="session")
def release(request: pytest.FixtureRequest) -> str:
    """Return which Synapse it is."""
    return str(request.config.getoption("--synapse"))


@pytest.fixture(scope="session")
def synapse_python(request: pytest.FixtureRequest, release: str) -> Path:
    """Return the Python that has Synapse; it is made once, and kept in pytest's cache until the requirements change."""
    found = find_python()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    requirements = HERE / f"requirements-{release}.txt"
    folder = request.config.cache.mkdir(f"synapse-{release}")
    python, made_for = folder / "bin/python", folder / "made-for.txt"
    if not made_for.exists() or made_for.read_text() != requirements.read_text():
        _run(found, "-m", "venv", "--clear", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements))
        shutil.copyfile(requirements, made_for)
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """Return the URL of an empty database as Synapse wants it: our servers are made with UTF8 and the locale C."""
    with postgres.database() as name:
        yield postgres.url(name)
