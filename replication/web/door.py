"""Who is let in: whoever shows the secret; or, where there is none, whoever is on this machine."""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Final

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress

from replication.errors import ConfigError
from replication.web.exchange import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.web.exchange import Refused

CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}


def bearer(secret: str) -> bytes:
    """Return the Authorization header that shows ``secret``; ConfigError if a header cannot carry it."""
    if not secret.strip() or not secret.isprintable() or secret != secret.strip():
        raise ConfigError("the secret must be one line of printable text with no space around it, and not empty")
    return b"Bearer " + secret.encode()


def is_local(address: object) -> bool:
    """Whether a peer at ``address`` must be on this machine: loopback, or a unix socket."""
    match address:
        case UNIXAddress():
            return True
        case IPv4Address(host=host) | IPv6Address(host=host):
            ip = ipaddress.ip_address(host)
            return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
    return False


class Door:
    """Decides by a request's peer and its Authorization headers."""

    def __init__(self, secret: str | None) -> None:
        """Let in who shows ``secret``, or with None who is on this machine; ConfigError as from :func:`bearer`."""
        self.has_lock = secret is not None
        self._shown = bearer(secret) if secret is not None else b""

    def refusal(self, peer: object, shown: Sequence[bytes]) -> Refused | None:
        """Return why the sender of the Authorization headers ``shown``, at the address ``peer``, must stay out."""
        if not self.has_lock:
            return (
                None if is_local(peer) else refuse(403, "open to this machine only; --secret-file opens it to others")
            )
        if len(shown) != 1:
            return refuse(401, "one header 'Authorization: Bearer SECRET' is needed here", CHALLENGE)
        scheme, _, secret = shown[0].strip().partition(b" ")
        if not hmac.compare_digest(scheme.capitalize() + b" " + secret.strip(), self._shown):
            return refuse(401, "a wrong secret: both sides must be given the same --secret-file", CHALLENGE)
        return None
