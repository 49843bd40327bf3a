"""Facts of one stream that its function cannot take: found, counted, skipped and taken up again.

A function receives many facts in one call, so an exception names none.  After one, fewer facts are applied at a time,
down to one, until the fact that fails is alone (docs/operations.md, Facts that a function cannot take).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import msgspec
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger

from replication.errors import CommitsLostError, PositionMovedError, StreamError, is_temporary
from replication.storage.tables.skipped_facts import forget_skips, lost_skips
from replication.storage.transactions import run_transaction
from replication.streams.skips import FailedFact, SkippedFact, SkipState, describe_error
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.streams.cursor import Apply, Cursor
    from replication.streams.facts import Fact
    from replication.streams.interfaces import IStreamStore
    from replication.streams.merge import ApplyMerged

    Step = TypeVar("Step", Apply, ApplyMerged)

DEFAULT_ATTEMPTS: Final = 5
_NO_FACT: Final = (PositionMovedError, CommitsLostError, CancelledError)  # errors that no fact causes
MAX_REQUESTS: Final = 10_000  # of a stream, that one start reads
_REQUESTS: Final = (SkipState.SKIP_REQUESTED, SkipState.RETRY_REQUESTED)
_Key = tuple[InstanceName, Token]


class Again(msgspec.Struct, frozen=True):
    """Apply a fact that was skipped, below the position."""

    skipped: SkippedFact

    @property
    def after(self) -> Token:
        """The token below the fact."""
        return Token(self.skipped.fact.token - 1)


@attrs.define(eq=False, repr=False)
class FailingFacts:
    """What is known of the facts of one stream that its function cannot take.

    Where a parameter is called ``line``, it is a writer, or the empty name for all writers in linear order: what is
    applied one step after the other.

    Args:
        stream: its name.
        lifetime: of the process; it ends every wait.

    """

    log = Logger()

    stream: StreamName
    _lifetime: Lifetime
    skipped_total: Counter[InstanceName] = attrs.field(init=False, factory=Counter)  # since the start, by writer
    counts: Counter[InstanceName] = attrs.field(init=False, factory=Counter)  # in the database, by writer
    _failed: dict[InstanceName, FailedFact] = attrs.field(init=False, factory=dict)  # by line
    _searched: dict[InstanceName, Sequence[Fact]] = attrs.field(init=False, factory=dict)  # one of them fails, by line
    _limits: dict[InstanceName, int] = attrs.field(init=False, factory=dict)  # facts of the next step, by line
    _skips: set[_Key] = attrs.field(init=False, factory=set)  # requested
    _retries: dict[_Key, Again] = attrs.field(init=False, factory=dict)  # requested
    _waiting: dict[_Key, list[Deferred[None]]] = attrs.field(init=False, factory=lambda: defaultdict(list))
    _pauses: dict[InstanceName, Deferred[None]] = attrs.field(init=False, factory=dict)  # by line

    @property
    def stopping(self) -> bool:
        """Whether this process stops, which cancels what runs."""
        return self._lifetime.ended

    # ---- what was requested

    async def load(self, store: IStreamStore, follower: InstanceName, positions: Mapping[InstanceName, Token]) -> None:
        """Read what was requested while this process did not run; forget what is above the stored positions."""
        if lost := await store.read(lambda database: lost_skips(database, follower, self.stream, positions)):
            await run_transaction(store, lambda database: forget_skips(database, follower, self.stream, lost))
            for writer, token in lost.items():
                self.log.warn(
                    "what was skipped of {stream} by {writer} above {token} is forgotten: a restore has undone it",
                    stream=self.stream,
                    writer=writer,
                    token=token,
                )
        await self.count(store, follower)
        found = await store.skipped_facts(follower, self.stream, states=_REQUESTS, limit=MAX_REQUESTS)
        self._skips = {each.key for each in found if each.state is SkipState.SKIP_REQUESTED}
        self._retries = {each.key: Again(each) for each in found if each.state is SkipState.RETRY_REQUESTED}

    async def count(self, store: IStreamStore, follower: InstanceName) -> None:
        """Read how many facts of each writer are skipped."""
        self.counts = Counter(await store.skipped_counts(follower, self.stream))

    def request_skip(self, writer: InstanceName, token: Token) -> Deferred[None]:
        """Have the fact that fails now left out; fires once that is stored.  StreamError: this one does not fail."""
        failing = self.failing(writer)
        if failing != token:
            fails = "no fact of it fails now" if failing is None else f"{failing} does"
            raise StreamError(f"fact {token} of stream {self.stream!r} by {writer!r} does not fail: {fails}")
        self._skips.add((writer, token))
        return self._wait((writer, token))

    def take_unmatched(self, cursors: Mapping[InstanceName, Cursor]) -> list[_Key]:
        """Return and forget, in order, the requested skips that match no fact: their writers' facts are all applied."""
        if not self._skips:
            return []
        unmatched = self._skips.difference(self._waiting)
        found = sorted(key for key in unmatched if key[0] in cursors and cursors[key[0]].live)
        self._skips.difference_update(found)
        return found

    def request_retry(self, skipped: SkippedFact) -> Deferred[None]:
        """Have a skipped fact applied; fires once that is stored, and fails if the function raises again."""
        self._retries[skipped.key] = Again(skipped)
        return self._wait(skipped.key)

    def retry_of(self, writer: InstanceName) -> Again | None:
        """Return the next fact of a writer to take up again."""
        if not self._retries:
            return None
        return next((again for key, again in self._retries.items() if key[0] == writer), None)

    def end_retry(self, again: Again, error: Exception | None) -> None:
        """Note that a fact was taken up again, or why it could not be."""
        key = writer, token = again.skipped.key
        del self._retries[key]
        what = {"token": token, "stream": self.stream, "writer": writer}
        if error is None:
            self.counts[writer] -= 1
            self.log.warn("fact {token} of {stream} by {writer}, which was skipped, is applied now", **what)
        else:
            reason = describe_error(error)
            self.log.error("fact {token} of {stream} by {writer} stays skipped: {reason}", reason=reason, **what)
        for each in self._waiting.pop(key, ()):
            if error is None:
                each.callback(None)
            else:
                each.errback(StreamError(f"fact {token} stays skipped, the function raised {describe_error(error)}"))

    # ---- what is applied

    def cut(self, line: InstanceName, step: Step) -> Step:
        """Return a step with as many facts as may be applied at once after the last failure."""
        limit = self._limits.get(line)
        return step if limit is None else step.first(limit)

    def divide(
        self, facts: Sequence[Fact], writer_of: Callable[[Fact], InstanceName]
    ) -> tuple[Sequence[Fact], list[SkippedFact]]:
        """Return the facts to apply, and those that are to be left out."""
        if not self._skips:
            return facts, []
        requested = [fact for fact in facts if (writer_of(fact), fact.token) in self._skips]
        reasons = {(each.writer, each.fact.token): each.reason for each in self._failed.values()}
        skipped = [
            SkippedFact(self.stream, writer, fact, SkipState.SKIPPED, reasons.get((writer, fact.token), ""))
            for fact, writer in zip(requested, map(writer_of, requested), strict=True)
        ]
        return [fact for fact in facts if fact not in requested] if requested else facts, skipped

    def note(
        self, line: InstanceName, facts: Sequence[Fact], writer_of: Callable[[Fact], InstanceName], error: Exception
    ) -> FailedFact | None:
        """Note that these facts could not be applied; returns the fact that fails, if it was alone.

        An error that another attempt may cure is not an error of a fact: a database that does not answer, a name that
        another process uses, the end of this process.
        """
        self._searched.pop(line, None)
        if not facts or is_temporary(error) or isinstance(error, _NO_FACT):
            return None
        self._limits[line] = max(1, len(facts) // 2)
        if len(facts) > 1:
            self._searched[line] = facts
            return None
        (fact,) = facts
        writer = writer_of(fact)
        before = self._failed.get(line)
        known = before is not None and (before.writer, before.fact.token) == (writer, fact.token)
        attempts = before.attempts + 1 if before is not None and known else 1
        failed = self._failed[line] = FailedFact(self.stream, writer, fact, error, attempts)
        return failed

    def committed(self, line: InstanceName, skipped: Iterable[SkippedFact], rows: int) -> None:
        """Note that a step is stored, without the facts that were skipped."""
        self._failed.pop(line, None)
        self._searched.pop(line, None)
        if (limit := self._limits.get(line)) is not None:
            self._limits[line] = 2 * limit
            if limit > rows:  # all that was there was applied
                del self._limits[line]
        for each in skipped:
            self._skips.discard(each.key)
            self.skipped_total[each.writer] += 1
            self.counts[each.writer] += 1
            self.log.error(
                "fact {token} of {stream} by {writer} is skipped, as a {decided_by} decided: {reason}",
                token=each.fact.token,
                stream=each.stream,
                writer=each.writer,
                decided_by=each.decided_by,
                reason=each.error or "its skip was requested before the start",
            )
            for waiting in self._waiting.pop(each.key, ()):
                waiting.callback(None)

    def went_back(self, writer: InstanceName, to: Token) -> None:
        """Forget the facts of a writer above a token, which it has lost."""
        for known in (self._skips, self._retries, self._waiting):
            for key in [each for each in known if each[0] == writer and each[1] > to]:
                if known is self._waiting:
                    for waiting in self._waiting[key]:
                        waiting.errback(StreamError(f"{writer} went back to {to}, and has lost fact {key[1]}"))
                known.discard(key) if isinstance(known, set) else known.pop(key)

    # ---- what is shown, and waits

    def failing(self, writer: InstanceName) -> Token | None:
        """Return the token of the fact of a writer that fails now."""
        return next((each.fact.token for each in self._failed.values() if each.writer == writer), None)

    def cure(self, line: InstanceName) -> str:
        """Return what may be done about the fact that fails; empty if none is known."""
        failed = self._failed.get(line)
        if failed is None:
            return ""
        where = f"{failed.stream} {failed.writer} {failed.fact.token}"
        skip = f"`replication skip {where}`, with --http or --database of this worker,"
        return f"; it is fact {failed.fact.token}: {skip} leaves it out"

    def search(self, line: InstanceName) -> str:
        """Return among which facts the one that fails is; empty if it is known, or if none fails."""
        if not (facts := self._searched.get(line)):
            return ""
        where = f"a fact from {facts[0].token} to {facts[-1].token}"
        return f"; the cause is {where}: fewer are applied at a time, until it is alone"

    def found_now(self, line: InstanceName) -> bool:
        """Whether the fact that fails was alone for the first time."""
        return line in self._failed and self._failed[line].attempts == 1

    def is_limited(self, line: InstanceName) -> bool:
        """Whether fewer facts are applied at a time, since one has failed."""
        return line in self._limits

    def is_narrowing(self, line: InstanceName) -> bool:
        """Whether the next attempt has fewer facts, so that it need not wait long."""
        return self.is_limited(line) and line not in self._failed

    async def pause(self, line: InstanceName, seconds: float) -> None:
        """Return after some seconds, or when something is requested, or when the process stops."""
        pause = self._pauses[line] = Deferred.fromCoroutine(self._lifetime.sleep(seconds))
        await pause

    def wake(self) -> None:
        """End every pause."""
        for each in [*self._pauses.values()]:
            each.cancel()

    def _wait(self, key: _Key) -> Deferred[None]:
        waiting: Deferred[None] = Deferred()
        self._waiting[key].append(waiting)
        return self._lifetime.add(waiting)
