"""What waits for a peer that does not read fast enough, up to a bound."""

from __future__ import annotations

from collections import deque
from typing import Final

JOINED_BYTES: Final = 65_536  # small chunks are joined up to this: one system call's worth


class Outbox:
    """Chunks of whole lines, first in, first out; at most ``max_bytes`` and ``max_lines`` of them.

    Chunks are kept as they are, so many outboxes may share one object.
    """

    __slots__ = ("_chunks", "_max_bytes", "_max_lines", "queued_bytes", "queued_lines")

    def __init__(self, max_bytes: int, max_lines: int) -> None:
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        # None while nothing waits: an empty deque takes 0.7 KiB, and most outboxes are empty
        self._chunks: deque[tuple[bytes, int]] | None = None
        self.queued_bytes = 0
        self.queued_lines = 0

    def push(self, chunk: bytes, lines: int) -> bool:
        """Queue ``chunk`` of so many lines; return False, and keep nothing of it, if that would pass a bound."""
        queued_bytes, queued_lines = self.queued_bytes + len(chunk), self.queued_lines + lines
        if queued_bytes > self._max_bytes or queued_lines > self._max_lines:
            return False
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append((chunk, lines))
        self.queued_bytes, self.queued_lines = queued_bytes, queued_lines
        return True

    def pop(self) -> bytes | None:
        """Take out what to write next: one chunk, or several small ones joined; None if nothing waits."""
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
        """Forget all that waits."""
        self._chunks = None
        self.queued_bytes = 0
        self.queued_lines = 0
