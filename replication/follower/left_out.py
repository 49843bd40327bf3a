"""Ranges that a copy leaves out because their facts are gone: its store refuses pages below them, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec

if TYPE_CHECKING:
    from replication.streams.cursor import Apply, CatchUp, Reset
    from replication.wire.grammar import InstanceName, Token


class _Range(msgspec.Struct, frozen=True):
    """The facts in ``(after, upto]``; ``resets`` is the number of resets before they were found to be gone."""

    after: Token
    upto: Token
    resets: int


@attrs.define(eq=False, repr=False)
class LeftOutRanges:
    """The ranges of one stream, by writer, from the page that leaves one out until the copy's position has passed it.

    A range that was found before a reset is of a history that the writer has lost.
    """

    _ranges: dict[InstanceName, list[_Range]] = attrs.field(init=False, factory=dict)

    def add(self, writer: InstanceName, step: CatchUp, upto: Token) -> None:
        """Add the facts that ``step`` has fetched up to ``upto``."""
        self._ranges.setdefault(writer, []).append(_Range(step.after, upto, step.resets))

    def mark(self, writer: InstanceName, step: Apply) -> Token | None:
        """Return the mark that is stored with ``step``: up to where facts may be gone; None: no range is passed."""
        found = self._ranges.get(writer, ())
        return max([each.upto for each in found if each.resets == step.resets and each.after < step.upto], default=None)

    def applied(self, writer: InstanceName, step: Apply | Reset, position: Token) -> None:
        """Drop what is passed at ``position``, to which ``step`` has led, and what was found before the last reset."""
        if found := self._ranges.pop(writer, None):
            left = [each for each in found if each.after >= position and each.resets >= step.resets]
            if left:
                self._ranges[writer] = left
