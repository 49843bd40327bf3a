"""A listening ``ssl:`` endpoint that reads its certificate again, and demands certificates of its clients.

Twisted's own reads its files once, and demands nothing (docs/operations.md, TLS).  This module needs the extra ``tls``.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Final

import attrs
from cryptography import x509
from OpenSSL import SSL
from service_identity import CertificateError
from service_identity.hazmat import DNS_ID, DNSPattern
from twisted.internet import ssl
from twisted.internet.endpoints import quoteStringArgument
from twisted.internet.interfaces import IOpenSSLServerConnectionCreator, IStreamServerEndpoint
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.filepath import FilePath
from zope.interface import implementer

from replication.errors import ConfigError
from replication.net.endpoints import SSL_ARGUMENTS, server_endpoint, split_endpoint
from replication.net.files import refuse_pipes
from replication.net.tls import RefusedCertificate, check_key, names_of, why_not_valid, why_refused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from OpenSSL.crypto import X509
    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IAddress, IListeningPort, IProtocolFactory

_WRONG_PURPOSE: Final = 26  # X509_V_ERR_INVALID_PURPOSE
_OTHER_KEY: Final = ("key values mismatch", "no certificate assigned")  # of the same algorithm, of another one


@attrs.frozen
class NamePatterns:
    """DNS names of certificates, such as ``worker1``, or patterns, such as ``*.example.com``.

    A certificate has the DNS names of its subjectAltName.  ConfigError, with the ``key`` of the configuration: one of
    ``names`` is neither.
    """

    names: Sequence[str]
    key: str
    _patterns: list[DNSPattern] = attrs.field(init=False)

    @_patterns.default
    def _parse_names(self) -> list[DNSPattern]:
        try:
            return [DNSPattern.from_bytes(each.encode("idna")) for each in self.names]
        except (CertificateError, UnicodeError) as error:
            raise ConfigError(f"{self.key}: write DNS names such as worker1 or *.example.com: {error}") from error

    def match(self, certificate: x509.Certificate) -> bool:
        """Return whether a certificate has one of the names."""
        return any(_matches(name, pattern) for name in _dns_names(certificate) for pattern in self._patterns)


@attrs.frozen
class ClientRule:
    """Which client certificates are accepted: those of the authority in the file ``authority``, for certain names.

    ``names`` are DNS names such as ``worker1``, or patterns such as ``*.example.com``; none: every name.  A certificate
    is for the names in its subjectAltName.  ConfigError: a name is not one.
    """

    authority: str
    names: Sequence[str] = ()
    _patterns: NamePatterns = attrs.field(init=False)

    @_patterns.default
    def _parse_names(self) -> NamePatterns:
        return NamePatterns(self.names, "tls.allow")

    def refusal(self, certificate: x509.Certificate) -> str | None:
        """Return why ``certificate``, which the authority has signed, is refused; None if it is accepted."""
        if not self.names or self._patterns.match(certificate):
            return None
        names = _dns_names(certificate)
        of = f"for {', '.join(names)!r:.200}" if names else "without a DNS name"
        return f"the certificate is {of}, which tls.allow does not have"

    def verify(self, connection: SSL.Connection, certificate: X509, number: int, depth: int, ok: int) -> bool:
        """Return whether to accept a certificate of a chain; OpenSSL has checked its signature and times.

        ``number`` is OpenSSL's error, and ``depth`` 0 the client's own certificate.
        """
        shown = certificate.to_cryptography()
        if ok:
            why = self.refusal(shown) if depth == 0 else None
        elif number == _WRONG_PURPOSE:
            why = "the certificate is not one for clients"
        else:
            unknown = f"the certificate is of an authority that is not in {self.authority} (tls.client_ca)"
            why = why_refused(shown, number, depth, unknown)
        if why is not None:
            connection.set_app_data(RefusedCertificate(why))
        return why is None


@implementer(IStreamServerEndpoint, IOpenSSLServerConnectionCreator)
class TlsEndpoint:
    """An ``ssl:`` endpoint; ``clients`` is the rule for the certificates of clients.

    ``expires`` is, by file, when the certificate in it expires: the endpoint's own, and that of the authority of its
    clients.  ``lost_names`` are those that the certificate lacks and the one before had.  ``fault`` is why the
    certificate is not valid, None if it is.
    ValueError: ``description`` is wrong.  ConfigError as ``read``.
    """

    def __init__(self, reactor: Any, description: str, clients: ClientRule | None) -> None:
        _, named = split_endpoint(description, *SSL_ARGUMENTS)
        if unknown := [each for each in named if each not in SSL_ARGUMENTS]:
            raise ValueError(f"{unknown[0]} is none of {', '.join(SSL_ARGUMENTS)}")
        if "port" not in named:
            raise ValueError("the port is missing")
        plain = [f"{key}={quoteStringArgument(named[key])}" for key in ("interface", "backlog") if named.get(key)]
        self._tcp = server_endpoint(reactor, ":".join(["tcp", named["port"], *plain]))
        self._reactor, self._named, self._clients = reactor, named, clients
        self.expires: dict[str, datetime] = {}
        self.lost_names: Sequence[str] = ()
        self.fault: str | None = None
        self._names: Sequence[str] = ()
        self.read()

    def read(self) -> datetime:
        """Read key, certificates and authority for new connections; return when the certificate expires.

        ConfigError: a file cannot be read, its content cannot be used, or, except at the start, the certificate is not
        valid today.  What was read before stays then.
        """
        key = self._named.get("privateKey", "server.pem")
        certificate = self._named.get("certKey", key)
        extra = self._named.get("extraCertChain")
        dh, method = self._named.get("dhParameters"), self._named.get("sslmethod")
        try:
            check_key(key)
            refuse_pipes(certificate, extra, dh, None if self._clients is None else self._clients.authority)
            chain = b"\n".join([Path(each).read_bytes() for each in (certificate, extra) if each])
            first = x509.load_pem_x509_certificate(chain)
            options = ssl.CertificateOptions(  # for the versions and ciphers that Twisted accepts
                dhParameters=None if dh is None else ssl.DiffieHellmanParameters.fromFile(FilePath(dh)),
                method=None if method is None else getattr(SSL, method),
            )
            context = options.getContext()
            _use_chain(context, chain)
            context.use_privatekey_file(key)
            context.check_privatekey()  # a key of another algorithm is accepted until then
            if self._clients is not None:
                _refuse_revocation_list(self._clients.authority)
                context.load_verify_locations(self._clients.authority)
                context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT, self._clients.verify)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        except (SSL.Error, ValueError) as error:
            authority = "" if self._clients is None else f", {self._clients.authority}"
            raise ConfigError(f"cannot use {certificate}, {key}{authority} for TLS: {_text(error)}") from error
        if self.expires and (why := why_not_valid(first)):
            raise ConfigError(f"cannot use {certificate} for TLS: {why}")
        self._context = context
        self.fault = why_not_valid(first)
        names = names_of(first)
        self.lost_names = [
            each for each in self._names if each not in names and f"*.{each.partition('.')[2]}" not in names
        ]
        self._names = names
        self.expires = {certificate: first.not_valid_after_utc}
        if self._clients is not None:
            self.expires |= expiries(self._clients.authority)
        return first.not_valid_after_utc

    def listen(self, protocolFactory: IProtocolFactory) -> Deferred[IListeningPort]:  # noqa: N803 (Twisted's name)
        """Listen."""
        return self._tcp.listen(_TlsFactory(self, False, protocolFactory, clock=self._reactor))

    def serverConnectionForTLS(self, tlsProtocol: object) -> SSL.Connection:  # noqa: ARG002, N803 (Twisted's)
        """Return the TLS of a new connection."""
        return SSL.Connection(self._context)


def expiries(file: str) -> dict[str, datetime]:
    """Return when the first certificate expires that a file has, by the file; empty if it cannot be read."""
    try:
        found = x509.load_pem_x509_certificates(Path(file).read_bytes())
    except (OSError, ValueError):
        return {}
    return {file: min(each.not_valid_after_utc for each in found)}


class _TlsFactory(TLSMemoryBIOFactory):
    """Refuses the connections that the factory within refuses; Twisted's would fail there."""

    def buildProtocol(self, addr: IAddress | None) -> Any:
        inner = self.wrappedFactory.buildProtocol(addr)
        return None if inner is None else self.protocol(self, inner)


