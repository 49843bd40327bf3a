"""Access: with a secret; or, if there is none, from this machine only (docs/http.md, Access)."""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from base64 import b64decode
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import attrs
from twisted.internet.address import UNIXAddress

from replication.net.access import EVERY_RIGHT, UNNAMED, Access, Rights
from replication.net.endpoints import is_local
from replication.web.address import bearer
from replication.web.request import RequestError

if TYPE_CHECKING:
    from twisted.web.http_headers import Headers

CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
LOGIN: Final = {"WWW-Authenticate": 'Basic realm="replication: any user name, and the secret", charset="UTF-8"'}
UNAUTHORIZED: Final = 401


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


@attrs.define(eq=False)
class AccessPolicy:
    """Decides by the address and the headers of a request.

    It is made from the secret, or from None: then an address of this machine is required, and no page of another site
    may have caused the request.  With ``certified`` each connection has shown a client certificate that is accepted, so
    without a secret every address has access.  ``access`` has further secrets, and the rights of certificates; a
    request has the rights that both its secret and its certificate give.  ConfigError as from ``bearer``.
    """

    secret: str | None = attrs.field(repr=False)
    certified: bool = False
    access: Access = attrs.field(factory=Access)
    _secrets: list[tuple[bytes, Rights]] = attrs.field(init=False, repr=False, factory=list)
    _read: int | None = attrs.field(init=False, default=None)  # ``access.replaced`` when ``_secrets`` were made

    def __attrs_post_init__(self) -> None:
        """Refuse a wrong secret."""
        self._refresh()

    @property
    def has_secrets(self) -> bool:
        """Whether requests need a secret."""
        self._refresh()
        return bool(self._secrets)

    def _refresh(self) -> None:
        """Make the secrets, unless they are those of ``access``."""
        if self._read == self.access.replaced:
            return
        secret = self.access.secret if self.access.replaced else self.secret
        every = [] if secret is None else [(bearer(secret), EVERY_RIGHT)]
        others = [(bearer(each.secret), each.rights) for each in self.access.grants if each.secret is not None]
        self._secrets, self._read = [*every, *others], self.access.replaced

    def rights(self, peer: object, headers: Headers, transport: object = None) -> Rights:
        """Return what the sender of a request may do; RequestError if it has no access.

        The request has come from the address ``peer``, with these headers, over ``transport``.
        """
        if self.has_secrets:
            given = self._rights_of_secret(headers)
        else:
            why = _why_other_site(headers) if self.certified else _why_not_local(peer, headers)
            if why is not None:
                raise RequestError(403, why if self.certified else f"{why}; --secret-file opens it to others")
            given = EVERY_RIGHT
        shown = self.access.of_transport(transport)
        if shown is None:
            raise RequestError(403, UNNAMED)
        return given & shown

    def _rights_of_secret(self, headers: Headers) -> Rights:
        authorization = headers.getRawHeaders(b"authorization", [])
        if len(authorization) != 1:
            raise RequestError(401, "one header 'Authorization: Bearer SECRET' is needed here", CHALLENGE)
        scheme, _, secret = authorization[0].strip().partition(b" ")
        if scheme.lower() == b"basic":  # a browser, which sends it with what the page of another site requests, too
            if why := _why_other_site(headers):
                raise RequestError(403, why)
            scheme, secret = b"bearer", _password(secret)
        sent = scheme.capitalize() + b" " + secret.strip()
        found = [rights for expected, rights in self._secrets if hmac.compare_digest(sent, expected)]
        if not found:
            raise RequestError(401, "a wrong secret: both sides must be given the same --secret-file", CHALLENGE)
        return found[0]


def with_login(error: RequestError) -> RequestError:
    """Return the error for a browser, which then asks its user for the secret."""
    status, detail = error.args
    return RequestError(status, detail, LOGIN) if status == UNAUTHORIZED else error


def _password(credentials: bytes) -> bytes:
    """Return the password of HTTP Basic, empty if there is none; the user name does not matter."""
    try:
        return b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _why_not_local(peer: object, headers: Headers) -> str | None:
    if not is_local(peer):
        return "open to this machine only"
    host = _text(headers, b"host")
    if headers.hasHeader(b"host") and not isinstance(peer, UNIXAddress) and not is_own_name(host):
        return f"{host!r:.100} is no name of this machine: call an address or localhost"
    return _why_other_site(headers)


def _text(headers: Headers, name: bytes) -> str:
    """Return all values of a header; Twisted raises an error for those that are not UTF-8."""
    return b", ".join(headers.getRawHeaders(name, [])).decode("utf-8", "backslashreplace")


def _why_other_site(headers: Headers) -> str | None:
    """Return why a request is of a page of another site; a browser that shows one sends ``Origin``."""
    if not headers.hasHeader(b"origin"):
        return None
    host, origin = _text(headers, b"host"), _text(headers, b"origin")
    if origin not in {f"http://{host}", f"https://{host}"}:
        return f"a page of the origin {origin!r:.100} has no access"
    return None
