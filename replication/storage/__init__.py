"""Where facts and positions are stored: ``open_store`` returns an ``IStreamStore`` for a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from replication.errors import ConfigError, install_command
from replication.storage.sqlite.session import MEMORY
from replication.urls import Url

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorFromThreads

    from replication.streams.interfaces import IStreamStore

_FORMS = (
    "sqlite:///relative.db, sqlite:////absolute.db, sqlite:// for a database in memory, "
    "or postgresql://user@host:port/database"
)


def open_store(
    url: str | Url, reactor: IReactorFromThreads, *, read_only: bool = False, foreign: bool = False
) -> IStreamStore:
    """Return the store at ``url``, not yet open; ConfigError if the URL names no database.

    ``sqlite:///x.db`` is relative to the working directory, ``sqlite:////var/x.db`` is absolute, and ``sqlite://`` is
    in memory.  ``postgresql://…`` is a URL of libpq.  ``read_only`` is for a database that another process writes.  A
    ``foreign`` one may belong to another program and lack the tables of this package.
    """
    url = Url(url)
    path = path_of(url)
    if path is None:
        return _open_postgres(url, reactor, read_only=read_only, foreign=foreign)
    if read_only and path == MEMORY:
        raise ConfigError(f"database {url!r} is in memory, where no other process writes: name a file")
    from replication.storage.sqlite.store import SqliteStore  # noqa: PLC0415 - this module needs no Twisted

    return SqliteStore(path, reactor, read_only=read_only, foreign=foreign)


def store_of(database: object, reactor: IReactorFromThreads) -> IStreamStore:
    """Return the store that a parameter ``database`` is or names by a URL; ConfigError if it is neither."""
    if isinstance(database, str | Url):
        return open_store(database, reactor)
    if not hasattr(database, "positions_of"):
        raise ConfigError(
            f"database must be a URL, such as 'sqlite:///replication.db', or a store, not {database!r:.100}"
        )
    return cast("IStreamStore", database)


def path_of(url: str | Url) -> str | None:
    """Return the file of an SQLite URL, or None for PostgreSQL; ConfigError for any other URL."""
    url = Url(url)
    scheme, slashes, rest = url.reveal().partition("://")
    if not slashes or scheme not in ("sqlite", "postgresql"):
        raise ConfigError(f"database {url!r}: write {_FORMS}")
    if scheme == "postgresql":
        return None
    host, slash, path = rest.partition("/")
    if host or (slash and not path) or "?" in path:
        raise ConfigError(f"database {url!r} names no file and nothing else: write {_FORMS}")
    return path or MEMORY


def needs_psycopg(error: ImportError) -> ConfigError:
    """Return the error for a PostgreSQL URL without the extra ``postgres``."""
    return ConfigError(f"PostgreSQL needs psycopg 3 ({error}): {install_command('postgres')}")


def _open_postgres(url: Url, reactor: IReactorFromThreads, *, read_only: bool, foreign: bool) -> IStreamStore:
    try:
        from replication.storage.postgres.store import PostgresStore  # noqa: PLC0415 - psycopg is in an extra
    except ImportError as error:
        raise needs_psycopg(error) from error
    return PostgresStore(url, reactor, read_only=read_only, foreign=foreign)
