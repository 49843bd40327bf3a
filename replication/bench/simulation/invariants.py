"""The invariants of docs/protocol/invariants.md, checked by objects that see every process.

A :class:`WriterHistory` records what a writer has committed and published.  A :class:`WireCheck` reads the lines of one
connection.  A :class:`FollowerHistory` records what a follower has durably applied of one writer's stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from replication.streams.facts import Fact
from replication.wire.commands import Ping, Position, Rdata, parse_line
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.streams.interfaces import Page
    from replication.wire.commands import Command
    from replication.wire.grammar import InstanceName, StreamName
    from replication.writer.reservation import FactTransaction


class WriterHistory:
    """One writer's stream: ``committed`` facts, ``open`` IDs, and the largest ``published`` token."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.committed: dict[Token, tuple[str, ...]] = {}
        self.open: dict[Token, FactTransaction[Any]] = {}
        self.published = Token(0)
        self._tokens: list[Token] = []  # of the committed facts that have rows, ascending
        self._facts: list[Fact] = []  # those facts

    def commit(self, facts: Iterable[Fact]) -> None:
        """Record a durable transaction."""
        for token, texts in facts:
            assert token not in self.committed, f"{self.name}: {token} is committed twice"
            assert token > self.published, (
                f"I5: {self.name}: {token} is committed, but {self.published} was published before"
            )
            self.committed[token] = texts
            if texts:
                place = bisect_right(self._tokens, token)
                self._tokens.insert(place, token)
                self._facts.insert(place, Fact(token, texts))

    def store(self, token: Token) -> None:
        """Record that the position ``token`` is stored: a replay reads no facts at or below it later."""
        unfinished = self._unfinished(token)
        assert not unfinished, f"I5: {self.name}: position {token} is stored while {unfinished} are open"

    def publish(self, token: Token) -> None:
        """Record that everything up to ``token`` was published as complete."""
        unfinished = self._unfinished(token)
        assert not unfinished, f"I5: {self.name}: {token} is published while {unfinished} are open"
        self.published = max(self.published, token)

    def between(self, after: Token, upto: Token) -> list[Fact]:
        """Return the facts with rows between ``after`` and ``upto``, which a follower must apply."""
        tokens = self._tokens
        return self._facts[bisect_right(tokens, after) : bisect_right(tokens, upto)]

    def restore(self, facts: Collection[Token], upto: Token) -> None:
        """Record that the database was restored: it has these facts, and positions up to ``upto``."""
        self.committed = {
            token: texts for token, texts in self.committed.items() if token in facts or (token <= upto and not texts)
        }
        self._facts = [Fact(*each) for each in sorted(self.committed.items()) if each[1]]
        self._tokens = [each.token for each in self._facts]
        self.open.clear()
        self.published = Token(0)

    def _unfinished(self, upto: Token) -> list[Token]:
        # A stopping master ends a reservation after a time, and refuses later calls of it.
        return [each for each, held in self.open.items() if each <= upto and held._ended is None]

    def check_page(self, page: Page, after: Token, upto: Token) -> None:
        """Check that a page is complete, and has no fact that may still change."""
        assert page.upto <= upto
        assert page.upto <= self.published, (
            f"I5: {self.name}: a page reaches {page.upto}, published is {self.published}"
        )
        want = self.between(after, page.upto)
        assert list(page.facts) == want, f"I1: {self.name}: a page of ({after}, {page.upto}] has {page.facts} of {want}"


_PING: Final = f"{Ping.WORD} ".encode()


@lru_cache(10_000)  # the runs of a process send the same lines again and again
def _parse(line: bytes) -> tuple[Command, str]:
    """Return the command of a line, and what a trace shows of it."""
    text = line.decode()
    return parse_line(text), text[:100]


