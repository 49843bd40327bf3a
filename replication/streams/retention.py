"""What a stream keeps: limits of age, rows and bytes (docs/operations.md, Retention); what segments have.  No I/O."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from replication.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.interfaces import FactSlice
    from replication.wire.grammar import InstanceName, StreamName, Token

KEEP_ALL: Final = "all"
FORMS: Final = "30d, 12h, 1000000 rows or 10 GiB, several with commas, or all"
_LIMIT: Final = re.compile(r"\s*([0-9]{1,15})\s*([A-Za-z]+)\s*")
_SECONDS: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_BYTES: Final[Mapping[str, int]] = {
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


class Retention(msgspec.Struct, frozen=True):
    """Limits of what is kept; a fact beyond any of them may be deleted.

    Attributes:
        age: seconds.
        rows: the number of the newest rows that are kept.
        size: the bytes of the newest rows that are kept, as JSON texts.

    """

    age: int | None = None
    rows: int | None = None
    size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Retention | None:
        """Return the limits in a text such as ``30d, 10 GiB``; None if all facts are kept; ConfigError otherwise."""
        if text.strip() == KEEP_ALL:
            return None
        limits: dict[str, int] = {}
        for part in text.split(","):
            match = _LIMIT.fullmatch(part)
            number, unit = (int(match[1]), match[2]) if match else (0, "")
            kinds = (("age", _SECONDS), ("rows", {"rows": 1}), ("size", _BYTES))
            kind = next((name for name, units in kinds if unit in units), None)
            if kind is None or number == 0 or kind in limits:
                raise ConfigError(f"retention {text!r}: write {FORMS}")
            limits[kind] = number * next(units[unit] for name, units in kinds if name == kind)
        return cls(**limits)


class KeptSlices:
    """The slices of one writer's facts that are kept, ascending, and their sums."""

    def __init__(self) -> None:
        self.slices: deque[FactSlice] = deque()
        self.rows = 0
        self.size = 0

    def add(self, new: FactSlice) -> None:
        """Add the newest slice."""
        self.slices.append(new)
        self.rows += new.rows
        self.size += new.size

    def remove(self) -> FactSlice:
        """Remove and return the oldest slice."""
        oldest = self.slices.popleft()
        self.rows -= oldest.rows
        self.size -= oldest.size
        return oldest

    def oldest_beyond(self, limits: Retention, seconds: float) -> Token | None:
        """Return the end of the oldest slice if it is beyond a limit at a time; None if it is kept."""
        if not self.slices:
            return None
        oldest = self.slices[0]
        beyond = (
            (limits.age is not None and oldest.seconds + limits.age <= seconds)
            or (limits.rows is not None and self.rows - oldest.rows >= limits.rows)
            or (limits.size is not None and self.size - oldest.size >= limits.size)
        )
        return oldest.upto if beyond else None


class SegmentChain(msgspec.Struct, frozen=True):
    """The segments of one stream and writer in the folder ``folder``, which have the facts in ``(after, upto]``.

    ``rows`` are the rows of all segments, and ``stored_size`` their bytes in the folder.
    """

    folder: str
    stream: StreamName
    writer: InstanceName
    after: Token
    upto: Token
    rows: int
    stored_size: int
