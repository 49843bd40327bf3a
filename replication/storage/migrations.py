"""Upgrades of our tables, in numbered steps, one transaction each.

The table ``replication_schema`` has one row: the number of the last step taken.  A fresh database takes all steps, so
there is no second description of the tables.  A released step never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from replication.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

# For PostgreSQL: two processes that create tables at once would fail, even with IF NOT EXISTS.
LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('replication tables', 0))"

LIKE_A_SYNAPSE: Final = "; it looks like a Synapse's, which is only read, with definitions"
_HAS_POSITIONS_ONLY: Final = (  # of PostgreSQL
    "SELECT to_regclass('replication_schema') IS NULL AND to_regclass('stream_positions') IS NOT NULL"
)


def upgrade(
    run: Callable[[str], list[tuple[Any, ...]]],
    transaction: Callable[[], AbstractContextManager[object]],
    steps: Sequence[Sequence[str]],
    versions: str = "replication_schema",
    *,
    on_demand: int = 0,
) -> None:
    """Take the missing steps; SchemaError if the database has taken more steps than there are.

    The last ``on_demand`` steps are taken by others, when a database first needs them.

    ``run`` executes a statement.  ``transaction`` returns a context that commits at its end, rolls back on an
    exception, and excludes upgrades by other processes.  ``versions`` is the table that counts the steps.
    """
    while True:
        with transaction():
            run(f"CREATE TABLE IF NOT EXISTS {versions} (version INTEGER NOT NULL)")
            version = installed(run, versions)
            if version >= len(steps) - on_demand:
                check_version(version, len(steps), on_demand)
                return
            for statement in steps[version]:
                run(statement)
            run(f"DELETE FROM {versions}")  # noqa: S608 - a constant name
            run(f"INSERT INTO {versions} (version) VALUES ({version + 1})")  # noqa: S608 - and a number


def installed(run: Callable[[str], list[tuple[Any, ...]]], versions: str = "replication_schema") -> int:
    """Return the number of steps taken; raises what ``run`` raises if there is no such table."""
    ((version,),) = run(f"SELECT coalesce(max(version), 0) FROM {versions}")  # noqa: S608 - a constant name
    return int(version)


def check_version(version: int, known: int, on_demand: int = 0) -> None:
    """Raise SchemaError unless ``version``, the number of steps taken, is ``known``, the number of steps that exist.

    The last ``on_demand`` steps may be missing.
    """
    if version > known:
        what = f"its tables have version {version}, this program has {known}: use the newer program"
        raise SchemaError(what, version=version)
    if version < known - on_demand:
        what = f"its tables have version {version}, not {known}: let this version's daemon open it once"
        raise SchemaError(what, version=version)


def hint_at_synapse(ask: Callable[[str], list[tuple[Any, ...]]]) -> str:
    """Return the end of an error about a PostgreSQL database without our tables; empty if it is unlike a Synapse's."""
    ((is_like_it,),) = ask(_HAS_POSITIONS_ONLY)
    return LIKE_A_SYNAPSE if is_like_it else ""
