"""A client's TLS, and why TLS failed, as a sentence with a cure: OpenSSL's own errors name neither."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.endpoints import HostnameEndpoint, clientFromString, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from zope.interface import implementer

from replication.net.endpoints import split_endpoint
from replication.net.files import refuse_pipes
from replication.net.trust import ISSUER_NOT_FOUND, MAX_NAMES, UNKNOWN_AUTHORITY, password_fault, trust_cure

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, Name
    from twisted.internet.interfaces import IStreamClientEndpoint
    from twisted.internet.ssl import PrivateCertificate

_NO_TLS: Final = "the port does not answer with TLS: connect without TLS, or switch it on there"
_PLAIN_PEER: Final = "this port uses TLS, but the peer connects without it: write tls: at the peer (HTTP: https://)"
_VERSION: Final = "the two ends have no version of TLS in common: update the end that lacks TLS 1.2"
_MEANINGS: Final = {  # by words of OpenSSL's reason
    "wrong version number": _NO_TLS,
    "packet length too long": _NO_TLS,
    "record layer failure": _NO_TLS,
    "unsupported protocol": _VERSION,
    "protocol version": _VERSION,
    "http request": "the peer sends HTTP without TLS: write https:// there",
    "certificate required": "a client certificate is required: give certificate and private_key in [tls]",
    "handshake failure": "the peer refuses the handshake: it may require a client certificate",
    "did not return a certificate": "the peer has no client certificate",
    "unknown ca": "the peer does not trust the authority of this end's certificate",
    "certificate expired": "the peer finds that this end's certificate has expired",
    "bad certificate": "the peer refuses this end's certificate",
    "internal error": "the peer refuses this end's certificate; its log has the reason",  # by its name
    "certificate unknown": "the peer refuses this end's certificate; its log has the reason",
    "unsupported certificate": "the peer refuses this end's certificate; its log has the reason",
    "decrypt error": "the peer refuses this end's certificate; its log has the reason",  # by its signature
}


class RefusedCertificate(msgspec.Struct, frozen=True):
    """Why the peer's certificate is refused: the application data of the connection, for ``describe_tls_error``."""

    why: str


def client_tls(
    host: str, files: tuple[str, str] | None, authorities: str | None = None
) -> IOpenSSLClientConnectionCreator:
    """Return what checks the certificate of ``host``, and shows the certificates and the private key in ``files``.

    The files are read now.  ``authorities``: a directory of those to trust, instead of ``SSL_CERT_FILE``.
    ImportError without the extra; OSError or ValueError if they cannot be used.
    """
    from twisted.internet.ssl import optionsForClientTLS  # noqa: PLC0415 (an extra)

    own, between = (None, []) if files is None else _load_files(*files)
    extra = {"extraCertChain": between} if between else None
    trusted = None if authorities is None else _authorities_in(authorities)
    options = optionsForClientTLS(host, trusted, clientCertificate=own, extraCertificateOptions=extra)
    return _Checked(options, host)


def tls_endpoint(reactor: Any, description: str) -> IStreamClientEndpoint:
    """Return the endpoint of ``description``, whose files are read now; errors as those of ``client_tls``.

    Twisted's ``tls:`` shows only the first certificate of a file, and no intermediate certificates.
    """
    kind, named = split_endpoint(description, "host", "port", "timeout", "bindAddress")
    certificate = named.get("certificate")
    if kind != "tls" or not certificate:
        check_files_of(description)
        endpoint: IStreamClientEndpoint = clientFromString(reactor, description)
        return endpoint
    host, bound = named["host"], named.get("bindAddress")
    creator = client_tls(host, (certificate, named.get("privateKey") or certificate), named.get("trustRoots"))
    if inner := named.get("endpoint"):
        return wrapClientTLS(creator, clientFromString(reactor, inner))
    timeout, bind = float(named.get("timeout", 30)), None if bound is None else (bound, 0)
    return wrapClientTLS(creator, HostnameEndpoint(reactor, host, int(named["port"]), timeout, bind))


