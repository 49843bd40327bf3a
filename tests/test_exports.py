"""What ``import replication`` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import replication
from replication import errors

CHECKOUT = Path(__file__).parent.parent
PUBLIC = {
    "ApplicationCommand",
    "CatchUpError",
    "ConfigError",
    "Fact",
    "LocalProtocolError",
    "Master",
    "NotAWriterError",
    "PositionMovedError",
    "PositionTimeoutError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicationError",
    "RoomError",
    "Rooms",
    "Row",
    "RowError",
    "SchemaError",
    "SequenceRegressedError",
    "SourceTable",
    "StoppingError",
    "StoreError",
    "StreamDefinition",
    "StreamError",
    "TypedStream",
    "UnknownRoomError",
    "UnknownStreamError",
    "ValueRefusedError",
    "Worker",
    "__version__",
}


def modules_after(statement: str) -> set[str]:
    """Return the modules that a new Python has loaded after ``statement``."""
    script = f"import sys; {statement}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return set(found.stdout.split())


def test_the_public_names_are_these() -> None:
    """A name that appears or goes is a change for users: it belongs into CHANGELOG.md too."""
    assert set(replication.__all__) == PUBLIC
    assert sorted(replication.__all__) == replication.__all__


def test_every_public_name_loads_and_is_listed() -> None:
    for name in PUBLIC:
        assert getattr(replication, name) is not None
    assert set(dir(replication)) >= PUBLIC


def test_every_error_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= PUBLIC


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'replication' has no attribute 'Handler'"):
        replication.Handler  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import replication",
        "import replication; replication.StreamDefinition, replication.Fact, replication.StoreError",
        "import replication.wire.commands, replication.wire.lines",
        "import replication.streams.seams, replication.streams.registry, replication.streams.cursor",
        "import replication.session.connection, replication.session.feed",
        "import replication.cli.main",
    ],
)
def test_what_needs_no_twisted_does_not_load_it(statement: str) -> None:
    """A Spark executor imports ``wire``; somebody who asks for --help waits for nothing."""
    loaded = modules_after(statement)
    assert not {"twisted", "zope.interface", "rich", "sqlite3", "pyspark"} & loaded


def test_the_installed_version_is_this_one() -> None:
    try:
        installed = version("replication")
    except PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")
    assert installed == replication.__version__
