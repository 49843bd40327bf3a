"""What must be true whatever happens: the invariants of field.md 3.1, as somebody sees them who sees everything.

A :class:`Ledger` is what a writer has committed and what it has told the world; a :class:`WireWatch` reads along on one
connection; a :class:`Account` is what a follower has durably made of one writer's stream.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from replication.streams.facts import Fact
from replication.wire.commands import Ping, Position, Rdata, parse_line
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replication.streams.seams import Page
    from replication.wire.commands import Command
    from replication.wire.grammar import StreamName
    from replication.writer import Reservation


class Ledger:
    """One writer's stream: ``committed`` facts, IDs that are ``open``, and the largest token ``told`` to anybody."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.committed: dict[Token, tuple[str, ...]] = {}
        self.open: dict[Token, Reservation] = {}
        self.told = Token(0)

    def commit(self, facts: Iterable[Fact]) -> None:
        """A transaction is durable."""
        for token, texts in facts:
            assert token not in self.committed, f"{self.name}: {token} is committed twice"
            assert token > self.told, f"I5: {self.name}: {token} is committed, but {self.told} was announced before"
            self.committed[token] = texts

    def tell(self, token: Token) -> None:
        """Everything up to ``token`` was announced as complete."""
        # A master that stops does not wait for ever: it ends a reservation by itself, and refuses what comes then.
        unfinished = [each for each, held in self.open.items() if each <= token and held._ended is None]
        assert not unfinished, f"I5: {self.name}: {token} is announced while {unfinished} are open"
        self.told = max(self.told, token)

    def between(self, after: Token, upto: Token) -> list[Fact]:
        """Return the facts that a follower has to apply to get from ``after`` to ``upto``: those that have rows."""
        return [Fact(each, texts) for each, texts in sorted(self.committed.items()) if texts and after < each <= upto]

    def check_page(self, page: Page, after: Token, upto: Token) -> None:
        """A page has all that it claims to have, and claims nothing that may still change."""
        assert page.upto <= upto
        assert page.upto <= self.told, f"I5: {self.name}: a page reaches {page.upto}, announced is {self.told}"
        want = self.between(after, page.upto)
        assert list(page.facts) == want, f"I1: {self.name}: a page of ({after}, {page.upto}] has {page.facts} of {want}"


class WireWatch:
    """Reads what a writer says on one connection, as it says it."""

    def __init__(self, ledgers: dict[StreamName, Ledger], trace: list[str], where: str) -> None:
        self._ledgers = ledgers
        self._trace = trace
        self._where = where
        self._rest = b""
        self._told: dict[StreamName, Token] = {}
        self._begun: defaultdict[StreamName, list[str]] = defaultdict(list)
        self.spoke = 0  # lines that are not PING

    def read(self, data: bytes) -> None:
        """Check the lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            command = parse_line(line.decode())
            if not isinstance(command, Ping):
                self.spoke += 1
                self._trace.append(f"{self._where} {line[:100].decode()}")
                self._check(command)

    def _check(self, command: Command) -> None:
        match command:
            case Rdata(stream, _, None, row):
                self._begun[stream].append(row)
            case Rdata(stream, _, token, row):
                assert token is not None
                ledger, told = self._ledgers[stream], self._told.get(stream)
                fact = Fact(token, (*self._begun.pop(stream, ()), row))
                ledger.tell(token)
                if told is None:
                    told = Token(token - 1)
                assert token > told, f"I7: {stream}: RDATA {token} comes after {told}"
                want = ledger.between(told, token)
                assert want == [fact], f"I4, I5, I6: {stream}: after {told} comes {fact}, committed is {want}"
                self._told[stream] = token
            case Position(stream, _, prev, new):
                ledger, told = self._ledgers[stream], self._told.get(stream, Token(0))
                assert not self._begun[stream], f"I4: POSITION of {stream} inside a fact"
                ledger.tell(new)
                assert prev <= new, f"POSITION of {stream} runs backwards"
                assert new >= told, f"I7: POSITION of {stream} goes back from {told} to {new}"
                hidden = ledger.between(prev, new)
                assert not hidden, f"I6: POSITION {stream} {prev} {new} covers {hidden}"
                self._told[stream] = new
            case _:
                pass


class Account:
    """What a follower durably has of one writer's stream: facts, each once and in order, and a position."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.position = Token(0)
        self.facts: list[Fact] = []

    def move(self, upto: Token, facts: Sequence[Fact]) -> None:
        """A transaction is durable that takes the position to ``upto``."""
        name = self.ledger.name
        assert upto > self.position, f"I3: {name}: the position goes from {self.position} to {upto}"
        assert upto <= self.ledger.told, f"I5: {name}: {upto} is applied, announced is {self.ledger.told}"
        want = self.ledger.between(self.position, upto)
        assert list(facts) == want, f"I1, I2, I4: {name}: ({self.position}, {upto}] is {list(facts)}, should be {want}"
        self.position = upto
        self.facts += facts

    def lacks(self) -> list[Fact]:
        """Return what was announced and is not here."""
        return self.ledger.between(self.position, self.ledger.told)