def _authorities_in(directory: str) -> Any:
    """Return the certificates of the files ``*.pem`` in a directory, as ``trustRoots`` of an endpoint names them."""
    from OpenSSL import SSL, crypto  # noqa: PLC0415 (an extra)
    from twisted.internet.ssl import Certificate, trustRootFromCertificates  # noqa: PLC0415 (an extra)

    found = []
    for each in sorted(Path(directory).iterdir()):
        if each.suffix.lower() == ".pem":
            with suppress(SSL.Error, crypto.Error, OSError):  # as Twisted does, which has no public function for it
                found.append(Certificate.loadPEM(each.read_bytes()))
    return trustRootFromCertificates(found)


def _load_files(certificate: str, key: str) -> tuple[PrivateCertificate, list[Any]]:
    """Return a client's certificate and key, and the further certificates in the file, as pyOpenSSL has them.

    ValueError: a file cannot be used; OSError: it cannot be read.
    """
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415 (an extra)
    from OpenSSL import SSL, crypto  # noqa: PLC0415 (an extra)
    from twisted.internet.ssl import Certificate, KeyPair, PrivateCertificate  # noqa: PLC0415 (an extra)

    refuse_pipes(certificate)
    check_key(key)
    shown, private = Path(certificate).read_bytes(), Path(key).read_bytes()
    file = certificate
    try:
        own = Certificate.loadPEM(shown)
        between = [crypto.X509.from_cryptography(each) for each in load_pem_x509_certificates(shown)[1:]]
        file = key
        pair = KeyPair.load(private, 1)
    except (SSL.Error, crypto.Error, ValueError) as error:
        raise ValueError(f"{file} is not in PEM, or not whole") from error
    try:
        shows: PrivateCertificate = PrivateCertificate.fromCertificateAndKeyPair(own, pair)
    except Exception as error:  # Twisted's is of no class of its own
        raise ValueError(f"the key in {key} is not that of the certificate in {certificate}") from error
    return shows, between


@implementer(IOpenSSLClientConnectionCreator)
class _Checked(msgspec.Struct, frozen=True):
    """Makes the connections of ``creator``, with ``check_host``."""

    creator: IOpenSSLClientConnectionCreator
    host: str

    def clientConnectionForTLS(self, tlsProtocol: Any) -> Any:  # noqa: N803 (Twisted's names)
        connection = self.creator.clientConnectionForTLS(tlsProtocol)
        check_host(connection, self.host)
        return connection


def check_host(connection: Any, host: str) -> None:
    """Let the handshake of pyOpenSSL's ``connection`` fail unless the peer's certificate is for ``host``.

    Twisted does so, too; but from 26.10 on it accepts, for any host, a certificate with no name or with a wrong one.
    It would also close without an alert, and the peer's log would have nothing.
    """
    from OpenSSL.SSL import VERIFY_FAIL_IF_NO_PEER_CERT, VERIFY_PEER  # noqa: PLC0415 (an extra)
    from service_identity.cryptography import (  # noqa: PLC0415 (an extra)
        verify_certificate_hostname,
        verify_certificate_ip_address,
    )

    verify = verify_certificate_ip_address if isIPAddress(host) or isIPv6Address(host) else verify_certificate_hostname

    def check(handshake: Any, certificate: Any, number: int, depth: int, ok: int) -> bool:
        if not ok:
            unknown = f"the certificate is of an authority that is not trusted: {trust_cure()}"
            why = why_refused(certificate.to_cryptography(), number, depth, unknown)
            handshake.set_app_data(RefusedCertificate(why))
        if depth or not ok:
            return bool(ok)
        try:
            verify(certificate.to_cryptography(), host)
        except Exception as error:  # noqa: BLE001 (OpenSSL would drop it)
            handshake.set_app_data(RefusedCertificate(_why_not_for_host(error, certificate.to_cryptography())))
            return False
        return True

    connection.set_verify(VERIFY_PEER | VERIFY_FAIL_IF_NO_PEER_CERT, check)


def _why_not_for_host(error: Exception, certificate: Certificate) -> str:
    if type(error).__name__ == "CertificateError":
        return f"the certificate needs the host in its subjectAltName: issue another one ({error})"
    names = ", ".join(names_of(certificate))[:MAX_NAMES]
    return f"the certificate is for another host: connect to a name that it has{names and ': '}{names}"


