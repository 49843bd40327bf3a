"""Checks of ``replication doctor`` on the TLS of a writer: each reason for which it fails has a line and a cure."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from replication.cli.findings import Finding
from replication.net.trust import trust_cure
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
_REFUSALS: Final = {  # by words of OpenSSL's reason; {} is the certificate that was shown
    "CERTIFICATE_REQUIRED": (_NONE, _GIVE),
    "HANDSHAKE_FAILURE": (_NONE, _GIVE),  # TLS 1.2
    "UNKNOWN_CA": ("it does not trust the authority of {}", _AUTHORITY),
    "CERTIFICATE_EXPIRED": ("it finds that {} has expired, or is not valid yet", _RENEW),
    "UNSUPPORTED_CERTIFICATE": ("it refuses {}, which is not one for clients", _PURPOSE),
    "INTERNAL_ERROR": ("it refuses the name in {}", _NAME),  # what `allow` leads to
}


def describe_tls_failure(where: str, error: ssl.SSLError, shown: tuple[str, str] | None) -> Finding:
    """Return the finding for TLS that failed, while this end showed the certificate and key in the files ``shown``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        cure = f"connect to a name that it has; else renew the certificate, set the clock; {trust_cure()}"
        return Finding(where, f"its certificate is refused: {error.verify_message}", cure)
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
    with suppress(OSError):  # among them TimeoutError: it waits for a request, as it should
        try:
            first_line(parts.hostname or "", parts.port or 443, tls=True, certificate=certificate)
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) and error.reason:
                yield describe_tls_failure(url, error, certificate)


def limit_wait(reading: socket.socket, deadline: float) -> None:
    """Set the socket's timeout to the time left until ``deadline``; TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")  # as the socket raises it
    reading.settimeout(left)


def first_line(host: str, port: int, *, tls: bool, certificate: tuple[str, str] | None) -> tuple[str, float | None]:
    """Return the first line that a peer sends, and in how many days its certificate expires, if it has one.

    ``certificate``: the files with the certificate and key that TLS shows.  ConfigError if they cannot be used.
    TimeoutError after PATIENCE seconds without a line, once the connection is there.
    """
    context, days = tls_context(certificate) if tls else None, None
    reading = socket.create_connection((host, port), PATIENCE)
    if context is not None:
        secure = context.wrap_socket(reading, server_hostname=host)  # if it fails, it closes the connection
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
