"""The audit: the facts that were applied are compared with the database of their writers, or with a relay.

Redis delivers at most once, and RDATA has no previous token.  So after a later row has arrived, nothing in Redis shows
that a row was lost.  The database has the row (docs/protocol/redis.md, Audit).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import attrs
import msgspec
from twisted.internet.defer import Deferred
from twisted.logger import Logger, LogLevel

from replication.errors import ReplicationError
from replication.follower.database_restores import (
    Reached,
    find_restored,
    follow_below_wrong,
    go_back,
    positions_reached,
)
from replication.follower.one_writer import begin_of
from replication.logs import TroubleLog
from replication.streams.definitions import CACHES
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable

    from replication.deferreds import Lifetime
    from replication.follower.former_writers import FormerWriters
    from replication.follower.stream import StreamFollower
    from replication.net.links import IWriterLink
    from replication.streams.facts import Fact
    from replication.streams.interfaces import Page

DEFAULT_INTERVAL: Final = 10.0  # seconds
LOOK_AGAIN: Final = 1.0  # seconds; what is on its way arrives meanwhile
PAGE_IDS: Final = 1000  # of one query for lost facts
MAX_FACTS: Final = 10_000  # that one check applies for one writer; the next one applies more
MAX_LOGGED: Final = 20  # tokens in one message

T = TypeVar("T")
_Key = tuple[StreamName, InstanceName]
_Positions = Mapping[StreamName, Mapping[InstanceName, Token]]


class IAuditSource(Protocol):
    """What has all facts: the database of the writers (``DatabaseCatchUp``), or relays (``RelayedAudit``)."""

    name: str  # for messages

    def audits(self, stream: StreamName) -> bool:
        """Whether facts of a stream can be compared with it."""

    def stores_positions(self, stream: StreamName) -> bool:
        """Whether ``stored_positions`` have those of a stream."""

    def state(self, stream: StreamName, writer: InstanceName, position: Token) -> object:
        """Return what stays the same while no lost fact up to ``position`` is found there; None: it is not known."""

    def settled(self, stream: StreamName, writer: InstanceName) -> Token:
        """Return the token up to which it finds no lost fact any more."""

    async def stored_positions(self) -> _Positions:
        """Return the positions of the writers that are stored there."""

    async def newest(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token, of a stream without stored positions."""

    async def last_row(self, stream: StreamName) -> Token:
        """Return the largest token of all writers; 0 if there is no row."""

    def keeps_rows(self, stream: StreamName) -> bool:
        """Whether the rows of a stream stay: none is replaced by later ones, or deleted once it was delivered."""

    async def is_primary(self) -> bool:
        """Whether it has every committed fact: it is no standby, and no relay."""

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of a writer in a range."""

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page of facts."""


class _Look(msgspec.Struct, frozen=True):
    """What was seen of one writer: tokens up to its position that were never applied, and where its database is."""

    missing: Collection[Token]
    upto: Token
    reached: Token

    def missed(self, again: _Look, *, settled: bool) -> list[Token]:
        """Return the tokens that are missing here and ``again``.

        ``settled``: all facts up to ``reached`` were committed, so those above the position were missing here, too.
        """
        return [
            each
            for each in sorted(again.missing)
            if each in self.missing or (settled and self.upto < each <= self.reached)
        ]