def check_key(file: str) -> None:
    """Raise ValueError if the private key in a file has a password: OpenSSL would ask a terminal, and block.

    OSError if the file cannot be read, or is a pipe.  A file that is no key passes: OpenSSL reports it later.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415 (an extra)

    refuse_pipes(file)
    key = Path(file).read_bytes()
    try:
        load_pem_private_key(key, None)
    except TypeError as error:
        raise ValueError(password_fault(file)) from error
    except Exception:  # noqa: BLE001, S110 (OpenSSL reads the file next, and has the better error)
        pass


def check_files_of(endpoint: str) -> None:
    """Check the certificate and the private key that a client's endpoint names: Twisted's errors name neither.

    ValueError, with the files, if they cannot be used; OSError if they cannot be read.
    """
    kind, named = split_endpoint(endpoint)
    certificate, key = named.get("certificate"), named.get("privateKey")
    if kind == "tls" and certificate:
        _load_files(certificate, key or certificate)
        return
    refuse_pipes(certificate)
    if key:
        check_key(key)


def describe_tls_error(error: BaseException | None, transport: Any, *, server: bool = False) -> str | None:
    """Return why TLS failed; None if ``error`` is not an error of TLS.

    ``transport.getHandle()`` is pyOpenSSL's connection, which has the certificate that was refused.  ``server``:
    whether the peer has connected to this end.
    """
    if type(error).__module__.partition(".")[0] != "OpenSSL" or error is None:
        return None
    reasons = error.args[0] if error.args and isinstance(error.args[0], list) else []
    text = ", ".join(each[-1] for each in reasons) or str(error) or "the connection was cut off"
    meaning = next((meaning for words, meaning in _MEANINGS.items() if words in text), None)
    if server and meaning == _NO_TLS:
        meaning = _PLAIN_PEER
    if "verify failed" in text:
        refused = transport.getHandle().get_app_data()
        meaning = refused.why if isinstance(refused, RefusedCertificate) else None
    return f"TLS failed: {text}" if meaning is None else f"TLS failed: {meaning} ({text})"


def why_refused(certificate: Certificate, number: int, depth: int, unknown: str) -> str:
    """Return why OpenSSL refuses a certificate of a chain; the host was not compared yet.

    ``number`` is OpenSSL's error, and ``depth`` 0 the peer's own certificate.  ``unknown``: what to return if the
    authority is not known.
    """
    from cryptography.hazmat.bindings.openssl.binding import Binding  # noqa: PLC0415 (an extra)

    if why := why_not_valid(certificate):
        return of_authority(why, certificate, depth)
    if number in ISSUER_NOT_FOUND:
        issuer = _shown(certificate.issuer)
        cure = "if that is an intermediate authority, the peer must send its certificate, too"
        return f"{unknown}; its issuer is {issuer}: {cure}"
    if number in UNKNOWN_AUTHORITY:
        return unknown
    binding = Binding()
    text = binding.ffi.string(binding.lib.X509_verify_cert_error_string(number)).decode()
    return f"an authority of the certificate is refused: {text}" if depth else f"the certificate is refused: {text}"


def of_authority(why: str, certificate: Certificate, depth: int) -> str:
    """Return ``why``, with the name of the authority; at depth 0 the certificate is the peer's own."""
    return why if depth == 0 else f"{why}: it is that of the authority {_shown(certificate.subject)}"


def _shown(name: Name) -> str:
    return repr(name.rfc4514_string()[:MAX_NAMES])


def names_of(certificate: Certificate) -> list[str]:
    """Return the names of a certificate's subjectAltName, in small letters, and the addresses."""
    from cryptography import x509  # noqa: PLC0415 (an extra)

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    names = found.get_values_for_type(x509.DNSName)
    return [*map(str.lower, names), *map(str, found.get_values_for_type(x509.IPAddress))]


def why_not_valid(certificate: Certificate) -> str | None:
    """Return why a certificate is not valid today, or None."""
    now, first, last = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if last < now:
        return f"the certificate has expired on {last:%Y-%m-%d}"
    return f"the certificate is not valid before {first:%Y-%m-%d}: check the clocks" if first > now else None
