"""Checks of ``replication doctor`` on the TLS of a writer: each reason for which it fails has a line and a cure."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from replication.cli.findings import Finding
from replication.net.trust import MAX_NAMES, UNKNOWN_AUTHORITY, trust_cure
from replication.web.blocking_client import tls_context

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE: Final = 5.0  # seconds for a line of the wire, or an answer of HTTP
MAX_LINE: Final = 1_024  # bytes of a first line

_NONE: Final = "it demands a client certificate, and none was shown"
_GIVE: Final = "give certificate and private_key in [tls], or --certificate and --private-key"
_RENEW: Final = "renew it; a worker reads it for each connection"
_AUTHORITY: Final = "show one that its authority has signed, or add the authority to the file of tls.client_ca there"
_NAME: Final = "add its DNS name to tls.allow there, or show one for a name that is in it"
_PURPOSE: Final = "make one for clients, such as `replication certs NAME` does"
_LOG: Final = "its log has the reason: correct what it names, or show another certificate"
_OTHER_HOST: Final = frozenset({62, 64})  # OpenSSL's numbers (X509_V_ERR_…): of a host name, of an address
_CURES: Final = {
    9: "set the clocks of both machines; if they are right, wait until it is valid, or issue another one there",
    10: "renew it there, and send SIGHUP to that process; if it is new, set this machine's clock",
    26: "issue one for servers there, as `replication certs NAME` does, and send SIGHUP to that process",
}
_REFUSALS: Final = {  # by words of OpenSSL's reason; {} is the certificate that was shown
    "CERTIFICATE_REQUIRED": (_NONE, _GIVE),
    "HANDSHAKE_FAILURE": (_NONE, _GIVE),  # TLS 1.2
    "UNKNOWN_CA": ("it does not trust the authority of {}", _AUTHORITY),
    "CERTIFICATE_EXPIRED": ("it finds that {} has expired, or is not valid yet", _RENEW),
    "UNSUPPORTED_CERTIFICATE": ("it refuses {}, which is not one for clients", _PURPOSE),
    "BAD_CERTIFICATE": ("it refuses {}", _LOG),
    "CERTIFICATE_UNKNOWN": ("it refuses {}", _LOG),
    "DECRYPT_ERROR": ("it refuses the signature in {}", _LOG),
    "INTERNAL_ERROR": ("it refuses the name in {}", _NAME),  # what `allow` leads to
}


def describe_tls_failure(
    where: str, place: tuple[str, int], error: ssl.SSLError, shown: tuple[str, str] | None
) -> Finding:
    """Return the finding for TLS that failed, while this end showed the certificate and key in the files ``shown``.

    ``place`` is the host and the port.  If the certificate is for another host, it is asked for the names.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"its certificate is refused: {error.verify_message}"
        if error.verify_code in _OTHER_HOST:
            cure = (
                f"connect to a name that it has{_names_at(*place, shown)}, or renew it there with the name {place[0]}"
            )
        elif error.verify_code in UNKNOWN_AUTHORITY:
            cure = f"{trust_cure()}; the authority of this one must be among them"
        else:
            cure = _CURES.get(error.verify_code, "issue one without this fault, as `replication certs` does")
        return Finding(where, what, cure)
    reason = error.reason or str(error)
    for words, (what, cure) in _REFUSALS.items() if "ALERT" in reason else ():
        if words in reason and (shown is not None or "{}" not in what):
            if shown is not None and what == _NONE:
                break  # OpenSSL's word for something else
            return Finding(where, what.format("" if shown is None else f"the certificate in {shown[0]}"), cure)
    return Finding(
        where, f"TLS fails: {reason}", "use tls: or https: for a port with ssl:, and tcp: or http: for a port with tcp:"
    )


def check_https(url: str, certificate: tuple[str, str] | None) -> Iterator[Finding]:
    """Find why the TLS of an ``https:`` URL fails; nothing if it does not, or if no connection can be made."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return
    place = parts.hostname or "", parts.port or 443
    with suppress(OSError):  # among them TimeoutError: it waits for a request, as it should
        try:
            first_line(place, tls=True, certificate=certificate)
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) and error.reason:
                yield describe_tls_failure(url, place, error, certificate)


def _names_at(host: str, port: int, certificate: tuple[str, str] | None) -> str:
    """Return the names in the certificate of a server, as text for a cure; empty if it cannot be read."""
    context = tls_context(certificate)
    context.check_hostname = False
    try:
        with (
            socket.create_connection((host, port), PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            shown: Any = secure.getpeercert() or {}
    except OSError:
        return ""
    names = ", ".join(name for _, name in shown.get("subjectAltName", ()))
    return f" ({names[:MAX_NAMES]})" if names else ""


def limit_wait(reading: socket.socket, deadline: float) -> None:
    """Set the socket's timeout to the time left until ``deadline``; TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")  # as the socket raises it
    reading.settimeout(left)


def _connected(place: tuple[str, int] | str) -> socket.socket:
    if not isinstance(place, str):
        return socket.create_connection(place, PATIENCE)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE)
    try:
        client.connect(place)
    except OSError:
        client.close()
        raise
    return client


def first_line(
    place: tuple[str, int] | str, *, tls: bool = False, certificate: tuple[str, str] | None = None
) -> tuple[str, float | None]:
    """Return the first line that a peer sends, and in how many days its certificate expires, if it has one.

    ``place``: host and port, or the path of a UNIX socket.
    ``certificate``: the files with the certificate and key that TLS shows.  ConfigError if they cannot be used.
    TimeoutError after PATIENCE seconds without a line, once the connection is there.
    """
    context, days = tls_context(certificate) if tls else None, None
    reading = _connected(place)
    if context is not None:
        secure = context.wrap_socket(reading, server_hostname=place[0])  # if it fails, it closes the connection
        shown = secure.getpeercert()
        days = None if shown is None else (ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()) / 86_400
        reading = secure
    data, ends = b"", time.monotonic() + PATIENCE
    with closing(reading):
        while b"\n" not in data and len(data) < MAX_LINE:
            limit_wait(reading, ends)
            if not (part := reading.recv(MAX_LINE)):
                break
            data += part
    return data.partition(b"\n")[0].decode("utf-8", "backslashreplace").strip(), days