@attrs.define(eq=False, repr=False, kw_only=True)
class Audit:
    """Compares what a process follows with what has all facts.

    A fact that is missing at two comparisons in a row was lost.  It is fetched, and applied once.

    Args:
        source: has all facts.
        followers: of all streams; those that are ``audited`` are compared.
        links: to the writers.
        lifetime: of this process.
        interval: seconds between two checks.
        checked: is called after each reading of the positions, also one that failed; None calls nothing.
        former: finds the former writers; None unless a Redis is followed.

    """

    log = Logger()

    _source: IAuditSource
    _followers: Iterable[StreamFollower]
    _links: Iterable[IWriterLink]
    _lifetime: Lifetime
    _interval: float
    _checked: Callable[[], None] | None = None
    _former: FormerWriters | None = None
    _stored: _Positions = attrs.field(init=False, factory=dict)  # of the last check; empty if it failed
    _seen: _Positions = attrs.field(init=False, factory=dict)  # the largest that each writer there has stored
    _newest: dict[StreamName, Mapping[InstanceName, Token]] = attrs.field(init=False, factory=dict)  # of this check
    _complete: dict[_Key, Token] = attrs.field(init=False, factory=dict)  # up to where nothing was missing last time
    _states: dict[_Key, object] = attrs.field(init=False, factory=dict)  # of the source, when nothing was missing
    _requested: dict[_Key, Token] = attrs.field(init=False, factory=dict)  # what positions were requested for
    # What was counted as lost, and may be compared again.
    _counted: dict[_Key, Collection[Token]] = attrs.field(init=False, factory=lambda: defaultdict(set))
    _troubles: dict[str, TroubleLog] = attrs.field(  # by stream; the empty name is for all of them
        init=False, factory=lambda: defaultdict(lambda: TroubleLog(Audit.log, LogLevel.warn))
    )

    def start(self) -> None:
        """Check once in each interval, however long a check takes, until the process stops."""
        self._lifetime.watch(Deferred.fromCoroutine(self._run()), "comparing with Synapse's database")

    def all_writers_known(self, follower: StreamFollower) -> bool:
        """Whether the last check has worked, and each writer that it found for a stream has a position here."""
        stored = self._stored.get(follower.name)
        return stored is not None and stored.keys() <= follower.all_positions().keys() and self._former_known(follower)

    def every_writer_known(self) -> bool:
        """Whether the last check has worked, and each writer that it found for any followed stream is known."""
        followed = [each for each in self._followers if each.name in self._stored]
        found = [each for each in self._followers if each.cursors]
        return bool(self._stored) and all(map(self.all_writers_known, followed)) and all(map(self._former_known, found))

    async def check(self) -> None:
        """Compare; if facts are missing, compare again after LOOK_AGAIN seconds, and fetch those still missing."""
        reached = positions_reached(self._audited(), self._former_writers())
        stored = await self._tried("", self._source.stored_positions())
        self._stored = stored or {}
        if stored is not None and self._former is not None:
            await self._former.look(self._audited(), stored)
        if self._checked is not None:
            self._checked()
        if stored is None:
            return
        await self._tried("", self._go_back_if_restored(reached, stored))
        suspects = {}
        for follower in self._audited():
            if found := await self._tried(follower.name, self._look(follower, stored, advance=True)):
                suspects[follower] = found
        if not suspects:
            return
        await self._lifetime.sleep(LOOK_AGAIN)
        stored = await self._tried("", self._source.stored_positions())
        if stored is not None:
            for follower, found in suspects.items():
                await self._tried(follower.name, self._look_again(follower, stored, found))

    # ---- inside

    def _former_known(self, follower: StreamFollower) -> bool:
        return self._former is None or self._former.known(follower)

    def _former_writers(self) -> Mapping[StreamName, Collection[InstanceName]]:
        return {} if self._former is None else self._former.found

    async def _go_back_if_restored(self, reached: Mapping[StreamFollower, Reached], stored: _Positions) -> None:
        """Go back if two looks show that the database has lost facts that were applied before the first look."""
        stored = await self._with_newest(stored)
        found = await find_restored(self._source, reached, stored, self._seen)
        if found and await self._source.is_primary():
            await self._lifetime.sleep(LOOK_AGAIN)
            stored = await self._with_newest(await self._source.stored_positions())
            again = await find_restored(self._source, {each: reached[each] for each in found}, stored, self._seen)
            if again:
                self._seen = {}
                for each in (self._complete, self._requested, self._counted):  # these IDs are allocated again
                    each.clear()
                await go_back(self._source, self._audited(), {follower: found[follower] for follower in again}, stored)
        elif not found:
            await follow_below_wrong(self._source, self._audited(), stored)
        before = self._seen  # removed writers are forgotten: one that comes back may store a lower position
        self._seen = {
            stream: {of: max(token, before.get(stream, {}).get(of, token)) for of, token in positions.items()}
            for stream, positions in stored.items()
        }

    async def _with_newest(self, stored: _Positions) -> _Positions:
        """Return the stored positions, and for ``caches``, which has none, the newest row of each writer."""
        if all(each.name != CACHES for each in self._audited()) or self._source.stores_positions(CACHES):
            return stored
        self._newest = {CACHES: await self._source.newest(CACHES)}
        return {**stored, **self._newest}

    async def _newest_of(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return the newest row of each writer, also one that was read at the beginning of this check, but once."""
        read = self._newest.pop(stream, None)
        return await self._source.newest(stream) if read is None else read

    async def _run(self) -> None:
        clock = self._lifetime.clock
        due = clock.seconds() + self._interval
        await self._lifetime.sleep(self._interval)
        while not self._lifetime.ended:
            await self.check()
            due = max(due + self._interval, clock.seconds() + LOOK_AGAIN)
            await self._lifetime.sleep(due - clock.seconds())

    async def _tried(self, stream: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``; None if it fails, which is logged once."""
        try:
            result = await work
        except ReplicationError as error:
            if not self._lifetime.ended:
                what = stream or "streams"
                self._troubles[stream].report(
                    "cannot compare {what} with {source}: {error}", what=what, source=self._source.name, error=error
                )
            return None
        self._troubles[stream].end()
        return result

    async def _look_again(
        self, follower: StreamFollower, stored: _Positions, found: Mapping[InstanceName, _Look]
    ) -> None:
        """Have what is still missing fetched."""
        again = await self._look(follower, stored, advance=False)
        for writer in found.keys() & again.keys():
            missed = found[writer].missed(again[writer], settled=self._source.stores_positions(follower.name))
            await self._fetch(follower, writer, missed)
            await self._reach(follower, writer, found[writer].reached)

    def _audited(self) -> list[StreamFollower]:
        return [each for each in self._followers if each.audited and self._source.audits(each.name)]

    async def _look(self, follower: StreamFollower, stored: _Positions, *, advance: bool) -> dict[InstanceName, _Look]:
        """Return what is missing of each writer; where nothing is, it need not be compared again after a while."""
        name = follower.name
        suspects: dict[InstanceName, _Look] = {}
        complete: dict[InstanceName, Token] = {}
        positions = stored.get(name, {})
        in_database = positions if self._source.stores_positions(name) else await self._newest_of(name)
        # IDs above last_in_database were rolled back, or are open.  A restored Synapse may give them again.
        last_in_database = max(in_database.values(), default=None)
        for writer, cursor in [*follower.cursors.items()]:
            if not cursor.confirmed:
                continue
            if follower.checked.get(writer, Token(0)) > cursor.position:  # it went back
                follower.checked[writer] = cursor.position
            end = cursor.position if last_in_database is None else last_in_database
            upto = min(cursor.position, positions.get(writer, end))
            reached = in_database.get(writer, Token(0))
            missing: Collection[Token] = ()
            state = self._source.state(name, writer, upto)
            if state is None or state != self._states.get((name, writer)):
                after = follower.checked.get(writer, Token(0))
                if follower.one_writer:
                    after = max(after, begin_of(writer, follower.all_positions(), upto))
                missing = await self._missing(follower, writer, after, upto)
            if missing or (reached > cursor.published and cursor.linked):
                suspects[writer] = _Look(missing, upto, reached)
            if not missing:
                complete[writer] = upto
                self._states[name, writer] = state
        if advance:
            await self._advance(follower, complete)
        return suspects

    async def _missing(
        self, follower: StreamFollower, writer: InstanceName, after: Token, upto: Token
    ) -> Collection[Token]:
        """Return the tokens in a range that the database has, and that were never applied."""
        if after >= upto or follower.known is None:
            return ()
        tokens = await self._source.present(follower.name, writer, after=after, upto=upto)
        return tokens - await follower.known.find(min(tokens), max(tokens)) if tokens else ()

    async def _advance(self, follower: StreamFollower, complete: Mapping[InstanceName, Token]) -> None:
        """Move up what need not be compared again: what was complete at the last check as well.

        A smaller ID may have been open then, so what was complete just now is compared once more.
        """
        before = {writer: follower.checked.get(writer, Token(0)) for writer in complete}
        moved = {}
        for writer, upto in complete.items():
            before_that = self._complete.get((follower.name, writer), Token(0))
            last = min(upto, before_that, self._source.settled(follower.name, writer))
            if last > before[writer]:
                moved[writer] = last
            self._complete[follower.name, writer] = upto
        if not moved or follower.known is None:
            return
        floor, of_writers = Token(0), {writer: before[writer] for writer in moved}
        if follower.known_by_token:  # another writer may send these tokens
            every = follower.all_positions()
            floor = min([*every.values(), *(follower.checked.get(writer, Token(0)) for writer in every)])
            of_writers = {}
        await follower.known.advance_audit(moved, of_writers=of_writers, floor=floor)
        follower.checked.update(moved)

    async def _fetch(self, follower: StreamFollower, writer: InstanceName, missing: Collection[Token]) -> None:
        """Fetch lost facts, and have them applied."""
        facts: list[Fact] = []
        wanted = [*missing][:MAX_FACTS]
        while wanted:
            after = Token(wanted[0] - 1)
            upto = Token(min(wanted[-1], after + PAGE_IDS))
            page = await self._source.facts(follower.name, writer, after=after, upto=upto, limit=PAGE_IDS)
            if page.upto <= after:
                break  # a standby is behind
            facts += [fact for fact in page.facts if fact.token in missing]
            wanted = [token for token in wanted if token > page.upto]
        if facts and follower.cursors[writer].found_late(facts):
            self._found(follower, writer, [fact.token for fact in facts])
            follower.resume()

    async def _reach(self, follower: StreamFollower, writer: InstanceName, reached: Token) -> None:
        """Have facts above the position fetched; where the database does not know up to where, ask for positions."""
        cursor, key = follower.cursors[writer], (follower.name, writer)
        published = cursor.published
        if reached <= published or not cursor.linked:
            return
        if self._source.stores_positions(follower.name):
            lost = await self._missing(follower, writer, published, reached)
            if cursor.settled(reached):
                self._found(follower, writer, sorted(lost))
                follower.resume()
                if lost:  # perhaps all is: after a failover, the subscription may be at another Redis
                    self._request_positions()
        elif reached > self._requested.get(key, Token(0)):
            self._requested[key] = reached
            self._found(follower, writer, sorted(await self._missing(follower, writer, published, reached)))
            self._request_positions()

    def _request_positions(self) -> None:
        for each in self._links:
            each.request_positions()

    def _found(self, follower: StreamFollower, writer: InstanceName, tokens: Collection[Token]) -> None:
        """Count and log facts that were lost, each once: while positions are awaited, they are found again."""
        key = follower.name, writer
        tokens = [each for each in tokens if each not in self._counted[key]]
        if not tokens:
            return
        checked = follower.checked.get(writer, Token(0))
        self._counted[key] = {*tokens, *(each for each in self._counted[key] if each > checked)}
        follower.lost_and_found[writer] += len(tokens)
        more = len(tokens) - MAX_LOGGED
        self.log.warn(
            "{count} facts of {stream} by {writer} did not arrive, and are fetched from {source}: {tokens}",
            count=len(tokens),
            source=self._source.name,
            stream=follower.name,
            writer=writer,
            tokens=", ".join(map(str, tokens[:MAX_LOGGED])) + (f" and {more} more" if more > 0 else ""),
        )
