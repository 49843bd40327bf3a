"""Bytes to lines: what is held between two reads, and never more than one line of it."""

from __future__ import annotations


class LineBuffer:
    """Holds the beginning of a line until the rest of it comes; at most ``limit`` bytes, LF not counted.

    The cost is linear in the bytes fed, whatever the length of a line and however it is cut.
    """

    __slots__ = ("_rest", "limit", "overflowed")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.overflowed = False
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that ``data`` completes, each with its LF, as one piece.

        A line over the limit ends it all as soon as ``limit`` + 1 bytes of it are there: the lines before it are
        returned, ``overflowed`` is set, and whatever follows is dropped.
        """
        if self.overflowed:
            return b""
        end = data.rfind(b"\n") + 1
        lines = data[:end]
        if end and self._rest:
            lines = b"".join((self._rest, lines))
            self._rest.clear()
        fits = self._measure(lines)
        if fits == len(lines) and len(self._rest) + len(data) - end <= self.limit:
            self._rest += data[end:]
        else:
            self.overflowed = True
            self._rest.clear()
        return lines[:fits]

    def _measure(self, lines: bytes) -> int:
        """Return where the first line over the limit begins; the end if there is none.

        Hops from the last LF within reach to the next such: some hops a read, not one a line.
        """
        start = 0
        while start < len(lines):
            end = lines.rfind(b"\n", start, start + self.limit + 1) + 1
            if not end:
                break
            start = end
        return start
