"""How many facts one transaction of an application's function has: a slow function receives fewer.

A transaction that takes long holds locks in the database, shows no progress, and is lost whole if the process ends.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twisted.internet.interfaces import IReactorTime

    from replication.follower.failures import Step

FIRST: Final = 100  # facts
MOST: Final = 10_000
LONGEST: Final = 1.0  # seconds for which a function should run


@attrs.define(eq=False)
class TransactionSize:
    """The number of facts that a function receives at once: as many as it takes in LONGEST seconds."""

    _clock: IReactorTime
    facts: int = attrs.field(init=False, default=FIRST)

    def cut(self, step: Step) -> Step:
        """Return the part of an ``Apply`` or ``ApplyMerged`` that is applied at once."""
        return step.first(self.facts)

    @contextmanager
    def timing(self, count: int) -> Iterator[None]:
        """Measure a call with so many facts; the next one may have up to twice as many, or fewer."""
        began = self._clock.seconds()
        try:
            yield
        finally:
            took = self._clock.seconds() - began
            if took > LONGEST:
                self.facts = max(1, min(self.facts, int(count * LONGEST / took)))
            elif took < LONGEST / 2 and count >= self.facts:
                self.facts = min(2 * self.facts, MOST)
