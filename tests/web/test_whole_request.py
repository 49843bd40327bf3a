"""A request that arrives in one read is parsed as Twisted parses it line by line, or is left to Twisted."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.testing import StringTransport
from twisted.web.http import HTTPChannel, Request

from replication.web.whole_request import LONGEST_HEAD, parse_whole

POST = (
    b"POST /v1/streams/orders/facts?a=%20b HTTP/1.1\r\nHost: localhost:80\r\nContent-Length: 4\r\n"
    b"content-type:\t application/json \r\nX-Two: one\r\nx-two: two\r\nX-Empty:\r\nX-High: \xff\r\n\r\n{\r\n}"
)
GET = b"GET / HTTP/1.1\r\n\r\n"

Parsed = tuple[bytes, bytes, list[tuple[bytes, list[bytes]]], bytes]


class _Received(Request):
    """Notes itself instead of an answer."""

    def process(self) -> None:
        channel, content = cast("Any", self.channel), cast("Any", self.content)
        channel.received.append((self.method, self.uri, _lines(self), content.read()))


def _lines(request: Any) -> list[tuple[bytes, list[bytes]]]:
    return [(name, [*texts]) for name, texts in request.requestHeaders.getAllRawHeaders()]


def by_twisted(data: bytes) -> list[Parsed]:
    """Return the requests that Twisted receives in ``data``, byte by byte."""
    channel: Any = HTTPChannel()
    channel.requestFactory, channel.received = _Received, []
    channel.makeConnection(StringTransport())
    for byte in data:
        channel.dataReceived(bytes([byte]))
    channel.setTimeout(None)
    found: list[Parsed] = channel.received
    return found


def parsed(data: bytes) -> Parsed | None:
    whole = parse_whole(data)
    if whole is None:
        return None
    lines = [(name, [*texts]) for name, texts in whole.headers.getAllRawHeaders()]
    return whole.method, whole.target, lines, whole.body


@pytest.mark.parametrize("data", [POST, GET, POST.replace(b"4", b"04"), GET.replace(b"GET", b"DELETE")])
def test_a_whole_request_is_parsed_as_by_twisted(data: bytes) -> None:
    assert parsed(data) is not None
    assert [parsed(data)] == by_twisted(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n" + GET,
        POST[:-1],
        POST + b"G",
        GET + GET,
        POST[:40],
        GET.replace(b"1.1", b"1.0"),
        GET.replace(b"GET", b"OPTIONS"),
        GET.replace(b"/", b"/ /"),
        GET.replace(b"/ ", b"/\xff "),
        GET.replace(b"\r\n", b"\n"),
        POST.replace(b"4", b"+4"),
        POST.replace(b"4", b"4, 4"),
        POST.replace(b"4\r\n", b"4\r\nContent-Length: 4\r\n"),
        POST.replace(b"X-Two: one", b"Transfer-Encoding: chunked"),
        POST.replace(b"one", b"o\rne"),
        POST.replace(b"one", b"o\nne"),
        POST.replace(b"one", b"o\0ne"),
        POST.replace(b"one", b"one\r\n two"),
        POST.replace(b"X-Two:", b"X-Two :"),
        POST.replace(b"X-Two:", b":"),
        POST.replace(b"X-Two:", b"X-Two"),
        POST.replace(b"one", b"o" * LONGEST_HEAD),
    ],
)
def test_anything_unusual_is_left_to_twisted(data: bytes) -> None:
    assert parsed(data) is None


PIECES = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\t",
        b":",
        b"\0",
        b"\xff",
        b"1",
        b"Content-Length: 4\r\n",
        b"HTTP/1.1",
        b"GET / ",
        b"",
    ]
)


@given(st.sampled_from([POST, GET]), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), PIECES), max_size=3))
def test_what_is_accepted_is_accepted_by_twisted(data: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    """Each change replaces some bytes by a piece."""
    for place, size, piece in changes:
        data = data[:place] + piece + data[place + size :]
    whole = parsed(data)
    if whole is not None:
        assert by_twisted(data) == [whole]
