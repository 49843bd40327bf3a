"""Bytes to lines: keeps at most one incomplete line between two reads (docs/protocol/wire.md A1)."""

from __future__ import annotations


class LineBuffer:
    """Keeps the beginning of a line until its end is read; at most ``limit`` bytes, without the LF.

    The time is proportional to the bytes fed, for lines of any length and reads of any size.
    """

    __slots__ = ("_rest", "limit", "overflowed")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.overflowed = False
        self._rest: bytes | bytearray = b""  # most connections have no rest, and an empty bytearray takes 56 bytes

    def feed(self, data: bytes) -> bytes:
        """Return the lines that ``data`` completes, each with its LF, in one piece.

        As soon as a line has more than ``limit`` bytes, ``overflowed`` is set.  The lines before it are returned, and
        everything after them is dropped.
        """
        if self.overflowed:
            return b""
        end = data.rfind(b"\n") + 1
        lines = data[:end]
        if end and self._rest:
            lines = b"".join((self._rest, lines))
            self._rest = b""
        fits = self._measure(lines)
        if fits == len(lines) and len(self._rest) + len(data) - end <= self.limit:
            if end < len(data):
                self._rest = self._rest or bytearray()
                self._rest += data[end:]
        else:
            self.overflowed = True
            self._rest = b""
        return lines[:fits]

    def _measure(self, lines: bytes) -> int:
        """Return the offset of the first line over the limit, or the length of ``lines`` if there is none.

        Each step goes to the last LF within ``limit`` + 1 bytes, so a read takes a few steps, not one for each line.
        """
        start = 0
        while start < len(lines):
            end = lines.rfind(b"\n", start, start + self.limit + 1) + 1
            if not end:
                break
            start = end
        return start
