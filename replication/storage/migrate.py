"""Bringing the tables of an older version up to date, one numbered step and one transaction at a time.

``replication_schema`` has one row: the number of the last step taken.  A fresh database takes all steps, so there is no
second description of the tables that could differ.  A step, once released, is never changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager


def upgrade(
    run: Callable[[str], list[tuple[Any, ...]]],
    transaction: Callable[[], AbstractContextManager[object]],
    steps: Sequence[Sequence[str]],
    versions: str = "replication_schema",
) -> None:
    """Take the steps that are missing; SchemaError if more were taken than we know.

    ``run`` executes a statement; the table ``versions`` counts the steps.  ``transaction`` is a context that commits,
    that rolls back if an exception leaves it, and that keeps other processes from upgrading meanwhile.
    """
    while True:
        with transaction():
            run(f"CREATE TABLE IF NOT EXISTS {versions} (version INTEGER NOT NULL)")
            version = installed(run, versions)
            if version >= len(steps):
                check_version(version, len(steps))
                return
            for statement in steps[version]:
                run(statement)
            run(f"DELETE FROM {versions}")  # noqa: S608 - a name of ours, and a number
            run(f"INSERT INTO {versions} (version) VALUES ({version + 1})")  # noqa: S608


def installed(run: Callable[[str], list[tuple[Any, ...]]], versions: str = "replication_schema") -> int:
    """Return how many steps the database has taken; what the driver raises if it never took one."""
    ((version,),) = run(f"SELECT coalesce(max(version), 0) FROM {versions}")  # noqa: S608 - a name of ours
    return int(version)


def check_version(version: int, known: int) -> None:
    """Raise SchemaError unless all the steps that we know, and no more, were taken."""
    if version > known:
        raise SchemaError(f"its tables have version {version}, this program knows {known}: use the newer program")
    if version < known:
        raise SchemaError(f"its tables have version {version}, not {known}: let this version's daemon open it once")
