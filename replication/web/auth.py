"""Access: with the shared secret; or, if there is none, from this machine only (docs/http.md, Access)."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import attrs
from twisted.internet.address import UNIXAddress

from replication.net.endpoints import is_local
from replication.web.address import bearer
from replication.web.request import RequestError

if TYPE_CHECKING:
    from twisted.web.http_headers import Headers

CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}


@lru_cache(16)  # clients repeat their Host with each request
def is_own_name(host: str) -> bool:
    """Return whether a Host header has an address, ``localhost`` or the name of this machine.

    The owner of any other name can let it resolve to this machine, and a browser then sends here what a page under
    that name requests (DNS rebinding).
    """
    parts = re.fullmatch(r"(\[[^]]*\]|[^:]*?)\.?(:[0-9]*)?", host.lower())
    name = parts[1] if parts else ""
    if name == "localhost" or name.endswith(".localhost") or (name and name == socket.gethostname().lower()):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")) is not None
    except ValueError:
        return False


@attrs.frozen
class AccessPolicy:
    """Decides by the address and the headers of a request.

    It is made from the secret, or from None: then an address of this machine is required, and no page of another site
    may have caused the request.  With ``certified`` each connection has shown a client certificate that is accepted, so
    without a secret every address has access.  ConfigError as from ``bearer``.
    """

    expected: bytes | None = attrs.field(converter=attrs.converters.optional(bearer))
    certified: bool = False

    def error(self, peer: object, headers: Headers) -> RequestError | None:
        """Return why a request from the address ``peer``, with these headers, is refused, or None."""
        if self.expected is None and self.certified:
            why = _why_other_site(headers)
            return None if why is None else RequestError(403, why)
        if self.expected is None:
            why = _why_not_local(peer, headers)
            return None if why is None else RequestError(403, f"{why}; --secret-file opens it to others")
        authorization = headers.getRawHeaders(b"authorization", [])
        if len(authorization) != 1:
            return RequestError(401, "one header 'Authorization: Bearer SECRET' is needed here", CHALLENGE)
        scheme, _, secret = authorization[0].strip().partition(b" ")
        if not hmac.compare_digest(scheme.capitalize() + b" " + secret.strip(), self.expected):
            return RequestError(401, "a wrong secret: both sides must be given the same --secret-file", CHALLENGE)
        return None


def _why_not_local(peer: object, headers: Headers) -> str | None:
    if not is_local(peer):
        return "open to this machine only"
    hosts = headers.getRawHeaders("host", [])
    host = ", ".join(hosts)
    if hosts and not isinstance(peer, UNIXAddress) and not is_own_name(host):
        return f"{host!r:.100} is no name of this machine: call an address or localhost"
    return _why_other_site(headers)


def _why_other_site(headers: Headers) -> str | None:
    """Return why a request is of a page of another site; a browser that shows one sends ``Origin``."""
    host, origin = (", ".join(headers.getRawHeaders(name, [])) for name in ("host", "origin"))
    if headers.hasHeader("origin") and origin not in {f"http://{host}", f"https://{host}"}:
        return f"a page of the origin {origin!r:.100} has no access"
    return None
