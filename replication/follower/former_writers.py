"""Former writers of a Synapse: processes that have written facts, and of which no process sends a position any more.

A Synapse that starts without a process in ``stream_writers`` deletes its row of ``stream_positions``.  Its facts stay,
under its name.  So the database shows that name, and nothing on Redis does (docs/protocol/redis.md, Former writers).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import attrs
from twisted.logger import Logger, LogLevel

from replication.errors import ReplicationError
from replication.logs import TroubleLog
from replication.net.endpoints import is_redis
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.stream import StreamFollower
    from replication.net.links import IWriterLink

LOOK_AGAIN: Final = 1.0  # seconds; a new writer stores its position meanwhile, or sends it

T = TypeVar("T")
_Tokens = dict[InstanceName, Token]
_Connection = tuple["IWriterLink", int]


class IFormerWritersSource(Protocol):
    """The database of the writers (``DatabaseCatchUp``)."""

    name: str  # for messages

    def names_writers(self, stream: StreamName) -> bool:
        """Whether positions of a stream are stored there, and each of its rows has the name of its writer."""

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return the positions of the writers that are stored there."""

    async def last_row(self, stream: StreamName) -> Token:
        """Return the largest token of all writers."""

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> _Tokens:
        """Return the writers with rows in a range, each with its largest token there."""

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        """Note that these writers have ended."""


def _over_redis(links: Iterable[IWriterLink]) -> list[IWriterLink]:
    return [each for each in links if is_redis(each.endpoint)]


@attrs.define
class _Searched:
    """What was searched since the start: rows up to ``upto``, and the writers found, each with its largest token.

    ``noted`` is the ID that ``stream_audits`` has: the next start begins there.
    """

    noted: Token
    upto: Token
    writers: _Tokens


