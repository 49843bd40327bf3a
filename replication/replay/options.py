"""What a reader of the Spark source asks for: Spark's options, checked, as one plain value that executors get.

=================== =========================================================================== ====================
``http``            where a master serves HTTP, or a worker that keeps a copy                   http://127.0.0.1:9093
``stream``          which one to read
``secretFile``      a file of the driver's machine with the secret that the HTTP wants
``instance``        only this writer
``from``            begin after this ID, or at the ``beginning``; a new query also at the ``latest``   beginning
``upto``            end with this ID; for batches
``fields``          ``true``: a column per declared field instead of ``row``                    false
``maxRowsPerBatch`` rows in a micro-batch, at most; for streaming queries                       all that there are
``patience``        seconds for which the HTTP may be away before a query or a batch fails      300
=================== =========================================================================== ====================
"""

from __future__ import annotations

from contextlib import closing
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from replication.errors import ConfigError, RemoteProtocolError
from replication.replay.api import Api, StreamInfo
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self, TypeVar

    _T = TypeVar("_T")

DEFAULT_URL: Final = "http://127.0.0.1:9093"
PATIENCE: Final = 300.0  # seconds
PLACE: Final = ("stream", "instance", "token")
KNOWN: Final = ("http", "stream", "secretFile", "instance", "from", "upto", "fields", "maxRowsPerBatch", "patience")
Offsets = dict[str, int]


@attrs.frozen
class Question:
    """What is asked for; ``start`` and ``latest`` are what the option ``from`` says."""

    stream: str
    http: str = DEFAULT_URL
    secret: str | None = attrs.field(default=None, repr=False)
    instance: str | None = None
    start: int = 0
    latest: bool = False
    upto: int | None = None
    with_fields: bool = False
    max_rows: int | None = None
    patience: float = PATIENCE

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Return what Spark's options ask for; ConfigError names one that cannot be."""
        known = {each.lower(): each for each in KNOWN}
        given = {key.lower(): value for key, value in options.items()}
        for key in given:
            if key not in known:
                raise ConfigError(_unknown(key))
        if not given.get("stream"):
            raise ConfigError("the option stream says which one to read: give it")

        def value(key: str, read: Callable[[str], _T], otherwise: _T) -> _T:
            text = given.get(key.lower())
            try:
                return otherwise if text is None else read(text)
            except (ValueError, ConfigError, RemoteProtocolError) as error:
                raise ConfigError(f"option {key}: {error}") from None

        begin = given.get("from", "beginning")
        return cls(
            value("stream", grammar.stream_name, grammar.StreamName("")),
            value("http", _url, DEFAULT_URL),
            value("secretFile", _secret, None),
            value("instance", grammar.instance_name, None),
            0 if begin in ("beginning", "latest") else value("from", _from, 0),
            begin == "latest",
            value("upto", _id, None),
            value("fields", _truth, False),
            value("maxRowsPerBatch", _count, None),
            value("patience", _seconds, PATIENCE),
        )

    def check_batch(self) -> Self:
        """Return it if a batch can answer it, else ConfigError."""
        if self.latest:
            raise ConfigError(
                "option from: a batch reads what is there, so 'latest' is for streaming queries: give an ID"
            )
        if self.max_rows is not None:
            raise ConfigError("option maxRowsPerBatch is for streaming queries: leave it out")
        return self

    def check_query(self) -> Self:
        """Return it if a streaming query can answer it, else ConfigError."""
        if self.upto is not None:
            raise ConfigError("option upto is for batches: leave it out; trigger(availableNow=True) ends a query, too")
        return self

    def api(self, most: float = inf) -> Api:
        """Return a connection for a stream that is known, which may be away for ``most`` seconds and ``patience``."""
        return Api(self.http, self.secret, min(self.patience, most), known=True)

    def info(self, most: float = inf) -> StreamInfo:
        """Ask how the stream stands; CatchUpError if there is none."""
        with closing(Api(self.http, self.secret, min(self.patience, most))) as api:
            return api.stream(self.stream)

    def positions(self, info: StreamInfo) -> Offsets:
        """Return how far the writers are that are asked for."""
        wanted = {name: token for name, token in info.positions.items() if self.instance in (None, name)}
        return dict(sorted(wanted.items()))  # offsets are compared as text

    def check_instance(self, info: StreamInfo) -> None:
        """Return if the writer is there that is asked for; else ConfigError lists those that are."""
        if self.instance is not None and self.instance not in info.positions:
            known = ", ".join(sorted(info.positions)) or "none yet"
            raise ConfigError(
                f"option instance: stream {self.stream!r} has no writer {self.instance!r}; it has {known}"
            )

    def columns(self, info: StreamInfo) -> tuple[str, ...]:
        """Return the names of the columns after PLACE; ConfigError if the stream cannot have them."""
        if info.fields is None:
            raise ConfigError(f"option fields: stream {self.stream!r} declares no fields: leave the option out")
        if clash := [each for each in info.fields if each.lower() in PLACE]:
            raise ConfigError(
                f"option fields: stream {self.stream!r} has fields that are called like other columns,"
                f" {', '.join(clash)}: leave the option out"
            )
        return info.fields


def _unknown(key: str) -> str:
    if key == "path":
        return "a stream has no path: call load() without one, and name the stream by the option stream"
    near = get_close_matches(key, [each.lower() for each in KNOWN], 1)
    named = [each for each in KNOWN if each.lower() in near]
    return f"unknown option {key!r}; " + (f"did you mean {named[0]}?" if named else f"known are {', '.join(KNOWN)}")


def _url(text: str) -> str:
    return Api(text).url


def _secret(path: str) -> str:
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or error if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read {path}: {why}") from error
    if not secret or not secret.isprintable():
        raise ValueError(f"{path} does not hold one line of text: put the secret into it")
    return secret


def _id(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not an ID, which is a whole number")
    return int(text)


def _from(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither an ID nor beginning nor latest")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not isfinite(seconds) or seconds < 0:
        raise ValueError(f"{text!r} is not a number of seconds")
    return seconds
