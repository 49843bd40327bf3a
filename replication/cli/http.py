"""One process's HTTP API, as the command line calls it: blocking, a call at a time, over a connection that is kept."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from replication.config import read_secret
from replication.errors import ConfigError, ReplicationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

DEFAULT_URL: Final = "http://127.0.0.1:9093"
PATIENCE: Final = 60.0  # seconds for an answer
_PASSING: Final = frozenset({408, 429, 502, 503, 504})  # statuses that may be different next time


class HttpError(ReplicationError):
    """The API did not do what was asked; ``passing`` says that it may do so later."""

    def __init__(self, text: str, *, passing: bool) -> None:
        """Keep what to tell the user."""
        super().__init__(text)
        self.passing = passing


class HttpApi:
    """Calls the API at ``url``, with ``secret`` if it wants one."""

    def __init__(self, url: str, secret: str | None = None) -> None:
        """Check the URL; ConfigError if it is none."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ConfigError(f"not the URL of an HTTP API: {url!r}; it looks like {DEFAULT_URL}")
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._connection = connect(parts.hostname, port, timeout=PATIENCE)
        self._headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

    def close(self) -> None:
        """Close the connection; another call opens it again."""
        self._connection.close()

    def call(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """Return the decoded answer; HttpError says what is wrong, and with which URL."""
        try:
            self._connection.request(method, self._prefix + path, body, {**self._headers, **(headers or {})})
            response = self._connection.getresponse()
            answer = response.read()
        except http.client.BadStatusLine as error:
            self._connection.close()
            if str(error).lstrip("'").startswith(("SERVER ", "ERROR ", "PING ")):
                raise HttpError(
                    f"{self.url} speaks the replication wire, not HTTP, whose port is usually the next one",
                    passing=False,
                ) from error
            raise HttpError(f"{self.url} hung up", passing=True) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise HttpError(f"cannot reach {self.url}: {why}; is the daemon running there?", passing=True) from error
        try:
            said = json.loads(answer)
        except ValueError:
            said = None
        if response.status == http.HTTPStatus.OK and said is not None:
            return said
        detail = said.get("detail") or said.get("error") if isinstance(said, dict) else None
        if response.status == http.HTTPStatus.UNAUTHORIZED and "Authorization" not in self._headers:
            detail = "it wants a secret: give --secret-file FILE"
        raise HttpError(
            f"{self.url} says {response.status}: {detail or f'{response.reason}; is that a replication daemon?'}",
            passing=response.status in _PASSING,
        )


def add_http_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--http`` and ``--secret-file``."""
    parser.add_argument("--http", metavar="URL", default=DEFAULT_URL, help="the daemon's HTTP [%(default)s]")
    parser.add_argument("--secret-file", metavar="FILE", help="holds the secret that the daemon was started with")


def open_api(parser: argparse.ArgumentParser, found: argparse.Namespace) -> HttpApi:
    """Return the API that the options name; a URL that is none is wrong usage."""
    secret = None if found.secret_file is None else read_secret(found.secret_file)
    try:
        return HttpApi(found.http, secret)
    except ConfigError as error:
        parser.error(str(error))
