"""When a receipt is old enough to be deleted, although the wall clock may jump (docs/http.md, Idempotency keys)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

RECEIPT_LIFE: Final = 86_400.0  # seconds; see IStreamStore.find_receipt
LIFE_WHILE_UNSURE: Final = 30 * 86_400.0  # seconds; while no steady day proves the wall clock
STEP: Final = 10.0  # seconds; a smaller change of the wall clock is no jump
_OF: Final = "\x1f"  # between the stream, the run and the client's key, which is printable
DELETED_AT_ONCE: Final = 1_000  # rows; the most old receipts that one commit deletes


def receipt_key(stream: str, key: str, run: str = "") -> str:
    """Return what the receipt of an append to ``stream`` is stored under: the ``key`` of its client holds there only.

    Who may append to one stream could otherwise take the keys of another one, whose appends would be lost.  With
    ``run`` the key holds only in that run of the process: of a stream in memory, no fact is left after it.
    """
    return _OF.join([stream, run, key] if run else [stream, key])


def former_key(stored: str) -> str:
    """Return what version 0.1.0 stored the receipt under: the key alone."""
    return stored.partition(_OF)[2] or stored


class ReceiptClock:
    """Reads the wall clock, and detects its jumps by a monotonic clock.  Both return seconds.

    A receipt has the wall time of its commit.  That proves its age only if the wall clock was steady since: for
    RECEIPT_LIFE, while this process ran.  At the start, and after a jump, receipts live for LIFE_WHILE_UNSURE, counted
    by the slowest clock since then.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._steady_since = monotonic()
        self._offset = self._least = wall() - self._steady_since  # of the wall clock; the least since it was steady

    def read(self) -> tuple[float, float]:
        """Return the wall time, and the wall time up to which receipts are too old."""
        wall, monotonic = self._wall(), self._monotonic()
        offset = wall - monotonic
        if abs(offset - self._offset) > STEP:
            self._offset, self._steady_since = offset, monotonic
            self._least = min(self._least, offset)
        if monotonic - self._steady_since >= RECEIPT_LIFE:
            self._least = self._offset
            return wall, wall - RECEIPT_LIFE
        return wall, min(wall, monotonic + self._least) - LIFE_WHILE_UNSURE
