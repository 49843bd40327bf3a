"""What ``replication doctor`` finds."""

from __future__ import annotations

import msgspec

from replication.urls import Url


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong: where it is, without the secrets of URLs, what it is, and the cure."""

    where: str
    what: str
    cure: str

    def __post_init__(self) -> None:
        """Hide what may be a secret: the place may be a URL or a path as it is configured."""
        msgspec.structs.force_setattr(self, "where", str(Url(self.where)))

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.where}: {self.what}; cure: {self.cure}"
