"""Texts as URLs, endpoints and passwords: what is shown has no password, and none of them stops the process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from twisted.internet.testing import MemoryReactorClock

from replication.errors import ConfigError
from replication.net.endpoints import default_http_url, is_redis, split_endpoint
from replication.net.redis_connection import RedisPlace
from replication.urls import Url, hide_secrets
from replication.web.address import bearer, split_url

if TYPE_CHECKING:
    from collections.abc import Callable

PLANTED = "Pl4nted"  # stands for a password


def check(data: bytes) -> None:
    """Use each line as a URL, and as the user, the host and the options of one with a password."""
    for text in data.decode(errors="replace").split("\n"):
        check_text(text)
        for url in (
            f"redis://user:{PLANTED}{quote(text, safe='')}@host:1/0",
            f"postgresql://{quote(text, safe='')}:{PLANTED}@host/name",
            f"postgresql://user:{PLANTED}@{text}",
            f"postgresql://host/name?password={PLANTED}&x={quote(text, safe='')}",
            f"https://{PLANTED}@{quote(text, safe='')}/",
        ):
            shown = (str(Url(url)), repr(Url(url)), hide_secrets(f"cannot use {url}"))
            assert PLANTED not in text
            assert not any(PLANTED in each for each in shown), shown
            assert PLANTED not in refusal(partial(RedisPlace.parse, MemoryReactorClock(), url))


def check_text(text: str) -> None:
    """Parse a text as everything that a configuration has."""
    url = Url(text)
    assert url.reveal() == text
    str(url)
    hide_secrets(text)
    url.hide_in(f"failed: {text}")
    is_redis(text)
    split_endpoint(text, "host", "port")
    refusal(lambda: RedisPlace.parse(MemoryReactorClock(), text))
    refusal(lambda: split_url(text))
    refusal(lambda: bearer(text))
    default = default_http_url(text)
    if default is not None:
        refusal(lambda: split_url(default))


def refusal(parse: Callable[[], object]) -> str:
    """Return why a text is refused; empty if it is not."""
    try:
        parse()
    except ConfigError as error:
        assert str(error)
        return str(error)
    return ""
