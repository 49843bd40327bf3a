"""Rights: what a peer may do, by its secret or by its certificate (docs/security.md, Rights)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from twisted.internet.interfaces import ISSLTransport

from replication.errors import TLS_CURE, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replication.net.certificates import NamePatterns

Right = Literal["see", "read", "append", "commands", "admin"]
ALL: Final = "*"  # stands for every stream


def _names(streams: Iterable[str]) -> frozenset[str]:
    return frozenset(streams)


@attrs.frozen
class Rights:
    """What a peer may do.

    Args:
        grants: the names of the tables ``[access.NAME]`` that give these rights.
        read: the streams whose facts it may receive and fetch; ``*`` stands for all.
        append: the streams that it may append to; ``*`` stands for all.
        commands: whether it may send commands that change something here, and the requests of a Synapse worker.
        admin: whether it may skip and retry facts, read which users sync, and list and forget known followers.

    """

    grants: tuple[str, ...] = ()
    read: frozenset[str] = attrs.field(default=(), converter=_names)
    append: frozenset[str] = attrs.field(default=(), converter=_names)
    commands: bool = False
    admin: bool = False

    def __or__(self, other: Rights) -> Rights:
        """Return what either gives."""
        return Rights(
            self.grants + other.grants,
            self.read | other.read,
            self.append | other.append,
            self.commands or other.commands,
            self.admin or other.admin,
        )

    def __and__(self, other: Rights) -> Rights:
        """Return what both give."""
        if other is EVERY_RIGHT:  # the usual case, for each request
            return self
        return Rights(
            tuple(dict.fromkeys(self.grants + other.grants)),
            _both(self.read, other.read),
            _both(self.append, other.append),
            self.commands and other.commands,
            self.admin and other.admin,
        )

    def may_read(self, stream: str) -> bool:
        """Return whether facts of ``stream`` may be sent to the peer."""
        return ALL in self.read or stream in self.read

    @property
    def may_change(self) -> bool:
        """Whether the peer may change anything."""
        return bool(self.append) or self.commands or self.admin

    def may_see(self, stream: str) -> bool:
        """Return whether the peer may know that ``stream`` is there, and its positions."""
        return self.admin or self.may_read(stream) or ALL in self.append or stream in self.append

    def missing(self, right: Right, streams: Iterable[str] = ()) -> str | None:
        """Return why a request that needs ``right``, to all of ``streams``, is refused, and the cure; or None."""
        where = " or ".join(f"[access.{each}]" for each in self.grants) or "an [access] table"
        if right in {"commands", "admin"}:
            given = self.commands if right == "commands" else self.admin
            return None if given else f"the right {right!r} is missing: set {right} = true in {where}"
        for each in streams:
            given = self.may_see(each) if right == "see" else ALL in self._of(right) or each in self._of(right)
            if not given:
                key = "append" if right == "append" else "read"
                return f"the right to {key} {each[:100]!r} is missing: add it to {key} in {where}"
        return None

    def _of(self, right: Right) -> frozenset[str]:
        return self.append if right == "append" else self.read


EVERY_RIGHT: Final = Rights((), {ALL}, {ALL}, commands=True, admin=True)


@attrs.frozen
class Grant:
    """A table ``[access.NAME]``: rights, and what a peer must show to have them.

    ``certificates`` are DNS names or patterns, as in ``tls.allow``.  ``secret`` is sent with a request of HTTP.
    """

    rights: Rights
    secret: str | None = attrs.field(default=None, repr=False)
    certificates: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The table's name."""
        return self.rights.grants[0]


class Access:
    """The rights that a process gives to its peers; without grants each has every right.

    ``secret`` is the one with every right, once ``replace`` was called; ``replaced`` counts those calls.
    ConfigError: a name of a certificate is neither a DNS name nor a pattern.
    """

    def __init__(self, grants: Sequence[Grant] = ()) -> None:
        self.grants = grants
        self.secret: str | None = None
        self.replaced = 0
        self._named = self._patterns(grants)

    def replace(self, grants: Sequence[Grant], secret: str | None) -> None:
        """Give these rights from now on, to new connections and to requests; ConfigError as above changes nothing."""
        self._named = self._patterns(grants)
        self.grants, self.secret = grants, secret
        self.replaced += 1

    def _patterns(self, grants: Sequence[Grant]) -> list[tuple[NamePatterns, Rights]]:
        found: list[tuple[NamePatterns, Rights]] = []
        for each in grants:
            if each.certificates:
                try:
                    from replication.net.certificates import NamePatterns  # noqa: PLC0415 (an extra)
                except ImportError as error:
                    raise ConfigError(f"access.{each.name}.certificates: {TLS_CURE}") from error
                patterns = NamePatterns(each.certificates, f"access.{each.name}.certificates")
                found.append((patterns, each.rights))
        return found

    def of_transport(self, transport: Any) -> Rights | None:
        """Return the rights of the peer of a connection, by its certificate; None if no grant names it.

        They are every right without TLS, or if no grant names certificates.
        """
        if not self._named or not ISSLTransport.providedBy(transport):
            return EVERY_RIGHT
        shown: Any = transport.getPeerCertificate()  # Twisted's annotation is object
        if shown is None:
            return None
        certificate = shown.to_cryptography()
        found = [rights for patterns, rights in self._named if patterns.match(certificate)]
        return reduce(Rights.__or__, found) if found else None


OPEN: Final = Access()
UNNAMED: Final = "no [access] table names the certificate: add one of its names to certificates in one"


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    if ALL in one:
        return other
    return one if ALL in other else one & other
