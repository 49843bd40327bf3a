"""What ``replication doctor`` finds."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong: where it is, what it is, and the cure."""

    where: str
    what: str
    cure: str

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.where}: {self.what}; cure: {self.cure}"
