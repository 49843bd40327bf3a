"""How old a receipt must be to be deleted, by clocks that jump."""

from __future__ import annotations

from replication.storage.receipts import LIFE_WHILE_UNSURE, RECEIPT_LIFE, STEP, ReceiptClock

DAY = 86_400.0
YEAR = 365 * DAY


class Clocks:
    """The two clocks of a process."""

    def __init__(self, wall: float = 50 * YEAR) -> None:
        self.wall = wall
        self.monotonic = 1_000.0
        self.clock = ReceiptClock(lambda: self.wall, lambda: self.monotonic)

    def sleep(self, seconds: float) -> None:
        """Let both clocks go on."""
        self.wall += seconds
        self.monotonic += seconds

    @property
    def life(self) -> float:
        """The age, by the wall clock, from which receipts are too old."""
        now, expired = self.clock.read()
        assert now == self.wall
        return now - expired


def test_receipts_live_for_a_day_once_the_wall_clock_was_steady_for_a_day() -> None:
    clocks = Clocks()
    clocks.sleep(RECEIPT_LIFE - 1)
    assert clocks.life == LIFE_WHILE_UNSURE
    clocks.sleep(1)
    assert clocks.life == RECEIPT_LIFE
    clocks.sleep(9 * DAY)
    assert clocks.life == RECEIPT_LIFE


def test_a_jump_begins_the_day_again() -> None:
    for jump in (2 * DAY, -2 * DAY):
        clocks = Clocks()
        clocks.sleep(DAY)
        assert clocks.life == RECEIPT_LIFE
        clocks.wall += jump
        assert clocks.life == LIFE_WHILE_UNSURE + max(0, jump)
        clocks.sleep(DAY - 1)
        assert clocks.life > RECEIPT_LIFE
        clocks.sleep(1)
        assert clocks.life == RECEIPT_LIFE


def test_no_jump_makes_a_receipt_of_this_process_old() -> None:
    """A machine without a clock of its own starts in 1970, until it has asked a server of time."""
    clocks = Clocks(wall=0.0)
    written_at, _ = clocks.clock.read()
    for jump in (50 * YEAR, 2 * DAY, -1 * YEAR, 3 * YEAR):
        clocks.wall += jump
        clocks.sleep(3_600)
        assert clocks.clock.read()[1] < written_at
    clocks.sleep(DAY)
    assert clocks.clock.read()[1] > written_at, "a steady day: now it is old in truth"


def test_a_restart_beside_a_jump_makes_no_young_receipt_old() -> None:
    clocks = Clocks()
    written_at, _ = clocks.clock.read()
    clocks.wall += 2 * DAY
    assert Clocks(clocks.wall).clock.read()[1] < written_at


def test_a_process_that_is_restarted_each_hour_deletes_receipts_after_thirty_days() -> None:
    written_at = 50 * YEAR
    assert Clocks(written_at + 30 * DAY).clock.read()[1] >= written_at


def test_a_small_step_is_no_jump_and_many_are_one() -> None:
    clocks = Clocks()
    clocks.sleep(DAY)
    clocks.wall += STEP
    assert clocks.life == RECEIPT_LIFE
    clocks.wall += 1
    assert clocks.life > LIFE_WHILE_UNSURE
