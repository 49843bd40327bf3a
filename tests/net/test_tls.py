"""Why TLS fails: real certificates and real handshakes of OpenSSL, over a network in memory."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import SSL
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.testing import StringTransport
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure

from replication.errors import ConfigError
from replication.follower.worker import Worker
from replication.net.certificates import TlsEndpoint
from replication.net.reconnecting import FreshEndpoint
from replication.net.tls import check_files_of, client_tls, describe_tls_error, why_refused
from tests.certificates import DAY, Authority, Connections
from tests.doubles import begin, now
from tests.net.handshakes import PORT, TlsCase


class Ended(Protocol):
    """Keeps why its connection has ended."""

    reason: Failure

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.reason = reason


class TlsTests(TlsCase):
    def test_with_a_good_certificate_server_is_received_and_nothing_is_logged(self) -> None:
        self.serve(self.good)
        client, lines = self.follow()
        self.assertTrue(client.greeted)  # what the client sends waits for the real reactor
        self.assertEqual((client.error, lines), (None, []))

    def test_another_host_is_refused(self) -> None:
        """The master's log had nothing: Twisted closes without an alert."""
        self.serve(self.authority.issue("other", "other.example"))
        self.assert_refused(
            "the certificate is for another host: connect to a name that it has: other.example",
            at_master="its log has the reason",
        )

    def test_a_certificate_without_names_is_refused(self) -> None:
        """Twisted 26.10 accepted it for every host, and logged a traceback for each attempt."""
        self.serve(self.authority.issue("127.0.0.1"))
        self.assert_refused("the certificate needs the host in its subjectAltName", at_master="its log has the reason")

    def test_a_certificate_with_a_wrong_name_is_refused(self) -> None:
        self.serve(self.authority.issue("127.0.0.1", "*"))
        self.assert_refused("the certificate needs the host in its subjectAltName", at_master="its log has the reason")

    def test_https_and_redis_refuse_a_certificate_whose_names_cannot_be_read(self) -> None:
        for names, refused in ((("127.0.0.1",), ConnectionLost), ((), SSL.Error), (("*",), SSL.Error)):
            transport = StringTransport()
            factory = TLSMemoryBIOFactory(client_tls("127.0.0.1", None), True, Factory.forProtocol(Ended))
            connection: Any = factory.buildProtocol(None)
            client = connection.wrappedProtocol
            connection.makeConnection(transport)
            server = Connections(self.authority.issue("any", *names)).serverConnectionForTLS(None)
            server.set_accept_state()
            server.bio_write(transport.value())
            with contextlib.suppress(SSL.Error):
                server.do_handshake()
            connection.dataReceived(server.bio_read(65_536))
            connection.connectionLost(Failure(ConnectionDone()))
            self.assertEqual(client.reason.type, refused, names)

    def test_an_unknown_authority_is_refused(self) -> None:
        self.serve(self.foreign.issue("unknown", "127.0.0.1"))
        self.assert_refused("an authority that is not trusted", "SSL_CERT_FILE", at_master="unknown ca")

    def test_a_file_of_authorities_that_does_not_exist_is_named(self) -> None:
        self.serve(self.good)
        with patch.dict(os.environ, {"SSL_CERT_FILE": "/no/such.pem"}):
            self.assert_refused("SSL_CERT_FILE names /no/such.pem, and there is no such file", at_master="unknown ca")

    def test_an_expired_certificate_is_refused(self) -> None:
        self.serve(self.authority.issue("old", "127.0.0.1", valid=(-2 * DAY, -DAY)))
        self.assert_refused("the certificate has expired on 2", at_master="expired")

    def test_a_certificate_that_is_not_valid_yet_is_refused(self) -> None:
        self.serve(self.authority.issue("new", "127.0.0.1", valid=(DAY, 2 * DAY)))
        self.assert_refused("the certificate is not valid before 2", at_master="refuses this end's certificate")

    def test_an_expired_authority_is_refused(self) -> None:
        old = Authority(self.folder, "authority", valid=(-2 * DAY, -timedelta(hours=1)))
        self.serve(old.issue("of-expired", "127.0.0.1"))
        self.assert_refused("TLS failed: the certificate", at_master="expired")

    def test_an_authority_between_that_has_expired_or_is_not_sent_is_named(self) -> None:
        """The log called the server's own certificate expired, or named SSL_CERT_FILE alone."""
        for valid, reason, at_master in (
            ((-2 * DAY, -DAY), r"has expired on 2\S+: it is that of the authority 'CN=between'", "expired"),
            ((-DAY, DAY), r"SSL_CERT_FILE .*; its issuer is 'CN=between': .* must send", "unknown ca"),
        ):
            between = Authority(self.folder, "between", valid, issuer=self.authority)
            shown = between.issue("inner", "127.0.0.1")
            endpoint = shown.listen(PORT) + (f":extraCertChain={between.certificate}" if at_master == "expired" else "")
            begin(TlsEndpoint(self.net, endpoint, None).listen(self.master.factory()))
            self.net.serving[PORT] = self.net.tcpServers[-1][1]
            client, lines = self.follow()
            self.assertRegex(str(client.error), reason)
            self.assertIn(at_master, "".join(lines))

    def test_another_reason_of_openssl_is_named(self) -> None:
        """It was called an authority that is not trusted, whatever it was."""
        self.serve(self.authority.issue("client", "127.0.0.1", purpose=ExtendedKeyUsageOID.CLIENT_AUTH))
        at_master = "its log has the reason"  # older versions of OpenSSL word the alert itself in another way
        self.assert_refused("TLS failed: the certificate is refused: uns", "certificate purpose", at_master=at_master)
        certificate = x509.load_pem_x509_certificate(self.good.certificate.read_bytes())
        too_long = "an authority of the certificate is refused: path length constraint exceeded"
        self.assertEqual(why_refused(certificate, 25, 1, "unknown"), too_long)
        signed_by_one_of_the_same_name = 7
        self.assertEqual(why_refused(certificate, signed_by_one_of_the_same_name, 0, "unknown"), "unknown")

    def test_without_the_client_certificate_that_is_required_it_is_refused(self) -> None:
        """With TLS 1.3 the client learns it after its own handshake."""
        self.serve(self.good, client=str(self.authority.certificate))
        self.assert_refused("a client certificate is required", at_master="no client certificate")

    def test_with_tls_1_2_it_is_refused_in_the_handshake(self) -> None:
        self.serve(self.good, client=str(self.authority.certificate), newest=SSL.TLS1_2_VERSION)
        self.assert_refused("it may require a client certificate", at_master="no client certificate")

    def test_a_peer_without_a_version_of_tls_in_common_has_the_cure(self) -> None:
        """Both ends had only the words of OpenSSL, such as `tlsv1 alert protocol version`."""
        self.serve(self.good, newest=SSL.TLS1_1_VERSION)
        self.assert_refused("no version of TLS in common", "update the end that lacks TLS 1.2", at_master="TLS failed")
        of_an_old_client = SSL.Error([("SSL routines", "", "unsupported protocol")])
        self.assertIn("no version of TLS in common", str(describe_tls_error(of_an_old_client, None, server=True)))

    def test_plain_tcp_to_a_port_with_tls_names_tls(self) -> None:
        self.serve(self.good)
        self.assert_refused("before SERVER", "write tls:", kind="tcp", at_master="this port uses TLS, but the peer")

    def test_tls_to_a_plain_port_names_it(self) -> None:
        self.serve_plain()
        self.assert_refused("the port does not answer with TLS", at_master="connects with TLS, this port has none")

    def test_a_private_key_with_a_password_is_refused_and_openssl_asks_no_terminal(self) -> None:
        mine = self.authority.issue("mine", "worker1")
        mine.lock()
        endpoint = f"tls:127.0.0.1:1{mine.show()}"
        with patch("OpenSSL.crypto.load_privatekey", side_effect=AssertionError("it would ask")):
            for function, *given in (
                (client_tls, "127.0.0.1", mine.files),
                (check_files_of, endpoint),
                (now, FreshEndpoint(self.net, endpoint).connect(Factory())),
            ):
                with self.assertRaisesRegex(ValueError, "has a password: write it without one, with openssl pkey"):
                    function(*given)
            with self.assertRaisesRegex(ConfigError, "has a password"):
                self.follow(shown=mine)

    def test_the_error_of_a_client_key_shows_the_endpoint_as_it_was_written(self) -> None:
        """It showed one with certificate= and privateKey=, which stand in [tls]."""
        mine, other = self.authority.issue("mine", "worker1"), self.authority.issue("other", "worker2")
        locked = self.authority.issue("locked", "worker1")
        locked.lock()
        (empty := self.folder / "empty.pem").touch()
        for files, why in (
            (locked.files, f"it cannot be used: the private key in {locked.key} has a password: write it"),
            (
                (str(mine.certificate), str(other.key)),
                f"it cannot be used: the key in {other.key} is not that of the certificate in {mine.certificate}",
            ),
            ((str(mine.certificate), "/no/such.key"), "cannot read /no/such.key: No such file"),
            ((str(empty), str(mine.key)), f"it cannot be used: {empty} is not in PEM, or not whole"),
            (("/no/such.pem", str(mine.key)), "cannot read /no/such.pem: No such file"),
        ):
            with self.assertRaises(ConfigError) as caught:
                Worker(connect=["tls:db1:9092"], certificate=files, database="sqlite://", reactor=self.net)
            self.assertTrue(
                str(caught.exception).startswith(f"cannot connect to 'tls:db1:9092': {why}"), caught.exception
            )
        worker = Worker(connect=["tls:db1:9092"], certificate=mine.files, database="sqlite://", reactor=self.net)
        self.assertEqual([*worker.connections], ["tls:db1:9092"])

    def test_files_that_are_damaged_while_a_client_runs_are_named(self) -> None:
        """The log had `[('DECODER routines', '', 'unsupported')]`."""
        mine, other = self.authority.issue("mine", "worker1"), self.authority.issue("other", "worker2")
        (half := self.folder / "half.key").write_bytes(mine.key.read_bytes()[:60])
        for key, why in ((half, f"{half} is not in PEM"), (other.key, f"the key in {other.key} is not that of")):
            with self.assertRaisesRegex(ValueError, why):
                client_tls("127.0.0.1", (str(mine.certificate), str(key)))
            endpoint = f"tls:127.0.0.1:1:certificate={mine.certificate}:privateKey={key}"
            with self.assertRaisesRegex(ValueError, why):
                now(FreshEndpoint(self.net, endpoint).connect(Factory()))

    def test_an_error_of_another_kind_is_none_of_tls(self) -> None:
        for error in (None, ValueError("x")):
            self.assertIsNone(describe_tls_error(error, None))
