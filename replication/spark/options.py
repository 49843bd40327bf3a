"""The options of the Spark source, checked; docs/spark.md lists them."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

import attrs

from replication.errors import ConfigError, RemoteProtocolError, did_you_mean
from replication.web.address import DEFAULT_URL, read_secret
from replication.web.blocking_client import HttpClient, StreamInfo
from replication.web.pages import MAX_PAGE_ROWS
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

PATIENCE: Final = 300.0  # seconds
KEY_COLUMNS: Final = ("stream", "instance", "token")
Offsets = dict[str, int]


@attrs.frozen
class SourceOptions:
    """All options as one plain value, which executors receive; ``start`` and ``latest`` are the option ``from``."""

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
    access_tokens: bool = False

    @classmethod
    def read(cls, options: Mapping[str, str]) -> Self:
        """Return the options; ConfigError names an option that is unknown or invalid."""
        known = {each.lower() for each in READERS}
        given = {key.lower(): value for key, value in options.items()}
        for key in given:
            if key not in known:
                raise ConfigError(_unknown(key))
        if not given.get("stream"):
            raise ConfigError("give the option stream, the name of a stream")

        values: dict[str, Any] = {}
        for key, (name, read) in READERS.items():
            if key.lower() in given:
                try:
                    values[name] = read(given[key.lower()])
                except (ValueError, ConfigError, RemoteProtocolError) as error:
                    raise ConfigError(f"option {key}: {error}") from None
        return cls(**values, latest=given.get("from") == "latest")

    def check_batch(self) -> Self:
        """Return the options; ConfigError if one is for streaming queries."""
        if self.latest:
            raise ConfigError("option from: 'latest' is for streaming queries: give an ID, or leave the option out")
        if self.max_rows is not None:
            raise ConfigError("option maxRowsPerBatch is for streaming queries: leave it out")
        return self

    def check_query(self) -> Self:
        """Return the options; ConfigError if one is for batches."""
        if self.upto is not None:
            raise ConfigError("option upto is for batches: leave it out; trigger(availableNow=True) ends a query")
        return self

    def client(self, most: float = inf, *, stream_exists: bool = True, page_rows: int = MAX_PAGE_ROWS) -> HttpClient:
        """Return a client; it retries for ``patience``, at most for ``most`` seconds.

        With ``stream_exists`` it retries as well if the process has not received the stream yet.
        """
        return HttpClient(
            self.http,
            self.secret,
            patience=min(self.patience, most),
            stream_exists=stream_exists,
            page_rows=page_rows,
            unauthorized_hint="give the option secretFile, a file with the secret of its --secret-file",
        )

    def info(self, most: float = inf) -> StreamInfo:
        """Return the stream's fields and positions; HttpError if there is no such stream."""
        with closing(self.client(most, stream_exists=False)) as client:
            return client.stream(self.stream)

    def positions(self, info: StreamInfo) -> Offsets:
        """Return the positions of the requested writers."""
        wanted = {name: token for name, token in info.positions.items() if self.instance in (None, name)}
        return dict(sorted(wanted.items()))  # Spark compares offsets as text

    def check_instance(self, info: StreamInfo) -> None:
        """Raise ConfigError, with the known writers, if the requested one is unknown."""
        if self.instance is not None and self.instance not in info.positions:
            known = ", ".join(sorted(info.positions)) or "none yet"
            raise ConfigError(
                f"option instance: stream {self.stream!r} has no writer {self.instance!r}; it has {known}"
            )

    def columns(self, info: StreamInfo) -> tuple[str, ...]:
        """Return the names of the columns after KEY_COLUMNS; ConfigError if the stream's fields cannot be columns."""
        if info.fields is None:
            raise ConfigError(f"option fields: stream {self.stream!r} declares no fields: leave the option out")
        if clash := [each for each in info.fields if each.lower() in KEY_COLUMNS]:
            raise ConfigError(
                f"option fields: fields of stream {self.stream!r} have the names of other columns,"
                f" {', '.join(clash)}: leave the option out"
            )
        return info.fields


def _unknown(key: str) -> str:
    if key == "path":
        return "there is no path: call load() without one, and give the option stream"
    known = f"; known are {', '.join(READERS)}"
    return f"unknown option {key!r}{did_you_mean(key, READERS) or known}"


def _url(text: str) -> str:
    return HttpClient(text).url


def _number(text: str, least: int, fault: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{text!r} is {fault}")
    return int(text)


def _from(text: str) -> int:
    return 0 if text in ("beginning", "latest") else _number(text, 0, "neither an ID nor beginning nor latest")


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


# By the names of options: the attributes of SourceOptions, and the functions that read them.
READERS: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "http": ("http", _url),
    "stream": ("stream", grammar.stream_name),
    "secretFile": ("secret", read_secret),
    "instance": ("instance", grammar.instance_name),
    "from": ("start", _from),
    "upto": ("upto", partial(_number, least=0, fault="not an ID, which is a whole number")),
    "fields": ("with_fields", _truth),
    "maxRowsPerBatch": ("max_rows", partial(_number, least=1, fault="not a whole number from 1 on")),
    "patience": ("patience", _seconds),
    "accessTokens": ("access_tokens", _truth),
}
