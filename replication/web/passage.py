"""The relays that a request has passed through: one that receives its own request again does not pass it on.

Relays may name each other in ``catch_up``.  Each would pass a report, or the request of a page, on to the other for
ever.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from twisted.web.http_headers import Headers

HEADER: Final = b"replication-via"
AGAIN: Final = "this request has passed through this relay before: relays ask each other; check catch_up of each"
_passed: Final = ContextVar[tuple[bytes, ...]]("_passed", default=())


def has_passed(headers: Headers, here: bytes) -> bool:
    """Return whether a request that arrives has been here before; what is requested to answer it notes that it was."""
    names = tuple(name.strip() for line in headers.getRawHeaders(HEADER, []) for name in line.split(b","))
    _passed.set((*names, here))
    return here in names


def note_passage(headers: Headers) -> Headers:
    """Return the headers of a request that is sent: with a note of the relays, if it is sent to answer another one."""
    if names := _passed.get():
        headers = headers.copy()
        headers.setRawHeaders(HEADER, [b", ".join(names)])
    return headers
