"""What ``import replication`` offers, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import replication
from replication import errors

CHECKOUT = Path(__file__).parent.parent
PUBLIC = {
    "Access",
    "ApplicationCommand",
    "ApplyTransaction",
    "Bounds",
    "CachedFunction",
    "CatchUpError",
    "CommitsLostError",
    "ConfigError",
    "Fact",
    "FactsGoneError",
    "FailedFact",
    "FailedFactAction",
    "Grant",
    "Keepalive",
    "Limits",
    "LocalProtocolError",
    "Master",
    "MultiWriterToken",
    "NewFact",
    "NotAWriterError",
    "PositionMovedError",
    "PositionTimeoutError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicationError",
    "Reservation",
    "Rights",
    "RoomError",
    "Rooms",
    "Row",
    "RowError",
    "RowRefusedError",
    "SchemaError",
    "SequenceRegressedError",
    "SourceTable",
    "StoppingError",
    "StoreError",
    "StreamDefinition",
    "StreamError",
    "StreamWriter",
    "TypedStream",
    "UnknownRoomError",
    "UnknownStreamError",
    "ValueRefusedError",
    "Worker",
    "__version__",
    "make_site",
    "use_monotonic_clock",
}


def modules_after(statement: str) -> set[str]:
    """Return the modules that a new Python has loaded after ``statement``."""
    script = f"import sys; {statement}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return set(found.stdout.split())


def test_the_public_names_are_these() -> None:
    """A name that appears or goes is a change for users: write it into CHANGELOG.md."""
    assert set(replication.__all__) == PUBLIC
    assert sorted(replication.__all__) == replication.__all__


def test_every_public_name_loads_and_is_listed() -> None:
    for name in PUBLIC:
        assert getattr(replication, name) is not None
    assert set(dir(replication)) >= PUBLIC


def test_every_error_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= PUBLIC


def test_every_public_method_has_a_docstring_and_annotations() -> None:
    """So editors and ``help()`` show what each one does and takes."""
    wrong = []
    for name in PUBLIC:
        value = getattr(replication, name)
        members = {f"{name}.{each}": inspect.getattr_static(value, each) for each in dir(value) if each[0] != "_"}
        for where, member in ({name: value} | (members if isinstance(value, type) else {})).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and function.__module__.startswith("replication"):
                signature = inspect.signature(function)
                parameters = [each for each in signature.parameters.values() if each.name not in {"self", "cls"}]
                annotations = [signature.return_annotation, *[each.annotation for each in parameters]]
                if not inspect.getdoc(function) or inspect.Signature.empty in annotations:
                    wrong.append(where)
            elif isinstance(member, type) and not member.__doc__:
                wrong.append(where)
    assert wrong == []


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'replication' has no attribute 'Handler'"):
        replication.Handler  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import replication",
        "import replication; replication.StreamDefinition, replication.Fact, replication.StoreError",
        "import replication.wire.commands, replication.wire.lines",
        "import replication.streams.interfaces, replication.streams.definitions, replication.streams.cursor",
        "import replication.session.connection, replication.session.encoder",
        "import replication.cli.main",
    ],
)
def test_what_needs_no_twisted_does_not_load_it(statement: str) -> None:
    """A Spark executor imports ``wire``, and ``--help`` must start quickly."""
    loaded = modules_after(statement)
    assert not {"twisted", "zope.interface", "rich", "sqlite3", "pyspark"} & loaded


def test_the_installed_version_is_this_one() -> None:
    try:
        installed = version("twisted-replication")
    except PackageNotFoundError:
        pytest.skip("run from a checkout that is not installed")
    assert installed == replication.__version__
