"""Facts of several writers in linear order, up to the position that all have reached (docs/protocol/ids.md F3)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from replication.errors import StreamError
from replication.streams.cursor import Apply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.cursor import Cursor
    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName, Token

_token_of = itemgetter(0)


class ApplyMerged(msgspec.Struct, frozen=True):
    """Apply ``facts``, which ascend, and move each writer's position as in ``parts``, in one transaction."""

    parts: Mapping[InstanceName, Apply]
    facts: Sequence[Fact]

    @property
    def after(self) -> Token:
        """The lowest position of these writers."""
        return min(part.after for part in self.parts.values())

    def check(self) -> None:
        """StreamError: two writers have a fact with one token, so they do not share a sequence."""
        token = next((each.token for each, after in pairwise(self.facts) if each.token == after.token), None)
        if token is not None:
            first, second, *_ = sorted(each for each, part in self.parts.items() if token in map(_token_of, part.facts))
            raise StreamError(
                f"fact {token} of {second} has the ID of a fact of {first}: linear=True is for writers that share one "
                "database; if these do not, register the function without linear=True"
            )

    def first(self, count: int) -> ApplyMerged:
        """Return the step that applies only the first ``count`` facts, at least one."""
        if count >= len(self.facts):
            return self
        facts = self.facts[:count]
        if any(part.upto == part.after for part in self.parts.values()):  # they came late, and are one writer's
            return ApplyMerged({writer: part.first(count) for writer, part in self.parts.items()}, facts)
        upto = facts[-1].token
        return ApplyMerged(
            {writer: _cut(part, upto) for writer, part in self.parts.items() if part.after < upto}, facts
        )


def merge(cursors: Mapping[InstanceName, Cursor]) -> ApplyMerged | None:
    """Return the next facts of writers that share one sequence; None if there are none to apply yet.

    No token is above the lowest token that a writer's cursor has reached.  Facts that came late, below the position of
    their writer, are applied by themselves.
    """
    for writer, each in cursors.items():
        step = each.step()
        if isinstance(step, Apply) and step.upto == step.after:
            return ApplyMerged({writer: step}, step.facts)
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
    return ApplyMerged(parts, facts)


def _cut(step: Apply, upto: Token) -> Apply:
    upto = min(upto, step.upto)
    return Apply(step.facts[: bisect_right(step.facts, upto, key=_token_of)], step.after, upto, step.resets)
