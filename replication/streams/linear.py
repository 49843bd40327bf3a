"""Several writers' facts as one linear stream: in the order of their tokens, up to what all have settled (F3)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import attrs

from replication.streams.cursor import Apply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.cursor import Cursor
    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName, Token

_token_of = itemgetter(0)


@attrs.frozen
class ApplyTogether:
    """Hand ``facts`` over, ascending, and move each writer's position as its part says, in one transaction."""

    parts: Mapping[InstanceName, Apply]
    facts: Sequence[Fact]

    @property
    def after(self) -> Token:
        """The position of the writer that is least far."""
        return min(part.after for part in self.parts.values())


def merge(cursors: Mapping[InstanceName, Cursor]) -> ApplyTogether | None:
    """Return what comes next of writers whose IDs are from one sequence; None if that waits for one of them.

    Nothing comes above a token up to which something of any writer may be missing.
    """
    floor = min([each.reached for each in cursors.values()], default=None)
    if floor is None:
        return None
    steps = {writer: each.step() for writer, each in cursors.items() if each.position < floor}
    ready = {writer: step for writer, step in steps.items() if isinstance(step, Apply)}
    floor = min([floor, *[step.upto for step in ready.values()]])
    parts = {writer: _cut(step, floor) for writer, step in ready.items() if step.after < floor}
    if not parts:
        return None
    facts = sorted(chain.from_iterable([part.facts for part in parts.values()]), key=_token_of)
    return ApplyTogether(parts, facts)


def _cut(step: Apply, upto: Token) -> Apply:
    return Apply(step.facts[: bisect_right(step.facts, upto, key=_token_of)], step.after, upto, step.epoch)
