"""What a stream without a table remembers: its newest facts, in the memory of their writer."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from replication.streams.facts import Fact, fact_bytes
from replication.streams.seams import KeptStatus, Page
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import InstanceName, Token

MAX_AGE: Final = 300.0  # seconds: what Synapse keeps for federation senders that do not acknowledge (protocol C3)
MAX_BYTES: Final = 16 * 2**20
_WORTHWHILE: Final = 1_000  # replaced rows before it pays to go through all


class Kept:
    """Facts of one writer, ascending; no more of them than are worth anything.

    Where the stream has a ``key``, a row is forgotten once a newer one is equal there.  Where it has none, a fact is
    forgotten ``max_age`` seconds after it was added, or once every sender has acknowledged it.  The oldest go when all
    take more than ``max_bytes``.  Who asks for what is forgotten gets what is left, as at a Synapse.
    """

    def __init__(self, definition: StreamDefinition, *, max_age: float = MAX_AGE, max_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0  # about what it takes
        self.acknowledged: dict[InstanceName, Token] = {}
        self._places = [(definition.row or ()).index(field) for field in definition.key]
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._facts: list[Fact] = []
        self._keys: list[Sequence[str]] = []  # of each fact, each row's; nothing without places
        self._newest: dict[str, Token] = {}  # the newest token with that key
        self._replaced = 0  # rows that are no longer the newest
        self._times: deque[tuple[Token, float]] = deque()  # when facts up to there were added

    def __len__(self) -> int:
        """How many facts there are."""
        return len(self._facts)

    def status(self) -> KeptStatus:
        """Return what a status page shows of it."""
        return KeptStatus(len(self), self.bytes, dict(self.acknowledged))

    def add(self, facts: Sequence[Fact], now: float) -> None:
        """Keep facts, newer than all before them."""
        facts = [fact for fact in facts if fact.texts]
        if facts:
            self._facts += facts
            self.bytes += fact_bytes(facts)
            if self._places:
                for fact in facts:
                    self._replace(fact)
            else:
                self._times.append((facts[-1].token, now))
        self.expire(now)
        if self._replaced > max(_WORTHWHILE, len(self._newest)):
            self._tidy()
        while self.bytes > self._max_bytes:
            self.drop(self._facts[len(self._facts) // 16].token)

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._times and self._times[0][1] <= now - self._max_age:
            self.drop(self._times.popleft()[0])

    def acknowledge(self, sender: InstanceName, token: Token) -> None:
        """Hear how far a sender is; what all that were ever heard have acknowledged is forgotten."""
        self.acknowledged[sender] = max(token, self.acknowledged.get(sender, token))
        self.drop(min(self.acknowledged.values()))

    def drop(self, upto: Token) -> None:
        """Forget all facts up to a token."""
        count = bisect_right(self._facts, upto, key=itemgetter(0))
        gone, keys = self._facts[:count], self._keys[:count]
        del self._facts[:count], self._keys[:count]
        self.bytes -= fact_bytes(gone)
        for (token, _), some in zip(gone, keys, strict=bool(self._places)):
            for key in some:
                if self._newest.get(key) == token:
                    del self._newest[key]
                else:
                    self._replaced -= 1

    def page(self, *, after: Token, upto: Token, limit: int) -> Page:
        """Return what is left of the facts with ``after < token <= upto``, about ``limit`` rows of it."""
        first, last = (bisect_right(self._facts, each, key=itemgetter(0)) for each in (after, upto))
        facts: list[Fact] = []
        rows = 0
        for place in range(first, last):
            fact = self._left(place)
            if not fact.texts:
                continue
            rows += len(fact.texts)
            if facts and rows > limit:
                return Page(facts, facts[-1].token, limited=True)
            facts.append(fact)
        return Page(facts, upto, limited=False)

    def _replace(self, fact: Fact) -> None:
        keys = grammar.spell_rows([[row[place] for place in self._places] for row in fact.rows])
        for key in keys:
            self._replaced += key in self._newest
            self._newest[key] = fact.token
        self._keys.append(keys)

    def _left(self, place: int) -> Fact:
        """Return a fact without the rows that were replaced."""
        fact = self._facts[place]
        if not self._places:
            return fact
        rows = dict(zip(self._keys[place], fact.texts, strict=True))  # of equal keys in one fact the last counts
        return Fact(fact.token, tuple([text for key, text in rows.items() if self._newest[key] == fact.token]))

    def _tidy(self) -> None:
        left = [self._left(place) for place in range(len(self._facts))]
        self._facts = [fact for fact in left if fact.texts]
        self._keys, self._newest, self._replaced = [], {}, 0
        for fact in self._facts:
            self._replace(fact)
        self.bytes = fact_bytes(self._facts)
