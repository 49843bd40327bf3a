"""``replication certs``: a private authority, and certificates for servers and clients that it signs.

The files are for ``ssl:`` and ``tls:`` endpoints and ``[tls]`` (docs/how-to/use-tls.md).
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from replication.cli.output import write_line
from replication.cli.parser import Parser
from replication.errors import TLS_CURE, ConfigError
from replication.net.files import refuse_pipes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName

AUTHORITY: Final = "ca"
AUTHORITY_DAYS: Final = 3650
CLOCKS: Final = timedelta(hours=1)  # how far the clock of another host may be behind this one's


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication certs",
        description="Make a certificate for a server or client, NAME.pem and NAME.key, signed by a private authority. "
        "The first call makes the authority, ca.pem and ca.key. A further call for a NAME renews its certificate.",
        epilog="example: replication certs db1.example.com 10.0.0.1",
    )
    parser.add_argument("name", metavar="NAME", help="host name or address of a server, or name of a client")
    parser.add_argument(
        "others", metavar="OTHER", nargs="*", default=[], help="further names and addresses of the same process"
    )
    parser.add_argument("--folder", metavar="DIR", type=Path, default=Path(), help="where the files are [.]")
    parser.add_argument("--days", metavar="N", type=int, default=365, help="validity of the certificate [%(default)s]")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Make the authority, if it is missing, and one certificate."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if found.name.lower() == AUTHORITY or not found.name.replace("*", "").strip(".") or os.sep in found.name:
        parser.error(f"{found.name!r} cannot be the name of a certificate's file")
    if found.days < 1:
        parser.error("--days takes a number of at least 1")
    for each in (found.name, *found.others):
        _check_name(parser, each)
    try:
        authority = _open_authority(found.folder)
    except ImportError as error:
        raise ConfigError(TLS_CURE) from error
    names = [found.name, *found.others]
    until = authority.issue(found.folder, names, timedelta(days=min(found.days, timedelta.max.days)))
    write_line(f"{found.name}.pem, {found.name}.key: {', '.join(names)}, valid until {until:%Y-%m-%d}")
    return 0


def _check_name(parser: Parser, name: str) -> None:
    """End unless ``name`` is an address, or may be a DNS name: no client would find a certificate for another one."""
    host, colon, port = name.removeprefix("https://").removeprefix("http://").rpartition(":")
    try:
        ip_address(name)
    except ValueError:
        if colon and port.isdecimal() and host:
            parser.error(f"{name!r} has a port, which certificates have not: write {host.strip('[]')}")
        if not re.fullmatch(r"[\w*-]+(\.[\w*-]+)*\.?", name):
            parser.error(f"{name!r} is neither a host name nor an address: write db1.example.com or 10.0.0.1")


class _Authority:
    """A key, and the certificate that is trusted."""

    def __init__(self, key: EllipticCurvePrivateKey, certificate: Certificate) -> None:
        self._key, self._certificate = key, certificate

    def issue(self, folder: Path, names: Sequence[str], validity: timedelta) -> datetime:
        """Write a new key and a certificate for ``names``, named as the first one; return when it expires."""
        from cryptography import x509  # noqa: PLC0415 (an extra)
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415

        now = datetime.now(UTC)
        until = now + min(validity, self._certificate.not_valid_after_utc - now)
        key = ec.generate_private_key(ec.SECP256R1())
        of = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(names[0], key, self._certificate.subject, until)
            .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(of, critical=False)
        )
        _write(folder, names[0], key, builder, self._key)
        return until


def _open_authority(folder: Path) -> _Authority:
    """Return the authority of a folder, made if there is none; ConfigError if it is not whole or has expired."""
    from cryptography import x509  # noqa: PLC0415 (an extra)
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    key_file, file = folder / f"{AUTHORITY}.key", folder / f"{AUTHORITY}.pem"
    if not key_file.exists() and not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        own = ec.generate_private_key(ec.SECP256R1())
        until = datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "replication authority")])
        builder = (
            _builder("replication authority", own, name, until)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_signing_only(), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        )
        _write(folder, AUTHORITY, own, builder, own)
        write_line(
            f"{file.name}, {key_file.name}: the authority, valid until {until:%Y-%m-%d}; keep {key_file.name} secret"
        )
    refuse_pipes(str(key_file), str(file))
    try:
        key: Any = load_pem_private_key(key_file.read_bytes(), None)
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except FileNotFoundError as error:
        missing = f"{error.filename} is missing: copy it here"
        raise ConfigError(f"{missing}, or delete the other file of the authority to make a new one") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key_file} and {file} are not the key and certificate of an authority: {error}") from error
    certificate = next((each for each in certificates if each.public_key() == key.public_key()), None)
    if certificate is None:
        raise ConfigError(f"{key_file} is not the key of an authority in {file}: copy both from the same folder")
    if not _may_sign(certificate):
        raise ConfigError(
            f"the certificate in {file} may not sign others: copy ca.key and ca.pem of the authority here"
        )
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise ConfigError(
            f"{file} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}: move it and {key_file} away"
        )
    return _Authority(key, certificate)


def _may_sign(certificate: Certificate) -> bool:
    """Return whether a certificate may sign others; no peer accepts what another certificate has signed."""
    from cryptography import x509  # noqa: PLC0415 (an extra)

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _builder(name: str, key: EllipticCurvePrivateKey, issuer: Any, until: datetime) -> CertificateBuilder:
    from cryptography import x509  # noqa: PLC0415 (an extra)

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])  # a common name has no more
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - CLOCKS)
        .not_valid_after(until)
    )


def _general_name(name: str) -> GeneralName:
    from cryptography import x509  # noqa: PLC0415 (an extra)

    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name.encode("idna").decode("ascii"))
    except UnicodeError as error:
        raise ConfigError(f"{name!r} is neither a DNS name nor an address: {error}") from error


def _signing_only() -> Any:
    from cryptography import x509  # noqa: PLC0415 (an extra)

    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys([*others, "encipher_only", "decipher_only"], False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused)


def _write(
    folder: Path, name: str, key: EllipticCurvePrivateKey, builder: CertificateBuilder, signer: EllipticCurvePrivateKey
) -> None:
    """Write both files, each in one step: a process that reads them meanwhile finds a whole one."""
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 (an extra)
    from cryptography.hazmat.primitives.asymmetric import ed448, ed25519  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat  # noqa: PLC0415

    own_hash = isinstance(signer, (ed25519.Ed25519PrivateKey, ed448.Ed448PrivateKey))  # it takes no other
    texts = {
        "key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "pem": builder.sign(signer, None if own_hash else hashes.SHA256()).public_bytes(Encoding.PEM),
    }
    for suffix, text in texts.items():
        path = folder / f"{name}.{suffix}"
        partial = folder / f".{name}.{suffix}.new"
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
        if suffix == "pem":
            partial.chmod(0o644)
        partial.replace(path)
