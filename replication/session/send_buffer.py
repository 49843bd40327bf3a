"""Encoded lines that wait because the peer does not read fast enough (docs/protocol/connection.md B4)."""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

JOINED_BYTES: Final = 65_536  # small chunks are joined up to this size, for one system call


@attrs.define(eq=False, repr=False)
class SendBuffer:
    """A queue of chunks of whole lines, at most ``max_bytes`` bytes and ``max_lines`` lines.

    Chunks are kept as they are, so several buffers can share one object.
    """

    _max_bytes: int
    _max_lines: int
    # None while nothing waits: most buffers are empty, and an empty deque is larger than this object
    _chunks: deque[tuple[bytes, int]] | None = attrs.field(init=False, default=None)
    queued_bytes: int = attrs.field(init=False, default=0)
    queued_lines: int = attrs.field(init=False, default=0)

    def push(self, chunk: bytes, lines: int) -> bool:
        """Add ``chunk``, which has ``lines`` lines; return False, and add nothing, if that would exceed a limit."""
        queued_bytes, queued_lines = self.queued_bytes + len(chunk), self.queued_lines + lines
        if queued_bytes > self._max_bytes or queued_lines > self._max_lines:
            return False
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append((chunk, lines))
        self.queued_bytes, self.queued_lines = queued_bytes, queued_lines
        return True

    def pop(self) -> bytes | None:
        """Remove and return what to write next: one chunk, or several small ones joined; None if nothing waits."""
        if self._chunks is None:
            return None
        taken: list[bytes] = []
        size = 0
        while self._chunks and (not taken or size + len(self._chunks[0][0]) <= JOINED_BYTES):
            chunk, lines = self._chunks.popleft()
            taken.append(chunk)
            size += len(chunk)
            self.queued_lines -= lines
        self.queued_bytes -= size
        if not self._chunks:
            self.clear()
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def clear(self) -> None:
        """Remove everything."""
        self._chunks = None
        self.queued_bytes = 0
        self.queued_lines = 0
