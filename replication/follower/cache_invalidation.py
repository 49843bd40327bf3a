"""The caches stream: its facts invalidate the cached functions of this process before their position is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from twisted.logger import Logger

from replication.errors import StreamError
from replication.follower.stream import begin_without_gap
from replication.streams.cursor import Apply, Reset

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replication.caches import Caches
    from replication.streams.facts import Fact
    from replication.wire.commands import Position
    from replication.wire.grammar import InstanceName, Token


@attrs.define(eq=False, repr=False)
class CacheInvalidation:
    """Invalidates ``caches`` by the facts of the caches stream."""

    log = Logger()

    _caches: Caches

    def is_needed(self) -> bool:
        """Whether any function is cached."""
        return bool(len(self._caches))

    def clear(self) -> None:
        """Invalidate all: facts of the caches stream may be lost, or never be received here."""
        self._caches.clear()

    def apply(self, facts: Iterable[Fact]) -> None:
        """Invalidate what facts of the caches stream name."""
        for fact in facts:
            try:
                self._caches.apply(fact.rows)
            except StreamError as error:  # the other rows are applied; a bad row must not stop the stream
                self.log.error("caches fact {token}: {error}", token=fact.token, error=str(error))

    def before_step(self, _: InstanceName, step: Apply | Reset) -> None:
        """Invalidate what a step concerns, before the step is applied (docs/protocol/traps.md 30)."""
        if isinstance(step, Reset):
            self.clear()  # cached values may come from facts that the writer has lost
        else:
            self.apply(step.facts)

    def begin(self, command: Position) -> Token:
        """Clear the caches at the first POSITION of a writer: what it has sent before is never received here."""
        self.clear()
        return begin_without_gap(command)