@attrs.define(eq=False, repr=False, kw_only=True)
class FormerWriters:
    """Finds the former writers of each stream, on each connection to Redis and once a writer is removed.

    A former writer gets a position as if that connection had sent it.  So its facts are fetched, and a relay announces
    it.  Its position is raised with those of the others.  Otherwise linear order would wait for it, and applied tokens
    would never be forgotten.

    Args:
        source: the database of the writers.
        links: to the writers, all that there are; those to a Redis are used.
        lifetime: of this process.
        received: is called with a link and POSITIONs, as if the link had received them.

    """

    log = Logger()

    _source: IFormerWritersSource
    _links: Sequence[IWriterLink] = attrs.field(converter=_over_redis)
    _lifetime: Lifetime
    _received: Callable[[IWriterLink, list[Position]], object]
    _looked: dict[StreamName, _Connection] = attrs.field(init=False, factory=dict)  # where it was last searched
    found: dict[StreamName, _Tokens] = attrs.field(init=False, factory=dict)  # with the first position of each
    _searched: dict[StreamName, _Searched] = attrs.field(init=False, factory=dict)  # since the start of this process
    # Those whose position was stored at a look on this connection: without one, they were removed since.
    _had_position: dict[StreamName, set[InstanceName]] = attrs.field(init=False, factory=dict)
    _troubles: dict[str, TroubleLog] = attrs.field(
        init=False, factory=lambda: defaultdict(lambda: TroubleLog(FormerWriters.log, LogLevel.warn))
    )

    def known(self, follower: StreamFollower) -> bool:
        """Whether the former writers of a stream are searched on this connection, and are followed."""
        if not self._concerns(follower):
            return True
        connection, name = self._connection(), follower.name
        found = self.found.get(name, {})
        return connection is not None and self._looked.get(name) == connection and found.keys() <= {*follower.cursors}

    async def look(
        self, followers: Iterable[StreamFollower], stored: Mapping[StreamName, Mapping[InstanceName, Token]]
    ) -> None:
        """Search where that was not done on this connection, or a writer was removed since, and follow what is found.

        ``stored`` are the positions in the database.
        """
        connection = self._connection()
        if connection is None:
            return
        suspects: dict[StreamFollower, _Tokens] = {}
        for follower in [each for each in followers if each.cursors and self._concerns(each)]:
            if connection != self._connection():
                return  # it was lost meanwhile
            name, positions = follower.name, stored.get(follower.name, {})
            if self._looked.get(name) == connection and self._had_position[name] <= positions.keys():
                self._had_position[name].update(positions)
                self._raise_positions(connection, follower, positions)
                await self._tried(name, self._store(follower, self._searched[name]))
            elif (found := await self._tried(name, self._search(connection, follower, positions))) is not None:
                suspects[follower] = found
        if any(suspects.values()):  # a new writer may have sent no position yet, and have stored none
            await self._lifetime.sleep(LOOK_AGAIN)
            again = await self._tried("", self._source.stored_positions())
            if again is None:
                return
            stored = again
        for follower, found in suspects.items():
            if connection == self._connection():
                name, positions = follower.name, stored.get(follower.name, {})
                former = self._former(connection, follower, positions, found)
                before = self._had_position[name] if self._looked.get(name) == connection else set()
                self._had_position[name] = {*positions, *before} - former.keys()
                self._looked[name] = connection
                self._follow(connection, follower, former)

    # ---- inside

    def _concerns(self, follower: StreamFollower) -> bool:
        return follower.audited and self._source.names_writers(follower.name)

    def _connection(self) -> _Connection | None:
        """Return the connection to a Redis that is followed, with its number."""
        return next(((each, each.connections) for each in self._links if each.state == "following"), None)

    async def _search(
        self, connection: _Connection, follower: StreamFollower, stored: Mapping[InstanceName, Token]
    ) -> _Tokens:
        """Return the former writers of a stream, each with the position that it gets.

        Its last row may be above all stored positions.
        """
        name, positions, end = follower.name, follower.all_positions(), max(stored.values(), default=Token(0))
        last = max(end, await self._source.last_row(name))
        if name not in self._searched:
            begin = Token(0) if follower.known is None else await follower.known.searched()
            self._searched[name] = _Searched(begin, begin, {})
        searched = self._searched[name]
        searched.upto, searched.noted = min(searched.upto, last), min(searched.noted, last)  # it may be restored
        searched.writers = {writer: min(token, last) for writer, token in searched.writers.items()}
        if searched.upto < last:
            searched.writers.update(await self._source.writers(name, after=searched.upto, upto=last))
            searched.upto = last
        known = {**dict.fromkeys(positions, Token(0)), **searched.writers}
        found = {writer: max(end, token, positions.get(writer, end)) for writer, token in known.items()}
        former = self._former(connection, follower, stored, found)
        if self._looked.get(name) != connection:
            return former
        may_be_restored = {writer for writer in self._had_position[name] & former.keys() if former[writer] > last}
        return {writer: token for writer, token in former.items() if writer not in may_be_restored}

    def _former(
        self,
        connection: _Connection,
        follower: StreamFollower,
        stored: Mapping[InstanceName, Token],
        found: _Tokens,
    ) -> _Tokens:
        """Return those without a stored position, unless a process that was not removed since has sent one."""
        linked = {writer for writer, cursor in follower.cursors.items() if cursor.linked}
        if self._looked.get(follower.name) == connection:
            linked -= {*self._had_position[follower.name], *self.found[follower.name]}
        return {writer: token for writer, token in found.items() if writer not in stored and writer not in linked}

    def _follow(self, connection: _Connection, follower: StreamFollower, found: _Tokens) -> None:
        name = follower.name
        new = found.keys() - self.found.get(name, {}).keys()
        self.found[name] = found
        if not found:
            return
        if new:
            self.log.info(
                "{stream}: {writers} write no more; their facts are those of {source}",
                stream=name,
                writers=", ".join(sorted(new)),
                source=self._source.name,
            )
        self._source.note_former(name, found)
        self._received(connection[0], [Position(name, writer, token, token) for writer, token in found.items()])

    def _raise_positions(
        self, connection: _Connection, follower: StreamFollower, stored: Mapping[InstanceName, Token]
    ) -> None:
        """Let the positions of former writers follow the others; one that has come back sends its own."""
        name, end = follower.name, max(stored.values(), default=Token(0))
        found = self.found[name] = {each: token for each, token in self.found[name].items() if each not in stored}
        behind = [each for each in found if each in follower.cursors and follower.cursors[each].published < end]
        self._received(connection[0], [Position(name, writer, end, end) for writer in behind])

    async def _store(self, follower: StreamFollower, searched: _Searched) -> None:
        """Store from where the next start searches, once each writer found is applied up to its largest token."""
        applied = all(follower.position(writer) >= token for writer, token in searched.writers.items())
        if searched.noted < searched.upto and applied and follower.known is not None:
            await follower.known.note_searched(searched.upto)
            searched.noted = searched.upto

    async def _tried(self, stream: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``; None if it fails, which is logged once."""
        try:
            result = await work
        except ReplicationError as error:
            if not self._lifetime.ended:
                self._troubles[stream].report(
                    "cannot search former writers of {what} in {source}: {error}",
                    what=stream or "streams",
                    source=self._source.name,
                    error=error,
                )
            return None
        self._troubles[stream].end()
        return result
