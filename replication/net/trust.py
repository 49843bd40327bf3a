"""What to do about an authority that is not trusted, or a private key with a password.  It imports no Twisted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

# OpenSSL's errors for a chain that ends without a trusted certificate, or at another one with the same name.
UNKNOWN_AUTHORITY: Final = frozenset({2, 7, 18, 19, 20, 21})
ISSUER_NOT_FOUND: Final = frozenset({2, 20, 21})  # a subset: the issuer of the last certificate is missing
MAX_NAMES: Final = 500  # characters of a peer's names that are shown


def trust_cure() -> str:
    """Return what names the certificates to trust: SSL_CERT_FILE, perhaps with a file that does not exist."""
    file = os.environ.get("SSL_CERT_FILE", "")
    if file and not Path(file).is_file():
        return f"SSL_CERT_FILE names {file}, and there is no such file: name the file with the certificates to trust"
    return "SSL_CERT_FILE names the certificates to trust"


def password_fault(file: str) -> str:
    """Return an error text for a private key with a password, and its cure: OpenSSL would ask the terminal for it."""
    return f"the private key in {file} has a password: write it without one, with openssl pkey -in {file} -out FILE"
