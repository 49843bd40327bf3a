"""Client certificates that are demanded, and files that are read again."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from unittest.mock import patch

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionAborted
from twisted.internet.protocol import Factory
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from replication.errors import ConfigError
from replication.net.access import Access, Grant, Rights
from replication.net.admission import Admission
from replication.net.certificates import ClientRule, TlsEndpoint, expiries
from replication.net.listening import Socket
from tests.certificates import DAY, Authority, Identity
from tests.doubles import begin, logged, now
from tests.net.handshakes import PORT, TlsCase

if TYPE_CHECKING:
    from pathlib import Path


STRANGER = IPv4Address("TCP", "192.0.2.1", 40_000)


class CertificateCase(TlsCase):
    """A master at an ``ssl:`` endpoint."""

    def listen(
        self, clients: ClientRule | None = None, description: str | None = None, access: Access | None = None
    ) -> TlsEndpoint:
        endpoint = TlsEndpoint(self.net, description or self.good.listen(PORT), clients)
        begin(endpoint.listen(self.master.factory(access)))
        self.net.serving[PORT] = self.net.tcpServers[-1][1]
        return endpoint

    def demand(self, *names: str, access: Access | None = None) -> TlsEndpoint:
        """Demand certificates of the authority, for ``names``."""
        return self.listen(ClientRule(str(self.authority.certificate), names), access=access)


class ClientRuleTests(CertificateCase):
    """Each refusal stands in the master's log, once, with its reason."""

    def test_a_certificate_of_the_authority_is_accepted(self) -> None:
        self.demand()
        client, lines = self.follow(shown=self.authority.issue("worker1", "worker1"))
        self.assertTrue(client.greeted)
        self.assertEqual((client.error, lines), (None, []))

    def test_a_client_shows_the_certificates_between_too(self) -> None:
        """It showed its own alone, so only a command such as ``append`` was accepted with the same file."""
        self.demand()
        middle = Authority(self.folder, "middle", issuer=self.authority)
        shown = middle.issue("worker1", "worker1")
        shown.certificate.write_bytes(shown.certificate.read_bytes() + middle.certificate.read_bytes())
        with patch.dict(os.environ, {"SSL_CERT_FILE": str(self.foreign.certificate)}):  # OpenSSL finds none there
            trusted = self.folder / "trusted"
            trusted.mkdir()
            (trusted / "authority.pem").write_bytes(self.authority.certificate.read_bytes())
            client, lines = self.follow(shown=shown, more=f":trustRoots={trusted}:timeout=5:bindAddress=127.0.0.1")
        self.assertTrue(client.greeted, lines)

    def test_a_name_or_a_pattern_is_accepted(self) -> None:
        self.demand("worker1", "*.Example.com")
        for name in ("worker1", "WORKER1", "worker9.example.com"):
            client, lines = self.follow(shown=self.authority.issue("shown", "other", "*", "a..b", name))
            self.assertTrue(client.greeted, name)
            self.assertEqual(lines, [])

    def test_another_name_is_refused(self) -> None:
        self.demand("worker1", "*.example.com")
        shown = self.authority.issue(
            "worker1", "worker2", "example.com", "a.b.example.com", "worker1.evil", "127.0.0.1"
        )
        self.assert_refused(
            "TLS failed",
            "refuses this end's certificate",
            at_master="the certificate is for 'worker2, example.com, a.b.example.com, worker1.evil', "
            "which tls.allow does not have",
            shown=shown,
        )

    def test_a_wildcard_in_a_certificate_is_no_name(self) -> None:
        self.demand("*.example.com")
        self.assert_refused(
            "refuses", at_master="tls.allow does not have", shown=self.authority.issue("wild", "*.example.com")
        )

    def test_a_certificate_without_a_name_is_refused_if_names_are_given(self) -> None:
        """The common name, which is worker1, does not count."""
        self.demand("worker1")
        self.assert_refused(
            "refuses", at_master="without a DNS name", shown=self.authority.issue("worker1", "10.0.0.1")
        )

    def test_no_certificate_is_refused(self) -> None:
        self.demand()
        self.assert_refused("a client certificate is required", at_master="the peer has no client certificate")

    def test_a_certificate_of_another_authority_is_refused(self) -> None:
        self.demand()
        text = f"an authority that is not in {self.authority.certificate} (tls.client_ca)"
        self.assert_refused("does not trust the authority", at_master=text, shown=self.foreign.issue("w", "worker1"))

    def test_an_expired_certificate_is_refused(self) -> None:
        self.demand("worker1")
        old = self.authority.issue("old", "worker1", valid=(-2 * DAY, -DAY))
        self.assert_refused("has expired", at_master="the certificate has expired on 2", shown=old)

    def test_a_certificate_of_a_server_is_refused(self) -> None:
        self.demand()
        shown = self.authority.issue("server", "worker1", purpose=ExtendedKeyUsageOID.SERVER_AUTH)
        self.assert_refused("TLS failed", at_master="the certificate is not one for clients", shown=shown)

    def test_another_reason_of_openssl_is_named(self) -> None:
        bounded = Authority(self.folder, "bounded", permitted="other.example")
        self.listen(ClientRule(str(bounded.certificate)))
        self.assert_refused(
            "TLS failed",
            at_master="the certificate is refused: permitted subtree violation",
            shown=bounded.issue("w", "worker1"),
        )

    def test_without_a_rule_no_certificate_is_needed(self) -> None:
        self.listen()
        self.assertTrue(self.follow()[0].greeted)

    def test_a_refused_client_receives_nothing_and_is_counted(self) -> None:
        self.demand()
        client, _ = self.follow()
        self.assertFalse(client.greeted)
        counted = {each.name: each.value for each in self.master.served.samples()}
        self.assertEqual(counted["tls_failures_total"], self.net.attempts)

    def test_a_connection_that_does_not_negotiate_is_closed_and_was_sent_nothing(self) -> None:
        """Its peer is unknown until then, so nothing is queued for it."""
        self.demand()
        protocol = self.net.serving[PORT].buildProtocol(STRANGER)
        assert protocol is not None
        wire = StringTransport(peerAddress=STRANGER)
        protocol.makeConnection(wire)
        now(self.master.stream("orders").append([[["o1"]]]))
        with logged() as lines:
            self.net.run(29)
            self.assertFalse(wire.disconnecting)
            self.net.run(1)
            self.assertTrue(wire.disconnecting)
            self.assertEqual(wire.value(), b"")
            protocol.connectionLost(Failure(ConnectionAborted()))
        self.assertEqual(lines, ["a peer (192.0.2.1:40000): TLS failed: it was not negotiated in 30 s"])
        counted = {each.name: each.value for each in self.master.served.samples()}
        self.assertEqual((counted["tls_failures_total"], counted["connections_total"]), (1, 0))

    def test_a_connection_beyond_a_bound_is_refused_before_tls(self) -> None:
        self.demand()
        with patch.object(Admission, "enter", lambda _, address: address is not STRANGER):
            self.assertIsNone(self.net.serving[PORT].buildProtocol(STRANGER))
            client, _ = self.follow(shown=self.authority.issue("worker1", "worker1"))
        self.assertTrue(client.greeted)

    def test_a_certificate_has_the_rights_of_its_table_once_tls_is_negotiated(self) -> None:
        rights = Rights(("worker1",), {"nothing"})
        access = Access([Grant(rights, certificates=["worker1"])])
        self.demand(access=access)
        client, lines = self.follow(shown=self.authority.issue("worker1", "worker1"))
        self.assertTrue(client.greeted)
        self.assertEqual([each.rights for each in self.master._subscribers], [rights])
        self.assertEqual(lines, [])
        _, lines = self.follow(shown=self.authority.issue("worker2", "worker2"))
        self.assertEqual(len(lines), 2)
        for each in lines:
            self.assertIn("no [access] table names the certificate", each)

    def test_the_dates_are_those_of_the_own_certificate_and_of_the_authority(self) -> None:
        expires = self.demand().expires
        self.assertEqual([*expires], [str(self.good.certificate), str(self.authority.certificate)])
        self.assertEqual(expires, expiries(str(self.good.certificate)) | expiries(str(self.authority.certificate)))
        self.assertEqual(expiries("/nowhere"), {})
        self.assertEqual(expiries(str(self.good.key)), {})

    def test_what_is_not_a_name_is_refused(self) -> None:
        for name in ("", "10.0.0.1", "*", "*.com", "a.*.example.com", "worker..1"):
            with self.assertRaisesRegex(ConfigError, "^tls.allow: write DNS names such as worker1"):
                ClientRule("ca.pem", [name])


