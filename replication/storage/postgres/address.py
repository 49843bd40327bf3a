"""The address of a PostgreSQL database: its URL with defaults, and its name for messages."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Final, Self

import attrs
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from replication.errors import ConfigError
from replication.storage.postgres.options import ESCAPE, may_quote_password, missing_options, splits_password
from replication.urls import Url, is_host, settings_in

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN: Final = ("host", "port", "user", "dbname", "sslcert", "sslkey", "sslrootcert")  # options without secrets


@attrs.frozen
class Address:
    """The address of a database; ``name`` is for messages and has no password."""

    name: str
    conninfo: str = attrs.field(repr=False)
    secrets: Sequence[str] = attrs.field(repr=False)

    @classmethod
    def parse(cls, given_url: str | Url, *, read_only: bool = False) -> Self:
        """Parse ``postgresql://user:password@host:port/database?option=…``; ConfigError does not quote the password.

        Of several hosts the primary is used, unless ``read_only``.
        """
        shown, url = Url(given_url), Url(given_url).reveal()
        try:
            given = conninfo_to_dict(url)
        except (psycopg.ProgrammingError, UnicodeDecodeError) as error:  # a % in a password may begin a byte
            why = ESCAPE if may_quote_password(url) else shown.hide_in(" ".join(str(error).split()))
            raise ConfigError(f"database {shown!r} is not a URL of PostgreSQL: {why}") from None
        host, ports, user = str(given.get("host", "")), str(given.get("port", "")), given.get("user")
        # The driver may take a part of the password for a host, a port or a database.
        if splits_password(url) or "@" in host[1:] or not re.fullmatch(r"[0-9,]*", ports):
            raise ConfigError(f"database {shown!r} is not a URL of PostgreSQL: {ESCAPE}")
        if not all(is_host(each) for each in host.split(",") if not each.startswith(("/", "@"))):
            raise ConfigError(
                f"database {shown!r} is not a URL of PostgreSQL: the name of its host cannot be looked up"
            )
        where = f"{user}@{host}" if user else host
        name = f"postgresql://{where}{ports and ':'}{ports}/{given.get('dbname', '')}"
        application = f"replication {socket.gethostname()}:{os.getpid()}"
        missing = missing_options(given, "" if read_only else host)
        conninfo = make_conninfo(url, fallback_application_name=application, **missing)
        secrets = [str(given[key]) for key in ("password", "sslpassword") if given.get(key)]
        # An error of the driver may quote an option.  It is hidden only with its quotes: "on" is a part of many words.
        given_settings = [f'"{each}"' for each in settings_in(str(given.get("options", "")))]
        options = [quote for key, text in given.items() if key not in _SHOWN for quote in (f'"{text}"', repr(text))]
        return cls(name, conninfo, [*secrets, *options, *given_settings])
