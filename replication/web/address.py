"""The address of an HTTP API: its URL, and the shared secret that it requires (docs/http.md, Access).

Both clients use this module, and so does the configuration.  It imports no Twisted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from replication.errors import ConfigError
from replication.net.files import refuse_pipes
from replication.urls import Url, is_host

if TYPE_CHECKING:
    from urllib.parse import SplitResult

DEFAULT_URL: Final = "http://127.0.0.1:9093"


def split_url(url: str | Url) -> SplitResult:
    """Return the parts of the URL of an HTTP API; ConfigError if it is not one."""
    shown, url = Url(url), Url(url).reveal()
    try:
        parts = urlsplit(url)
        valid = parts.port != 0 and not (parts.username or parts.query or parts.fragment)
        valid = valid and is_host(parts.hostname or "")
    except ValueError:
        valid = False
    if not (valid and parts.scheme in {"http", "https"} and parts.hostname and re.search(r"[^!-~]", url) is None):
        raise ConfigError(f"not the URL of an HTTP API: {shown!r:.200}; write http://HOST:PORT, as in {DEFAULT_URL}")
    return parts


def read_text(path: str, what: str) -> str:
    """Return the text of a file; ConfigError names ``what`` it is if it cannot be read."""
    try:
        refuse_pipes(path)
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the {what} {path}: it is not UTF-8") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the {what} {path}: {reason}") from error


def read_secret(path: str) -> str:
    """Return the shared secret in a file, without the white space around it; ConfigError if there is none."""
    secret = read_text(path, "secret file").strip()
    if not secret.isprintable() or not secret:
        fault = "is not one line of printable text" if secret else "is empty"
        raise ConfigError(f"the secret file {path} {fault}: write the secret into it, in one line")
    return secret


def bearer(secret: str) -> bytes:
    """Return the value of the Authorization header for ``secret``; ConfigError if a header cannot carry it."""
    if not secret.strip() or not secret.isprintable() or secret != secret.strip():
        raise ConfigError("the secret must be one line of printable text with no space around it, and not empty")
    return b"Bearer " + secret.encode()
