"""A certificate that is not trusted: the cure names the file in SSL_CERT_FILE that does not exist.

The tests of a private key with a password are in ``test_tls.py`` and ``tests/cli/test_tls_checks.py``.
"""

from __future__ import annotations

import ssl
from contextlib import closing
from typing import TYPE_CHECKING

from replication.cli.tls_checks import describe_tls_failure
from replication.net.trust import trust_cure
from replication.web.blocking_client import HttpClient

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MISSING = "SSL_CERT_FILE names /no/such.pem, and there is no such file: name the file with the certificates to trust"
EXISTS = "SSL_CERT_FILE names the certificates to trust"


def test_a_file_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").touch()
    for file, cure in (("/no/such.pem", MISSING), (str(tmp_path / "ca.pem"), EXISTS), ("", EXISTS)):
        monkeypatch.setenv("SSL_CERT_FILE", file)
        assert trust_cure() == cure
    monkeypatch.delenv("SSL_CERT_FILE")
    assert trust_cure() == EXISTS


def test_it_is_named_by_commands_and_by_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such.pem")
    refused = ssl.SSLCertVerificationError(1, "certificate verify failed")
    refused.verify_message = "self-signed certificate in certificate chain"
    refused.verify_code = 20  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY
    with closing(HttpClient("http://h")) as client:
        assert str(client.failure(refused)) == f"http://h: {refused.verify_message}; {MISSING}"
    assert describe_tls_failure("tls:h:1", ("h", 1), refused, None).cure.startswith(f"{MISSING}; ")
