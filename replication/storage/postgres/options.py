"""The options of libpq for each connection to PostgreSQL; most of a URL come first.  No driver is imported."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ENCODING: Final = "client_encoding"
# A server that vanished is noticed within 45 s, not within hours.
OPTIONS: Final[Mapping[str, str | int]] = {
    "connect_timeout": 10,  # seconds for each host
    "keepalives_idle": 30,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 45_000,  # ms; there are no keepalives while a query runs
    ENCODING: "UTF8",  # replaces that of the URL, which may lack characters
    "sslpassword": "none",  # any text; without it, OpenSSL asks the terminal for the password of a key, and waits
}
KEY_CURE: Final = (
    "if the private key has a password, sslpassword in the URL is missing or wrong: give the right one, or write the "
    "key without one, with openssl pkey -in KEY -out FILE"
)
ESCAPE: Final = "in a user, a password and the value of an option, write each of / : @ ? # % & = and white space as %XX"
POLICY_CURE: Final = "ALTER ROLE … BYPASSRLS for this user, or name another user"
CURES_BY_WORDS: Final = {  # of the error, whatever its SQLSTATE is
    '": bad decrypt': KEY_CURE,
    '": unsupported': KEY_CURE,  # of 200 wrong passwords, one decrypts the key to something else
    "out of shared memory": "raise max_locks_per_transaction, or end the sessions that hold most of the locks",
    "row-level security policy": POLICY_CURE,  # it hides rows, or does not accept them
}


def missing_options(given: Mapping[str, object], hosts: str = "") -> dict[str, str | int]:
    """Return the options that a URL lacks, or has without a value; it has the options ``given``.

    Of several ``hosts``, with commas between them, the primary is used: a standby may lack what was read elsewhere.
    Texts are sent in UTF-8, whatever the URL has.  A service in libpq's service file may have ``sslpassword``, which an
    option here would replace.
    """
    has_service = "service" in given or "PGSERVICE" in os.environ
    options = {**OPTIONS, "target_session_attrs": "primary"} if "," in hosts else OPTIONS
    return {
        name: value
        for name, value in options.items()
        if name == ENCODING or (not given.get(name) and not (has_service and name == "sslpassword"))
    }


def may_quote_password(url: str) -> bool:
    """Return whether libpq may quote a part of a password in an error about the form of the URL."""
    return "@" in url or "password" in url.lower()


def splits_password(url: str) -> bool:
    """Return whether libpq takes a part of the password for the host or the database, and would quote it in errors.

    It does if ``@`` or ``/`` in the password is not escaped: then a further ``@`` follows.
    """
    place = re.sub(r"^[^@/]*@", "", url.partition("://")[2]).partition("?")[0]
    return "@" in place[1:]  # a host may begin with @, as an abstract UNIX socket
