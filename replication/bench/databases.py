"""Which databases are measured: SQLite in a temporary folder, and PostgreSQL on a server of our own if there is one."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import attrs

from replication.bench.cluster import CURE, Cluster, find_binaries
from replication.bench.daemons import database_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POSTGRES: Final = "PostgreSQL"


@attrs.frozen
class Kind:
    """A kind of database; ``make`` returns the URL of an empty one."""

    name: str
    make: Callable[[], str]


@contextmanager
def kinds() -> Iterator[list[Kind]]:
    """Return the kinds of databases that there are here; if PostgreSQL is not among them, standard error says why."""
    numbers = count(1)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="replication-bench-"))
        found = [Kind("SQLite", lambda: database_in(folder, f"bench{next(numbers)}"))]
        why = missing()
        if why:
            print(f"PostgreSQL is not measured: {why}", file=sys.stderr)
        else:
            cluster = stack.enter_context(Cluster())

            def make() -> str:
                name = f"bench{next(numbers)}"
                cluster.sql(f"CREATE DATABASE {name}")
                return cluster.url(name)

            found.append(Kind(POSTGRES, make))
        yield found


def missing() -> str | None:
    """Return why PostgreSQL cannot be measured here; None if it can."""
    if find_binaries() is None:
        return f"there is none here: {CURE}"
    if find_spec("psycopg") is None:
        return "psycopg is missing: pip install '.[postgres]' in the checkout"
    return None
