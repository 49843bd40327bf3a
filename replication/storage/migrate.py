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
) -> None:
    """Take the steps that are missing; SchemaError if more were taken than we know.

    ``run`` executes a statement.  ``transaction`` is a context that commits, that rolls back if an exception leaves it,
    and that keeps other processes from upgrading meanwhile.
    """
    while True:
        with transaction():
            run("CREATE TABLE IF NOT EXISTS replication_schema (version INTEGER NOT NULL)")
            version = installed(run)
            if version >= len(steps):
                check_version(version, len(steps))
                return
            for statement in steps[version]:
                run(statement)
            run("DELETE FROM replication_schema")
            run(f"INSERT INTO replication_schema (version) VALUES ({version + 1})")  # noqa: S608 - a number of ours


def installed(run: Callable[[str], list[tuple[Any, ...]]]) -> int:
    """Return how many steps the database has taken; what the driver raises if it never took one."""
    ((version,),) = run("SELECT coalesce(max(version), 0) FROM replication_schema")
    return int(version)


def check_version(version: int, known: int) -> None:
    """Raise SchemaError unless all the steps that we know, and no more, were taken."""
    if version > known:
        raise SchemaError(f"its tables have version {version}, this program knows {known}: use the newer program")
    if version < known:
        raise SchemaError(f"its tables have version {version}, not {known}: let this version's daemon open it once")
