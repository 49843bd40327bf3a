"""``replication certs``: files that both ends of real handshakes accept."""

from __future__ import annotations

import os
import ssl
import stat
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from replication.cli.main import main
from tests.certificates import DAY

if TYPE_CHECKING:
    from pathlib import Path


def certs(folder: Path, *arguments: str) -> int:
    return main(["certs", "--folder", str(folder), *arguments])


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def handshake(folder: Path, server: str, client: str, host: str) -> None:
    """Let a server and a client, each with its files, connect in memory; both require a certificate."""
    server_context, client_context = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=folder / "ca.pem"),
    )
    server_context.load_cert_chain(folder / f"{server}.pem", folder / f"{server}.key")
    server_context.load_verify_locations(folder / "ca.pem")
    server_context.verify_mode = ssl.CERT_REQUIRED
    client_context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client_context.wrap_bio(back, there, server_hostname=host),
        server_context.wrap_bio(there, back, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


def test_three_commands_make_an_authority_a_server_and_a_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs(tmp_path, "db1.example.com", "10.0.0.1", "::1", "*.example.org", "bücher.example") == 0
    assert certs(tmp_path, "worker1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("ca.pem, ca.key: the authority, valid until 2")
    assert lines[1].startswith(
        "db1.example.com.pem, db1.example.com.key: db1.example.com, 10.0.0.1, ::1, *.example.org, bücher.example, "
        "valid until 2"
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        *("ca.key", "ca.pem", "db1.example.com.key", "db1.example.com.pem", "worker1.key", "worker1.pem"),
    ]
    for host in ("db1.example.com", "10.0.0.1", "::1"):
        handshake(tmp_path, "db1.example.com", "worker1", host)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(tmp_path, "db1.example.com", "worker1", "db2.example.com")


def test_only_the_owner_may_read_keys(tmp_path: Path) -> None:
    certs(tmp_path, "worker1")
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()}
    assert modes == {"ca.key": 0o600, "worker1.key": 0o600, "ca.pem": 0o644, "worker1.pem": 0o644}


def test_a_further_call_renews_the_certificate_with_the_same_authority(tmp_path: Path) -> None:
    certs(tmp_path, "worker1", "--days=1")
    authority, first = (tmp_path / "ca.pem").read_bytes(), certificate(tmp_path, "worker1")
    certs(tmp_path, "worker1")
    renewed = certificate(tmp_path, "worker1")
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert renewed.not_valid_after_utc - first.not_valid_after_utc > timedelta(days=363)
    key = load_pem_private_key((tmp_path / "worker1.key").read_bytes(), None)
    assert renewed.public_key() == key.public_key()
    handshake(tmp_path, "worker1", "worker1", "worker1")


@pytest.mark.parametrize("days", [99_999, 3_000_000, 10**12])
def test_no_certificate_is_valid_longer_than_the_authority(tmp_path: Path, days: int) -> None:
    """From 2,912,000 days on there was a traceback: the year had five digits."""
    assert certs(tmp_path, "worker1", f"--days={days}") == 0
    assert certificate(tmp_path, "worker1").not_valid_after_utc == certificate(tmp_path, "ca").not_valid_after_utc


def test_a_certificate_may_not_sign_others(tmp_path: Path) -> None:
    certs(tmp_path, "worker1")
    for name, signs in (("ca", True), ("worker1", False)):
        found = certificate(tmp_path, name).extensions.get_extension_for_class(x509.BasicConstraints)
        assert (found.critical, found.value.ca) == (True, signs)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["ca"], "'ca' cannot be the name of a certificate's file"),
        (["CA"], "'CA' cannot be the name of a certificate's file"),  # some file systems have no small letters
        (["a/b"], "'a/b' cannot be the name"),
        ([".."], "'..' cannot be the name"),
        ([], "the following arguments are required: NAME; see"),
        (["db1:9092"], "'db1:9092' has a port, which certificates have not: write db1; see"),
        (["[::1]:9092"], "'[::1]:9092' has a port, which certificates have not: write ::1; see"),
        (["db1", "https://db1.example:9093"], "has a port, which certificates have not: write db1.example; see"),
        (["db1", "a b"], "'a b' is neither a host name nor an address: write db1.example.com or 10.0.0.1"),
        (["db1..example"], "'db1..example' is neither a host name nor an address"),
        (["worker1", "--days=0"], "--days takes a number of at least 1"),
    ],
)
def test_wrong_usage_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        certs(tmp_path, *arguments)
    assert stopped.value.code == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_authority_that_cannot_sign_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs(tmp_path, "worker1")
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.key").write_text("nonsense")
    assert certs(tmp_path, "worker1") == 1
    assert "are not the key and certificate of an authority" in capsys.readouterr().err
    (tmp_path / "ca.key").unlink()
    assert certs(tmp_path, "worker1") == 1
    assert f"{tmp_path}/ca.key is missing: copy it here" in capsys.readouterr().err
    (tmp_path / "ca.key").write_bytes(key)
    late = datetime.now(UTC) + timedelta(days=3_660)
    with patch("replication.cli.certs.datetime") as clock:
        clock.now.return_value = late
        assert certs(tmp_path, "worker1") == 1
    assert "has expired on 2" in capsys.readouterr().err
    assert certs(tmp_path, "a" * 64) == 1  # a label has 63 characters at most
    assert "is neither a DNS name nor an address: " in capsys.readouterr().err


