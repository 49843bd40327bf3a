"""The in-memory log: the newest facts of an in-memory stream (docs/protocol/streams.md C3)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from replication.streams.facts import Fact, fact_bytes
from replication.streams.interfaces import InMemoryLogStatus, Page
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import InstanceName, Token

MAX_AGE: Final = 300.0  # seconds, as in Synapse, for federation senders that do not acknowledge
MAX_SENDERS: Final = 1_000  # whose acknowledgements are kept: names of a hostile peer cannot fill the memory
MAX_BYTES: Final = 16 * 2**20
_MIN_REPLACED: Final = 1_000  # replaced rows, before all facts are searched for them


class InMemoryLog:
    """The newest facts of one writer, ascending.

    With a ``key`` in the definition, a row is dropped when a newer row has the same key.  Without one, a fact is
    dropped ``max_age`` seconds after it was added, or when every federation sender has acknowledged it.  The oldest
    facts are dropped when all take more than ``max_bytes`` bytes.  A page lacks the facts that were dropped.
    """

    def __init__(self, definition: StreamDefinition, *, max_age: float = MAX_AGE, max_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0  # the approximate memory of all facts
        self.acknowledged: dict[InstanceName, Token] = {}
        self._places = [(definition.row or ()).index(field) for field in definition.key]
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._facts: list[Fact] = []
        self._keys: list[Sequence[str]] = []  # the keys of each fact's rows; empty without a key
        self._newest: dict[str, Token] = {}  # the newest token of each key
        self._replaced = 0  # rows that are no longer the newest
        self._times: deque[tuple[Token, float]] = deque()  # when facts up to that token were added

    def __len__(self) -> int:
        """Return the number of facts."""
        return len(self._facts)

    def status(self) -> InMemoryLogStatus:
        """Return what status pages show of it."""
        return InMemoryLogStatus(len(self), self.bytes, dict(self.acknowledged))

    def add(self, facts: Sequence[Fact], now: float) -> None:
        """Add facts, above all that were added before; ``now`` is in seconds."""
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
        if self._replaced > max(_MIN_REPLACED, len(self._newest)):
            self._remove_replaced()
        while self.bytes > self._max_bytes:
            self.drop(self._facts[len(self._facts) // 16].token)

    def expire(self, now: float) -> None:
        """Drop facts that are older than ``max_age``."""
        while self._times and self._times[0][1] <= now - self._max_age:
            self.drop(self._times.popleft()[0])

    def acknowledge(self, sender: InstanceName, token: Token) -> None:
        """Note a sender's FEDERATION_ACK, and drop the facts that every sender has acknowledged."""
        if sender not in self.acknowledged and len(self.acknowledged) >= MAX_SENDERS:
            return
        self.acknowledged[sender] = max(token, self.acknowledged.get(sender, token))
        self.drop(min(self.acknowledged.values()))

    def drop(self, upto: Token) -> None:
        """Drop all facts up to a token."""
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
        """Return about ``limit`` rows of the facts with ``after < token <= upto`` that are left."""
        first, last = (bisect_right(self._facts, each, key=itemgetter(0)) for each in (after, upto))
        facts: list[Fact] = []
        rows = 0
        for place in range(first, last):
            fact = self._without_replaced(place)
            if not fact.texts:
                continue
            rows += len(fact.texts)
            if facts and rows > limit:
                return Page(facts, facts[-1].token, limited=True)
            facts.append(fact)
        return Page(facts, upto, limited=False)

    def _replace(self, fact: Fact) -> None:
        keys = grammar.encode_rows([[row[place] for place in self._places] for row in fact.rows])
        for key in keys:
            self._replaced += key in self._newest
            self._newest[key] = fact.token
        self._keys.append(keys)

    def _without_replaced(self, place: int) -> Fact:
        """Return a fact without its replaced rows."""
        fact = self._facts[place]
        if not self._places:
            return fact
        rows = dict(zip(self._keys[place], fact.texts, strict=True))  # of equal keys in one fact the last one counts
        return Fact(fact.token, tuple([text for key, text in rows.items() if self._newest[key] == fact.token]))

    def _remove_replaced(self) -> None:
        left = [self._without_replaced(place) for place in range(len(self._facts))]
        self._facts = [fact for fact in left if fact.texts]
        self._keys, self._newest, self._replaced = [], {}, 0
        for fact in self._facts:
            self._replace(fact)
        self.bytes = fact_bytes(self._facts)
