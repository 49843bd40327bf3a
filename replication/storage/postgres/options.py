"""The options of libpq that each connection to PostgreSQL has, unless its URL has others.  It imports no driver."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# A server that vanished is noticed within 45 s, not within hours.
OPTIONS: Final[Mapping[str, str | int]] = {
    "connect_timeout": 10,  # seconds for each host
    "keepalives_idle": 30,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 45_000,  # ms; there are no keepalives while a query runs
    "client_encoding": "UTF8",
    "sslpassword": "none",  # any text: without one, OpenSSL asks the terminal for the password of a key, and blocks
}
KEY_WORDS: Final = "bad decrypt"  # of the error for a private key with another password
KEY_CURE: Final = (
    "the private key has a password: give it as sslpassword in the URL, or write the key without one, with openssl "
    "pkey -in KEY -out FILE"
)


def missing_options(given: Collection[str]) -> dict[str, str | int]:
    """Return the options that ``given``, the names of those in a URL, lacks.

    A service, in libpq's file of services, may have ``sslpassword``: an option that is given here would replace it.
    """
    has_service = "service" in given or "PGSERVICE" in os.environ
    return {
        name: value
        for name, value in OPTIONS.items()
        if name not in given and not (has_service and name == "sslpassword")
    }