class ReadingTests(CertificateCase):
    """Files are read again for new connections; those that are open stay."""

    def replace(self, new: Identity) -> None:
        """Write another certificate into the files that the endpoint names."""
        for here, there in ((self.good.key, new.key), (self.good.certificate, new.certificate)):
            here.write_bytes(there.read_bytes())

    def test_new_connections_get_the_new_certificate_and_open_ones_stay(self) -> None:
        endpoint = self.listen()
        first, _ = self.follow()
        self.replace(self.authority.issue("renewed", "other.example", valid=(-DAY, 9 * DAY)))
        until = endpoint.read()
        self.assertEqual(round((until - datetime.now(UTC)) / DAY), 9)
        self.assertTrue(first.greeted)
        self.assertEqual(first.connections, 1)
        self.assert_refused("the certificate is for another host", at_master="its log has the reason")

    def test_names_that_a_new_certificate_lacks_are_logged(self) -> None:
        """Clients that connect to such a name refuse it."""
        names = "a.example.com", "B.example.com", "*.example.org", "db1", "10.0.0.1", "127.0.0.1"
        self.replace(self.authority.issue("first", *names))
        socket = Socket("listen", "the wire", self.good.listen(PORT), Factory)
        endpoint = socket.parse(self.net, insecure=False)
        for kept, lost in (
            (names, ()),
            (("*.example.com", "DB1", "127.0.0.1"), ("*.example.org", "10.0.0.1")),
            (("a.example.com", "127.0.0.1"), ("*.example.com", "db1")),
            (("a.example.com", "127.0.0.1"), ()),
        ):
            self.replace(self.authority.issue("renewed", *kept))
            with logged() as lines:
                socket.read_certificates(endpoint)
            what = f"listen: the new certificate lacks {', '.join(lost)}: clients that connect to such a name refuse it"
            self.assertEqual(lines, [what] if lost else [])

    def test_the_authority_of_the_clients_is_read_again(self) -> None:
        endpoint = self.demand()
        worker = self.foreign.issue("worker", "worker1")
        self.assertFalse(self.follow(shown=worker)[0].greeted)
        self.authority.certificate.write_bytes(
            self.foreign.certificate.read_bytes() + self.authority.certificate.read_bytes()
        )
        endpoint.read()
        self.assertTrue(self.follow(shown=worker)[0].greeted)

    def test_a_client_reads_its_certificate_for_each_connection(self) -> None:
        self.demand()
        shown, good = self.foreign.issue("worker", "worker1"), self.authority.issue("renewed", "worker1")
        client, _ = self.follow(shown=shown)
        self.assertFalse(client.greeted)
        shown.key.write_bytes(good.key.read_bytes())
        shown.certificate.write_bytes(good.certificate.read_bytes())
        self.net.run(60)
        self.assertTrue(client.greeted)

    def test_files_that_cannot_be_used_leave_what_was_read_before(self) -> None:
        endpoint = self.listen()
        other = self.authority.issue("other", "127.0.0.1")
        key, certificate = self.good.key.read_bytes(), self.good.certificate.read_bytes()

        def assert_kept(file: Path, content: bytes | None, why: str) -> None:
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with self.assertRaisesRegex(ConfigError, why):
                endpoint.read()
            self.good.key.write_bytes(key)
            self.good.certificate.write_bytes(certificate)

        assert_kept(self.good.key, None, f"cannot read {self.good.key}: No such file")
        assert_kept(self.good.certificate, b"", f"cannot use {self.good.certificate}, {self.good.key} for TLS")
        assert_kept(self.good.key, b"nonsense", f"cannot use {self.good.certificate}, {self.good.key} for TLS")
        assert_kept(
            self.good.key, other.key.read_bytes(), r"the key is not that of the certificate \(key values mismatch"
        )
        locked = self.authority.issue("locked", "127.0.0.1")
        locked.lock()
        cure = f"the private key in {self.good.key} has a password: write it without one, with openssl pkey"
        assert_kept(self.good.key, locked.key.read_bytes(), f"for TLS: {cure}")
        rsa_key = rsa.generate_private_key(65_537, 2_048)  # OpenSSL keeps one key of each algorithm
        other.key.write_bytes(rsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        why = f"cannot use {self.good.certificate}, {self.good.key} for TLS: the key is not that of the certificate"
        assert_kept(self.good.key, other.key.read_bytes(), why)
        self.assertTrue(self.follow()[0].greeted)

    def test_an_authority_that_is_missing_is_named(self) -> None:
        """The error had the names of all files, and ``no such file, BIO lib``."""
        endpoint = self.demand()
        self.authority.certificate.unlink()
        with self.assertRaisesRegex(ConfigError, f"^cannot read {self.authority.certificate}: No such file"):
            endpoint.read()

    def test_a_list_of_revoked_certificates_is_refused(self) -> None:
        """It was ignored, so a client whose certificate is on the list was accepted."""
        endpoint = self.demand()
        with self.authority.certificate.open("ab") as file:
            file.write(b"-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n")
        with self.assertRaisesRegex(ConfigError, "has a list of revoked certificates, which is not used: remove the"):
            endpoint.read()

    def test_a_temporary_folder_that_cannot_be_written_is_named(self) -> None:
        """The error was ``cannot read None``: OpenSSL reads a chain only from a file."""
        full = OSError(errno.ENOSPC, "No space left on device")
        refused = self.assertRaisesRegex(ConfigError, "^cannot write a temporary file for TLS: No space left.* TMPDIR")
        with patch("replication.net.certificates.NamedTemporaryFile", side_effect=full), refused:
            self.listen()

    def test_a_certificate_that_is_not_valid_today_leaves_what_was_read_before(self) -> None:
        """Every client refuses it; at the start it is read, because there is no other."""
        endpoint = self.listen()
        for valid, why in (((-2 * DAY, -DAY), "has expired on"), ((DAY, 2 * DAY), "is not valid before")):
            self.replace(self.authority.issue("new", "127.0.0.1", valid=valid))
            with self.assertRaisesRegex(ConfigError, f"cannot use {self.good.certificate}.* {why}"):
                endpoint.read()
            self.assertTrue(self.follow()[0].greeted)

    def test_certificates_between_are_sent_wherever_they_stand(self) -> None:
        """In ``certKey``, as most authorities deliver them, or in ``extraCertChain``."""
        middle = Authority(self.folder, "middle", issuer=self.authority)
        inner = middle.issue("inner", "127.0.0.1")
        whole = self.folder / "whole.pem"
        whole.write_bytes(inner.certificate.read_bytes() + middle.certificate.read_bytes())
        base = f"ssl:{PORT}:privateKey={inner.key}"
        for description in (
            f"{base}:certKey={whole}",
            f"{base}:certKey={inner.certificate}:extraCertChain={middle.certificate}",
        ):
            self.listen(description=description)
            self.assertTrue(self.follow()[0].greeted, description)

    def test_a_description_is_taken_as_twisted_takes_it(self) -> None:
        both = self.folder / "a:b.pem"
        both.write_bytes(self.good.key.read_bytes() + self.good.certificate.read_bytes())
        path = str(both).replace(":", r"\:")
        self.listen(description=f"ssl:{PORT}:{path}:interface=127.0.0.1:backlog=7")
        port, _, backlog, interface = self.net.tcpServers[-1]
        self.assertEqual((port, backlog, interface), (PORT, 7, "127.0.0.1"))
        self.assertTrue(self.follow()[0].greeted)