def _refuse_revocation_list(authority: str) -> None:
    """Raise ConfigError if the file of an authority has a list of revoked certificates: OpenSSL would not use it.

    OSError: the file cannot be read; OpenSSL's error would not name it.
    """
    if b"-----BEGIN X509 CRL-----" in Path(authority).read_bytes():
        cure = "remove the list, take the names of its certificates out of allow, and restart the process"
        raise ConfigError(f"{authority} has a list of revoked certificates, which is not used: {cure}")


def _use_chain(context: SSL.Context, chain: bytes) -> None:
    """Let a context show certificates; ConfigError if no temporary file can be written, which OpenSSL reads."""
    try:
        with NamedTemporaryFile() as file:
            file.write(chain)
            file.flush()
            context.use_certificate_chain_file(file.name)
    except OSError as error:
        cure = "free space there, or name another folder in TMPDIR"
        raise ConfigError(f"cannot write a temporary file for TLS: {error.strerror}: {cure}") from error


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return found.get_values_for_type(x509.DNSName)


def _matches(name: str, pattern: DNSPattern) -> bool:
    """Return whether a name of a certificate is the one of ``pattern``, or one of those; a name with * is none."""
    try:
        return DNS_ID(name).verify(pattern)
    except ValueError:  # not a host name; or, in old releases, a name without a dot beside a pattern with *
        return False


def _text(error: Exception) -> str:
    """Return OpenSSL's own words: an error of pyOpenSSL has a list of tuples."""
    reasons = error.args[0] if error.args and isinstance(error.args[0], list) else []
    text = ", ".join(each[-1] for each in reasons) or str(error)
    return f"the key is not that of the certificate ({text})" if text in _OTHER_KEY else text
