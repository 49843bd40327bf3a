"""Who is let in."""

from __future__ import annotations

import pytest
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress

from replication.errors import ConfigError
from replication.web.door import Door, bearer, is_local


@pytest.mark.parametrize(
    ("address", "local"),
    [
        (IPv4Address("TCP", "127.0.0.1", 1), True),
        (IPv4Address("TCP", "127.8.8.8", 1), True),
        (IPv4Address("TCP", "10.0.0.1", 1), False),
        (IPv4Address("TCP", "0.0.0.0", 1), False),
        (IPv6Address("TCP", "::1", 1), True),
        (IPv6Address("TCP", "::ffff:127.0.0.1", 1), True),
        (IPv6Address("TCP", "::ffff:10.0.0.1", 1), False),
        (IPv6Address("TCP", "fe80::1%eth0", 1), False),
        (UNIXAddress(b"/run/socket"), True),
        (UNIXAddress(None), True),
        (None, False),
    ],
)
def test_loopback_and_unix_sockets_are_this_machine(address: object, *, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize("secret", ["", " ", "a\n", " a", "a ", "a\rb", "a\x00", "\udc80"])
def test_a_secret_that_no_header_can_carry_is_a_config_error(secret: str) -> None:
    """Above all an empty file must not become a secret that everybody knows."""
    with pytest.raises(ConfigError, match="one line of printable text"):
        bearer(secret)
    with pytest.raises(ConfigError):
        Door(secret)


def code(door: Door, *shown: bytes, peer: object = None) -> int | None:
    refused = door.refusal(peer, shown)
    return None if refused is None else refused.answer.code


def test_the_secret_opens_the_door_from_anywhere() -> None:
    door = Door("correct horse")
    assert code(door, b"Bearer correct horse") is None
    assert code(door, b"bearer  correct horse ") is None
    assert code(door, bearer("correct horse")) is None


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer correct"],
        [b"Bearer correct horse battery"],
        [b"Basic correct horse"],
        [b"correct horse"],
        [b"Bearer correct horse", b"Bearer correct horse"],
        [b"Bearer \xff"],
    ],
)
def test_anything_else_does_not_not_even_on_this_machine(shown: list[bytes]) -> None:
    refused = Door("correct horse").refusal(IPv4Address("TCP", "127.0.0.1", 1), shown)
    assert refused is not None
    assert refused.answer.code == 401
    assert refused.answer.headers == {"WWW-Authenticate": "Bearer"}


def test_a_secret_may_have_any_printable_characters() -> None:
    assert code(Door("gr\u00fc\u00df"), "Bearer gr\u00fc\u00df".encode()) is None


def test_without_a_secret_only_this_machine_is_served() -> None:
    door = Door(None)
    assert code(door, peer=IPv4Address("TCP", "127.0.0.1", 1)) is None
    assert code(door, b"Bearer whatever", peer=IPv4Address("TCP", "192.0.2.7", 1)) == 403