def test_the_key_must_be_that_of_an_authority_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A certificate of another key was written over the one that worked, and the command printed that it is valid."""
    former, new = tmp_path / "former", tmp_path / "new"
    assert (certs(former, "db1"), certs(new, "db1")) == (0, 0)
    before, authorities = (former / "db1.pem").read_bytes(), [(each / "ca.pem").read_bytes() for each in (new, former)]
    (former / "ca.pem").write_bytes(authorities[0])
    assert certs(former, "db1") == 1
    assert "ca.key is not the key of an authority in" in capsys.readouterr().err
    assert (former / "db1.pem").read_bytes() == before
    (former / "ca.pem").write_bytes(b"".join(authorities))
    assert certs(former, "db1") == 0
    certificate(former, "db1").verify_directly_issued_by(x509.load_pem_x509_certificate(authorities[1]))


def test_an_authority_with_a_key_of_ed25519_signs(tmp_path: Path) -> None:
    """There was a traceback: such a key takes no other hash."""
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, datetime.now(UTC), datetime.now(UTC) + DAY)
    own = builder.add_extension(x509.BasicConstraints(True, None), True).sign(key, None)
    (tmp_path / "ca.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "ca.pem").write_bytes(own.public_bytes(Encoding.PEM))
    assert certs(tmp_path, "worker1") == 0
    certificate(tmp_path, "worker1").verify_directly_issued_by(own)


def test_what_is_no_authority_signs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command printed that a certificate is valid, and no peer accepted it.  A pipe was waited for."""
    certs(tmp_path, "db1")
    leaf = tmp_path / "leaf"
    leaf.mkdir()
    for suffix in ("key", "pem"):
        (leaf / f"ca.{suffix}").write_bytes((tmp_path / f"db1.{suffix}").read_bytes())
    assert certs(leaf, "worker1") == 1
    assert f"the certificate in {leaf}/ca.pem may not sign others: copy ca.key" in capsys.readouterr().err
    (leaf / "ca.key").unlink()
    os.mkfifo(leaf / "ca.key")
    assert certs(leaf, "worker1") == 1
    assert "it is a pipe or a device" in capsys.readouterr().err
    assert sorted(each.name for each in leaf.iterdir()) == ["ca.key", "ca.pem"]


def test_without_the_library_the_extra_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict(sys.modules, {"cryptography": None}):
        assert certs(tmp_path, "worker1") == 1
    assert "TLS needs" in capsys.readouterr().err
