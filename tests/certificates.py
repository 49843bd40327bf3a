"""Certificates that tests of TLS make: an authority, and servers and clients whose certificates it signs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import attrs
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from OpenSSL import SSL
from twisted.internet.interfaces import IOpenSSLServerConnectionCreator
from zope.interface import implementer

if TYPE_CHECKING:
    from pathlib import Path

DAY = timedelta(days=1)
# Python 3.13 requires it of an authority, and the authority's key identifier of each certificate.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@attrs.frozen
class Identity:
    """A private key and a certificate, in files."""

    key: Path
    certificate: Path

    @property
    def files(self) -> tuple[str, str]:
        """The certificate and its key, as clients take them."""
        return str(self.certificate), str(self.key)

    def lock(self) -> None:
        """Write the key with a password."""
        key = load_pem_private_key(self.key.read_bytes(), None)
        locked = BestAvailableEncryption(b"secret")
        self.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))

    def show(self) -> str:
        """Return what a ``tls:`` endpoint needs to show this certificate."""
        return f":certificate={self.certificate}:privateKey={self.key}"

    def listen(self, port: int = 0) -> str:
        """Return the endpoint of a server with this certificate."""
        return f"ssl:{port}:interface=127.0.0.1:privateKey={self.key}:certKey={self.certificate}"


@implementer(IOpenSSLServerConnectionCreator)
@attrs.frozen
class Connections:
    """Makes the connections of a server; clients need a certificate of the authority in the file ``client``."""

    identity: Identity
    client: str = ""
    newest: int = SSL.TLS1_3_VERSION

    def serverConnectionForTLS(self, protocol: object) -> SSL.Connection:
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_max_proto_version(self.newest)
        context.use_privatekey_file(str(self.identity.key))
        context.use_certificate_file(str(self.identity.certificate))
        if self.client:
            context.load_verify_locations(self.client)
            context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
        return SSL.Connection(context)


class Authority:
    """An authority whose own certificate is ``folder/NAME.pem``."""

    def __init__(
        self,
        folder: Path,
        name: str = "authority",
        valid: tuple[timedelta, timedelta] = (-DAY, DAY),
        issuer: Authority | None = None,
        permitted: str = "",
    ) -> None:
        """Make the authority; ``issuer`` signs its certificate, by default itself.

        ``permitted``: the only domain that it may sign certificates for, if it has such a constraint.
        """
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        signer = issuer or self
        own = signer._builder(name, self._key, valid).add_extension(x509.BasicConstraints(True, None), True)
        own = own.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), False)
        own = own.add_extension(_SIGNS, True)
        if permitted:
            own = own.add_extension(x509.NameConstraints([x509.DNSName(permitted)], None), True)
        if issuer is not None:
            of = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer._key.public_key())
            own = own.add_extension(of, False)
        self.certificate = signer._write(f"{name}.pem", own)

    def issue(
        self,
        name: str,
        *hosts: str,
        valid: tuple[timedelta, timedelta] = (-DAY, DAY),
        purpose: x509.ObjectIdentifier | None = None,
    ) -> Identity:
        """Return a new key and a certificate for ``hosts``, valid from and until these times from now.

        ``purpose``: its only extended key usage, if it has one.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        names: list[x509.GeneralName] = [
            x509.IPAddress(ip_address(each)) if each[0].isdigit() else x509.DNSName(each) for each in hosts
        ]
        builder = self._builder(name, key, valid).add_extension(x509.SubjectAlternativeName(names), False)
        builder = builder.add_extension(authority, False)
        if purpose is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), False)
        path = self._folder / f"{name}.key"
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return Identity(path, self._write(f"{name}.pem", builder))

    def _builder(self, name: str, key: Any, valid: tuple[timedelta, timedelta]) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + valid[0])
            .not_valid_after(now + valid[1])
        )

    def _write(self, name: str, builder: x509.CertificateBuilder) -> Path:
        path = self._folder / name
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return path
