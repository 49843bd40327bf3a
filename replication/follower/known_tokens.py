"""Which facts of a stream were applied, by token.

In some streams of Synapse any writer may send the facts of another one (docs/protocol/redis.md).  The fact is applied
under the writer that sends it first.  When a second writer sends the token, only the position moves.

An audit compares the tokens with those in the writers' database.  It stores up to where it has compared.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import attrs

from replication.storage.tables.applied_tokens import (
    find_applied,
    find_copied,
    forget_applied,
    has_former_tokens,
    note_applied,
    take_former_tokens,
    undo_applied,
)
from replication.storage.tables.stream_audits import (
    begin_audit,
    end_audit,
    has_former_audit,
    lower_audited,
    put_audited,
    put_searched,
    read_audit,
    read_searched,
    take_former_audit,
)
from replication.storage.transactions import run_transaction
from replication.streams.facts import tokens_of
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.interfaces import ISqlExecutor, IStreamStore, ITransaction
    from replication.wire.grammar import StreamName

COPY: Final = InstanceName("")


@attrs.define(eq=False, repr=False)
class CopiedTokens:
    """The tokens of a stream with a copy: the table of the copy has them.

    The methods are called in the order of the transactions of the stream, one at a time.
    """

    _stream: StreamName
    _store: IStreamStore
    _follower: InstanceName = COPY  # under which the audit is stored

    async def find(self, first: Token, last: Token) -> set[Token]:
        """Return the tokens from ``first`` to ``last`` whose facts were applied."""
        return await self._store.read(lambda database: find_copied(database, self._stream, first, last))

    async def new_facts(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts that were not applied yet; ``facts`` ascend, and two may have one token."""
        if not facts:
            return facts
        known = await self.find(facts[0].token, facts[-1].token)
        new = []
        for fact in facts:
            if fact.token not in known:
                known.add(fact.token)
                new.append(fact)
        return new

    async def note(
        self, transaction: ITransaction | None, writer: InstanceName, facts: Sequence[Fact], floor: Token
    ) -> None:
        """Store in ``transaction``, if there is one, that facts of a writer are applied.

        No writer sends a token up to ``floor`` again, because it is the lowest of their positions.
        """

    async def undo(self, transaction: ITransaction | None, writer: InstanceName, above: Token) -> None:
        """Store in ``transaction``, if there is one, that the facts of a writer above a token are undone."""
        if transaction is not None:
            await transaction.run(lambda database: lower_audited(database, self._stream, self._follower, writer, above))

    async def open_audit(
        self, positions: Mapping[InstanceName, Token], *, audited: bool, resumes: bool
    ) -> dict[InstanceName, Token] | None:
        """Return up to where each writer was compared; None if there is no audit.

        One that is not ``audited`` now goes on if it ``resumes``; else it ends.
        """
        if audited:
            return await self.begin_audit(positions)
        if resumes:
            return await self._read_audit(positions)
        await self.end_audit()
        return None

    async def begin_audit(self, positions: Mapping[InstanceName, Token]) -> dict[InstanceName, Token]:
        """Return up to where each writer was compared; a first audit begins at ``positions``."""
        return await run_transaction(
            self._store, lambda database: begin_audit(database, self._stream, self._follower, positions)
        )

    async def end_audit(self) -> None:
        """Note that there is no audit; a later one of a copy goes on where this one has ended."""

    async def advance_audit(
        self, checked: Mapping[InstanceName, Token], *, of_writers: Mapping[InstanceName, Token], floor: Token
    ) -> None:
        """Store up to where writers were compared; forget tokens as ``forget_applied`` does."""

        def store(database: ISqlExecutor) -> None:
            put_audited(database, self._stream, self._follower, checked)
            self._forget(database, of_writers, floor)

        await run_transaction(self._store, store)

    async def searched(self) -> Token:
        """Return the token up to which the writers of all facts are known, and their facts applied."""
        return await self._store.read(lambda database: read_searched(database, self._stream, self._follower))

    async def note_searched(self, upto: Token) -> None:
        """Store what ``searched`` returns, also after a restart."""
        await run_transaction(self._store, lambda database: put_searched(database, self._stream, self._follower, upto))

    async def _read_audit(self, positions: Mapping[InstanceName, Token]) -> dict[InstanceName, Token] | None:
        return await self._store.read(lambda database: read_audit(database, self._stream, self._follower, positions))

    def _forget(self, database: ISqlExecutor, of_writers: Mapping[InstanceName, Token], floor: Token) -> None:
        """Forget nothing: the copy has the tokens."""