class WireCheck:
    """Checks the lines that a writer or a relay sends on one connection; ``histories`` are those of each writer.

    A ``stale`` relay may send facts that its writer has lost, until it goes back: only the order of lines is checked.
    """

    def __init__(
        self,
        histories: Mapping[InstanceName, Mapping[StreamName, WriterHistory]],
        trace: list[str],
        where: str,
        *,
        stale: bool = False,
    ) -> None:
        self._histories = histories
        self._stale = stale
        self._trace = trace
        self._where = where
        self._rest = b""
        self._sent: dict[WriterHistory, Token] = {}
        self._begun: defaultdict[WriterHistory, list[str]] = defaultdict(list)
        self.lines = 0  # lines that are not PING

    def read(self, data: bytes) -> None:
        """Check the lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(_PING):
                command, shown = _parse(line)
                self.lines += 1
                self._trace.append(f"{self._where} {shown}")
                self._check(command)

    def _check(self, command: Command) -> None:
        if isinstance(command, Rdata):
            stream, token = command.stream, command.token
            history = self._histories[command.instance][stream]
            if token is None:
                self._begun[history].append(command.row)
                return
            sent = self._sent.get(history)
            fact = Fact(token, (*self._begun.pop(history, ()), command.row))
            if sent is None:
                sent = Token(token - 1)
            assert token > sent, f"I7: {stream}: RDATA {token} comes after {sent}"
            self._sent[history] = token
            if self._stale:
                return
            history.publish(token)
            want = history.between(sent, token)
            assert want == [fact], f"I4, I5, I6: {stream}: after {sent} comes {fact}, committed is {want}"
        elif isinstance(command, Position):
            stream, prev, new = command.stream, command.prev, command.new
            history = self._histories[command.instance][stream]
            sent = self._sent.get(history, Token(0))
            assert not self._begun.get(history), f"I4: POSITION of {stream} inside a fact"
            assert prev <= new, f"POSITION of {stream} runs backwards"
            assert new >= sent, f"I7: POSITION of {stream} goes back from {sent} to {new}"
            self._sent[history] = new
            if self._stale:
                return
            history.publish(new)
            hidden = history.between(prev, new)
            assert not hidden, f"I6: POSITION {stream} {prev} {new} covers {hidden}"


class FollowerHistory:
    """What a follower has durably applied of one writer's stream: facts, once and in order, and a position.

    If the writer ``restores`` backups, facts that it has lost may still be applied, until the follower goes back.
    ``left_out`` has the ranges that the follower has logged as deleted by the writer: it may lack their facts.
    """

    def __init__(self, history: WriterHistory, *, restores: bool = False) -> None:
        self.history = history
        self.restores = restores
        self.position = Token(0)
        self.facts: list[Fact] = []
        self.left_out: list[tuple[Token, Token]] = []

    def move(self, upto: Token, facts: Sequence[Fact]) -> None:
        """Record a durable transaction that moves the position to ``upto``."""
        name = self.history.name
        assert upto > self.position, f"I3: {name}: the position goes from {self.position} to {upto}"
        published = upto if self.restores else self.history.published
        assert upto <= published, f"I5: {name}: {upto} is applied, published is {self.history.published}"
        want = list(facts) if self.restores else self._want(self.position, upto, facts)
        assert list(facts) == want, f"I1, I2, I4: {name}: ({self.position}, {upto}] is {list(facts)}, should be {want}"
        self.position = upto
        self.facts += facts

    def go_back(self, upto: Token) -> None:
        """Record a durable transaction that goes back to ``upto``."""
        assert self.restores, f"I3: {self.history.name} is set back to {upto}"
        self.position = upto
        self.facts = [fact for fact in self.facts if fact.token <= upto]

    def check(self) -> None:
        """Check that exactly the writer's facts are applied, once everything is."""
        want = self._want(Token(0), self.position, self.facts)
        assert self.facts == want, f"I1: {self.history.name}: {self.facts} is applied of {want}"

    def _want(self, after: Token, upto: Token, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts that a range should have; of those that may be left out, only the ones in ``facts``."""
        want = self.history.between(after, upto)
        if not self.left_out:
            return want
        here = {each.token for each in facts}
        return [each for each in want if each.token in here or not self._may_lack(each.token)]

    def _may_lack(self, token: Token) -> bool:
        return any(after < token <= upto for after, upto in self.left_out)

    def lacks(self) -> list[Fact]:
        """Return the published facts that are not applied."""
        return self.history.between(self.position, self.history.published)


class LinearOrder:
    """The order in which a follower has durably applied the facts of all writers of one stream.

    ``excused`` are writers that the follower has stopped to wait for, which it logs: their facts may come late.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = Token(0)
        self.excused: set[InstanceName] = set()

    def apply(self, facts: Iterable[tuple[InstanceName, Fact]]) -> None:
        """Record the facts of a durable transaction, with their writers."""
        for writer, (token, _) in facts:
            assert token > self.last or writer in self.excused, (
                f"I17: {self.name}: {token} of {writer} is applied after {self.last}"
            )
            self.last = max(token, self.last)
