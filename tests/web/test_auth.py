"""Which requests have access."""

from __future__ import annotations

import socket
from unittest.mock import patch

import pytest
from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.web.http_headers import Headers

from replication.net.access import EVERY_RIGHT, Access, Grant, Rights
from replication.web.address import bearer
from replication.web.auth import AccessPolicy
from replication.web.request import RequestError

LOCAL = IPv4Address("TCP", "127.0.0.1", 1)


def status(access: AccessPolicy, *authorization: bytes, peer: object = None) -> int | None:
    error = error_of(access, peer, Headers({b"host": [b"localhost:9093"], b"authorization": authorization}))
    return None if error is None else error.answer.status


def error_of(access: AccessPolicy, peer: object, headers: Headers) -> RequestError | None:
    try:
        access.rights(peer, headers)
    except RequestError as error:
        return error
    return None


def test_the_secret_gives_access_from_any_address() -> None:
    access = AccessPolicy("correct horse")
    assert status(access, b"Bearer correct horse") is None
    assert status(access, b"bearer  correct horse ") is None
    assert status(access, bearer("correct horse")) is None


@pytest.mark.parametrize(
    "headers",
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
def test_any_other_header_is_refused_on_this_machine_too(headers: list[bytes]) -> None:
    error = error_of(AccessPolicy("correct horse"), LOCAL, Headers({b"authorization": headers}))
    assert error is not None
    assert error.answer.status == 401
    assert error.answer.headers == {"WWW-Authenticate": "Bearer"}


def test_a_secret_may_have_any_printable_characters() -> None:
    assert status(AccessPolicy("gr\u00fc\u00df"), "Bearer gr\u00fc\u00df".encode()) is None


def test_without_a_secret_only_this_machine_has_access() -> None:
    access = AccessPolicy(None)
    assert status(access, peer=IPv4Address("TCP", "127.0.0.1", 1)) is None
    assert status(access, b"Bearer whatever", peer=IPv4Address("TCP", "192.0.2.7", 1)) == 403


def refusal(access: AccessPolicy, peer: object = LOCAL, **headers: str) -> str | None:
    error = error_of(access, peer, Headers({name: [text] for name, text in headers.items()}))
    return None if error is None else error.answer.body.decode()


@pytest.mark.parametrize(
    "host",
    [
        "localhost:9093",
        "LOCALHOST",
        "localhost.:9093",
        "orders.localhost:9093",
        "127.0.0.1:9093",
        "192.0.2.7:9093",
        "[::1]:9093",
        "[::1]",
        f"{socket.gethostname()}:9093",
    ],
)
def test_an_address_and_a_name_of_this_machine_may_be_called(host: str) -> None:
    """A page under an address cannot have the address changed: only names are resolved again."""
    assert refusal(AccessPolicy(None), host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:9093",
        "localhost.evil.example",
        "127.0.0.1.evil.example:9093",
        "1.evil",
        "[::1].evil",
        "",
        "a b",
        ":1",
    ],
)
def test_any_other_host_is_refused_as_dns_rebinding(host: str) -> None:
    assert "is no name of this machine: call an address or localhost" in (refusal(AccessPolicy(None), host=host) or "")


def test_headers_that_are_not_utf_8_are_refused() -> None:
    for headers in ({b"host": [b"local\xbehost"]}, {b"host": [b"localhost"], b"origin": [b"http://\xbe"]}):
        error = error_of(AccessPolicy(None), LOCAL, Headers(headers))
        assert error is not None
        assert error.answer.status == 403
        assert b"\\xbe" in error.answer.body


def test_two_hosts_are_refused() -> None:
    error = error_of(AccessPolicy(None), LOCAL, Headers({b"host": [b"localhost", b"evil.example"]}))
    assert error is not None
    assert error.answer.status == 403


def test_a_request_of_http_1_0_has_no_host_and_no_browser_sends_it() -> None:
    assert refusal(AccessPolicy(None)) is None


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://localhost:3000", "null", "http://127.0.0.1:9093", "localhost:9093", ""]
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    for peer in (LOCAL, UNIXAddress(None)):
        found = refusal(AccessPolicy(None), peer, host="localhost:9093", origin=origin)
        assert "a page of the origin" in (found or "")


def test_a_page_of_the_same_origin_has_access() -> None:
    assert refusal(AccessPolicy(None), host="localhost:9093", origin="http://localhost:9093") is None


def test_no_browser_connects_to_a_unix_socket_so_any_host_is_right_there() -> None:
    assert refusal(AccessPolicy(None), UNIXAddress(None), host="master") is None


def test_with_a_secret_any_host_and_origin_is_right() -> None:
    """A page does not have the secret; a proxy passes on the names that it is called by."""
    access, secret = AccessPolicy("s"), "Bearer s"
    assert refusal(access, host="api.example.com", origin="https://example.com", authorization=secret) is None


def test_where_clients_show_certificates_every_address_has_access_without_a_secret_and_no_page_of_another_site() -> (
    None
):
    """A browser shows the user's certificate for every page."""
    elsewhere, access = IPv4Address("TCP", "192.0.2.7", 1), AccessPolicy(None, certified=True)
    assert refusal(access, elsewhere, host="db1.example.com:9093") is None
    assert refusal(access, elsewhere, host="db1.example.com:9093", origin="https://db1.example.com:9093") is None
    found = refusal(access, elsewhere, host="db1.example.com:9093", origin="https://evil.example")
    assert "a page of the origin" in (found or "")
    assert status(AccessPolicy("correct horse", certified=True), peer=elsewhere) == 401


def test_each_secret_has_its_own_rights_and_the_first_one_every_right() -> None:
    reader, writer = Rights(("reader",), {"orders"}), Rights(("writer",), (), {"orders"})
    access = Access([Grant(reader, secret="r"), Grant(writer, secret="w")])
    for secret, rights in ((b"s", EVERY_RIGHT), (b"r", reader), (b"w", writer)):
        headers = Headers({b"authorization": [b"Bearer " + secret]})
        assert AccessPolicy("s", access=access).rights(LOCAL, headers) == rights
    alone = AccessPolicy(None, access=access)
    assert alone.has_secrets
    assert status(alone, b"Bearer r") is None
    assert status(alone, peer=LOCAL) == 401, "as soon as there is one secret, each request needs one"


def test_secrets_that_are_replaced_count_from_the_next_request_on() -> None:
    access = Access([])
    policy = AccessPolicy("old", access=access)
    access.replace([Grant(Rights(("reader",), {"orders"}), secret="second")], "new")
    assert policy.rights(LOCAL, Headers({b"authorization": [b"Bearer new"]})) == EVERY_RIGHT
    assert (status(policy, b"Bearer second"), status(policy, b"Bearer old")) == (None, 401)
    access.replace([], None)
    assert not policy.has_secrets


def test_a_request_has_the_rights_that_both_its_secret_and_its_certificate_give() -> None:
    access = Access([Grant(Rights(("reader",), {"orders", "stock"}), secret="r")])
    shown: list[Rights | None] = [Rights(("worker1",), {"orders", "caches"}), None]
    headers = Headers({b"authorization": [b"Bearer r"]})
    with patch.object(Access, "of_transport", lambda *_: shown.pop(0)):
        assert AccessPolicy(None, True, access).rights(LOCAL, headers).read == {"orders"}
        error = error_of(AccessPolicy(None, True, access), LOCAL, headers)
    assert error is not None
    assert error.answer.status == 403
    assert b"no [access] table names the certificate" in error.answer.body
