"""The delays between attempts that fail in a row.  Without Twisted, so that blocking clients can use it."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class Backoff:
    """The delays between attempts: ``first`` seconds, multiplied by ``factor`` each time, at most ``longest`` seconds.

    ``next`` returns the delay before the next attempt; call ``reset`` after a success.
    """

    _first: float = 0.25
    _longest: float = 30.0
    _factor: float = 2.0
    _delay: float = attrs.field(init=False, default=attrs.Factory(lambda self: self._first, takes_self=True))

    def next(self) -> float:
        """Return the number of seconds to wait now; the next call returns more, up to ``longest``."""
        delay = self._delay
        self._delay = min(delay * self._factor, self._longest)
        return delay

    def reset(self) -> None:
        """Begin with ``first`` again."""
        self._delay = self._first