@attrs.define(eq=False, repr=False)
class AppliedTokens(CopiedTokens):
    """The tokens of a stream with a function: the table ``applied_tokens`` has those above the lowest position.

    With an audit it has those that may be compared again.
    """

    async def open_audit(
        self, positions: Mapping[InstanceName, Token], *, audited: bool, resumes: bool
    ) -> dict[InstanceName, Token] | None:
        """Take what was noted under former names on SQLite, then do as ``CopiedTokens.open_audit``."""
        if await self._store.read(self._has_former):
            await run_transaction(self._store, self._take_former)
        return await super().open_audit(positions, audited=audited, resumes=resumes)

    async def find(self, first: Token, last: Token) -> set[Token]:
        """Return the tokens that are in the table."""
        return await self._store.read(
            lambda database: find_applied(database, self._stream, self._follower, first, last)
        )

    async def note(
        self, transaction: ITransaction | None, writer: InstanceName, facts: Sequence[Fact], floor: Token
    ) -> None:
        """Add the tokens to the table, and delete those up to ``floor``."""
        assert transaction is not None  # noqa: S101 - a function has one
        note = partial(note_applied, tokens=tokens_of(facts), floor=floor)
        await transaction.run(lambda database: note(database, self._stream, self._follower, writer))

    async def undo(self, transaction: ITransaction | None, writer: InstanceName, above: Token) -> None:
        """Delete the tokens from the table, too."""
        await super().undo(transaction, writer, above)
        assert transaction is not None  # noqa: S101 - as above
        await transaction.run(lambda database: undo_applied(database, self._stream, self._follower, writer, above))

    async def end_audit(self) -> None:
        """Note that there is no audit: tokens that are applied from now on are not noted."""
        await run_transaction(self._store, lambda database: end_audit(database, self._stream, self._follower))

    def _has_former(self, database: ISqlExecutor) -> bool:
        which = database, self._stream, self._follower
        return has_former_tokens(*which) or has_former_audit(*which)

    def _take_former(self, database: ISqlExecutor) -> None:
        take_former_tokens(database, self._stream, self._follower)
        take_former_audit(database, self._stream, self._follower)

    def _forget(self, database: ISqlExecutor, of_writers: Mapping[InstanceName, Token], floor: Token) -> None:
        """Delete rows of the table."""
        forget_applied(database, self._stream, self._follower, of_writers=of_writers, floor=floor)


@attrs.define(eq=False, repr=False)
class ReceivedTokens(CopiedTokens):
    """The tokens of a stream of which nothing is stored: they are in memory, and lost when the process ends."""

    _tokens: dict[Token, InstanceName] = attrs.field(init=False, factory=dict)
    _floor: Token = attrs.field(init=False, default=Token(0))

    async def find(self, first: Token, last: Token) -> set[Token]:
        """Return the tokens that were noted."""
        between = range(first, last + 1)
        if len(between) < len(self._tokens):
            return {*between} & self._tokens.keys()
        return {each for each in self._tokens if each in between}

    async def note(
        self,
        transaction: ITransaction | None,  # noqa: ARG002 (there is none)
        writer: InstanceName,
        facts: Sequence[Fact],
        floor: Token,
    ) -> None:
        """Note tokens, and forget those up to ``floor``."""
        self._tokens.update(dict.fromkeys(tokens_of(facts), writer))
        if floor > self._floor:  # it stays while a writer is idle
            self._floor = floor
            self._keep({}, floor)

    async def undo(
        self,
        transaction: ITransaction | None,  # noqa: ARG002 (there is none)
        writer: InstanceName,
        above: Token,
    ) -> None:
        """Forget the tokens of a writer above a token: they are given again."""
        self._tokens = {token: of for token, of in self._tokens.items() if of != writer or token <= above}

    async def begin_audit(self, positions: Mapping[InstanceName, Token]) -> dict[InstanceName, Token]:
        """Return ``positions``, where the audit begins."""
        return {**positions}

    async def end_audit(self) -> None:
        """Note that there is no audit."""
        self._tokens.clear()

    async def advance_audit(
        self,
        checked: Mapping[InstanceName, Token],  # noqa: ARG002 (nothing is stored)
        *,
        of_writers: Mapping[InstanceName, Token],
        floor: Token,
    ) -> None:
        """Forget tokens."""
        self._keep(of_writers, floor)

    async def searched(self) -> Token:
        """Return 0: at a start, no writer is known."""
        return Token(0)

    async def note_searched(self, upto: Token) -> None:
        """Do nothing."""

    async def _read_audit(self, positions: Mapping[InstanceName, Token]) -> None:
        """Return None: nothing is stored."""

    def _keep(self, of_writers: Mapping[InstanceName, Token], floor: Token) -> None:
        self._tokens = {
            token: writer for token, writer in self._tokens.items() if token > max(floor, of_writers.get(writer, floor))
        }
