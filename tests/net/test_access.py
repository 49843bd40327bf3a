"""Rights: what they allow, and what a refusal names."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
from cryptography import x509
from OpenSSL.crypto import X509
from twisted.internet.interfaces import ISSLTransport
from twisted.internet.testing import StringTransport
from zope.interface import directlyProvides

from replication.errors import ConfigError
from replication.net.access import EVERY_RIGHT, Access, Grant, Right, Rights
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from tests.certificates import Identity

SHOP = Rights(("shop",), {"orders"}, {"orders", "stock"})
BOSS = Rights(("boss",), {"*"}, commands=True, admin=True)


class TlsTransport(StringTransport):
    """A transport whose peer has shown a certificate, or none."""

    def __init__(self, shown: Identity | None) -> None:
        super().__init__()
        directlyProvides(self, ISSLTransport)
        self._shown = shown

    def getPeerCertificate(self) -> X509 | None:
        if self._shown is None:
            return None
        return X509.from_cryptography(x509.load_pem_x509_certificate(self._shown.certificate.read_bytes()))


def test_a_right_is_for_the_streams_that_it_names() -> None:
    assert [SHOP.may_read(each) for each in ("orders", "stock", "*")] == [True, False, False]
    assert [SHOP.may_see(each) for each in ("orders", "stock", "caches")] == [True, True, False]
    assert BOSS.may_read("anything")
    assert Rights(("boss",), admin=True).may_see("anything")
    assert not Rights(("nothing",)).may_see("orders")


def test_a_refusal_names_the_right_that_is_missing_and_the_table_that_can_give_it() -> None:
    assert SHOP.missing("read", ["orders"]) is None
    assert SHOP.missing("append", ["orders", "stock"]) is None
    assert SHOP.missing("read", ["orders", "stock"]) == (
        "the right to read 'stock' is missing: add it to read in [access.shop]"
    )
    assert SHOP.missing("append", ["caches"]) == (
        "the right to append 'caches' is missing: add it to append in [access.shop]"
    )
    assert SHOP.missing("admin") == "the right 'admin' is missing: set admin = true in [access.shop]"
    assert (SHOP | Rights(("other",))).missing("commands") == (
        "the right 'commands' is missing: set commands = true in [access.shop] or [access.other]"
    )


def test_every_right_lacks_none() -> None:
    for right in get_args(Right):
        assert EVERY_RIGHT.missing(right, ["anything"]) is None


def test_two_grants_add_up_and_two_proofs_limit_each_other() -> None:
    both = SHOP | BOSS
    assert both == Rights(("shop", "boss"), {"orders", "*"}, {"orders", "stock"}, commands=True, admin=True)
    assert Rights(("shop", "boss"), {"orders"}) == SHOP & BOSS
    assert SHOP & EVERY_RIGHT == SHOP == EVERY_RIGHT & SHOP


def test_a_certificate_has_the_rights_of_the_tables_that_name_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    access = Access(
        [
            Grant(SHOP, certificates=["worker1", "*.shop.example"]),
            Grant(BOSS, certificates=["boss.shop.example"]),
            Grant(Rights(("prometheus",)), secret="s"),
        ]
    )
    for names, rights in (
        (["worker1"], SHOP),
        (["a.shop.example"], SHOP),
        (["boss.shop.example"], SHOP | BOSS),
        (["worker2", "10.0.0.1"], None),
    ):
        assert access.of_transport(TlsTransport(authority.issue("shown", *names))) == rights
    assert access.of_transport(TlsTransport(None)) is None
    assert access.of_transport(StringTransport()) == EVERY_RIGHT
    assert Access().of_transport(TlsTransport(None)) == EVERY_RIGHT


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^access.shop.certificates: write DNS names such as worker1"):
        Access([Grant(SHOP, certificates=["*"])])


def test_rights_are_replaced_as_a_whole_or_not_at_all() -> None:
    access = Access([Grant(Rights(("one",), {"orders"}), secret="s")])
    with pytest.raises(ConfigError):
        access.replace([Grant(Rights(("two",)), certificates=("*",))], "t")
    assert ([each.name for each in access.grants], access.secret, access.replaced) == (["one"], None, 0)
    access.replace([], "t")
    assert (access.grants, access.secret, access.replaced) == ([], "t", 1)


def test_a_secret_is_not_shown() -> None:
    assert "sesame" not in repr(Grant(SHOP, secret="sesame"))
