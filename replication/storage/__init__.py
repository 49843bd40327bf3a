"""Where facts and positions are kept: ``IStreamStore`` of ``replication.streams.seams``, behind one URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import ConfigError
from replication.storage.connection import MEMORY

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorFromThreads

    from replication.streams.seams import IStreamStore

_FORMS = (
    "sqlite:///relative.db, sqlite:////absolute.db, sqlite:// for a database in memory, "
    "or postgresql://user@host:port/database"
)


def open_store(url: str, reactor: IReactorFromThreads, *, read_only: bool = False) -> IStreamStore:
    """Return the store that ``url`` names, not yet open; ConfigError if there is none of that kind.

    ``sqlite:///x.db`` is relative to the working directory, ``sqlite:////var/x.db`` absolute, ``sqlite://`` in memory;
    ``postgresql://…`` is whatever libpq makes of it.  ``read_only`` is for a database that another process writes.
    """
    path = path_of(url)
    if path is None:
        return _open_postgres(url, reactor, read_only=read_only)
    if read_only and path == MEMORY:
        raise ConfigError(f"database {url!r} is in memory, where nobody else has written: name a file")
    from replication.storage.sqlite import SqliteStore  # noqa: PLC0415 - what lies below needs no Twisted

    return SqliteStore(path, reactor, read_only=read_only)


def path_of(url: str) -> str | None:
    """Return the file that an SQLite URL names, None for PostgreSQL; ConfigError if it is neither."""
    scheme, slashes, rest = url.partition("://")
    if not slashes or scheme not in ("sqlite", "postgresql"):
        raise ConfigError(f"database {url!r}: write {_FORMS}")
    if scheme == "postgresql":
        return None
    host, slash, path = rest.partition("/")
    if host or (slash and not path) or "?" in path:
        raise ConfigError(f"database {url!r} names no file and nothing else: write {_FORMS}")
    return path or MEMORY


def _open_postgres(url: str, reactor: IReactorFromThreads, *, read_only: bool) -> IStreamStore:
    try:
        from replication.storage.postgres import PostgresStore  # noqa: PLC0415 - its driver is an extra
    except ImportError as error:
        raise ConfigError(f"PostgreSQL needs psycopg 3 ({error}): pip install '.[postgres]' in the checkout") from error
    return PostgresStore(url, reactor, read_only=read_only)
