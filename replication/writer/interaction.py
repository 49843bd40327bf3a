"""An interaction: a plain function of the application that writes a fact, on the thread of the database."""

from __future__ import annotations

from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
from twisted.internet.defer import Deferred

from replication.errors import StreamError
from replication.streams.definitions import CACHES
from replication.streams.facts import Fact, check_size
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from replication.streams.definitions import StreamDefinition
    from replication.streams.interfaces import IReactorCalls, ISqlExecutor, Write
    from replication.writer.publisher import PublishedStream

R = TypeVar("R")


@attrs.define(eq=False, repr=False)
class NewFact:
    """A reserved stream ID, and the fact that a function writes under it (``StreamWriter.run_interaction``).

    ``token`` is the ID, ``texts`` are the rows so far as JSON texts.  The methods are for the function, while it runs.
    ``caches_token`` is the ID of the invalidations in the stream ``caches``, once ``run_interaction`` has returned; 0
    if there are none.
    """

    _definition: StreamDefinition
    token: Token
    _encode_invalidation: Callable[[str, Sequence[object] | None], str]
    texts: list[str] = attrs.field(init=False, factory=list)
    invalidations: list[str] = attrs.field(init=False, factory=list)  # rows of one fact on the caches stream
    caches_token: Token = attrs.field(init=False, default=Token(0))

    @property
    def stream_id(self) -> int:
        """The ID as a table of this stream holds it: negative in a negative stream."""
        return -self.token if self._definition.negative else self.token

    def write(self, row: object) -> None:
        """Add ``row`` to the fact; RowError if it is not JSON, or lacks the declared fields."""
        self.texts.append(self._definition.encode(row))

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> None:
        """Add a fact on the caches stream to this transaction: every process drops an entry of ``cache``.

        ``keys`` are the arguments of the cached call; None drops all entries.  RowError: ``keys`` is a string.
        """
        rows = self.texts if self._definition.name == CACHES else self.invalidations
        rows.append(self._encode_invalidation(cache, keys))


@attrs.define(eq=False)
class AddedFact:
    """A fact that is committed with that of the interaction, and the position of its stream that is stored."""

    stream: PublishedStream
    fact: Fact
    settled: Token


@attrs.define(eq=False)
class Interaction(Generic[R]):
    """Calls ``function``, and keeps its ``result`` and the facts that are ``committed`` with it.

    ``id_`` returns the ID of the fact and the position that is stored with it.  ``add`` is called on the reactor's
    thread if the fact alone is not enough: it checks whether the fact can wait in memory, and returns the one of
    invalidations.
    """

    _stream: PublishedStream
    _function: Callable[[ISqlExecutor, NewFact], R]
    _id: Callable[[], tuple[Token, Token]]
    _encode_invalidation: Callable[[str, Sequence[object] | None], str]
    _add: Callable[[Fact, Sequence[str]], Coroutine[Deferred[Any], Any, AddedFact | None]]
    result: R = attrs.field(init=False)
    committed: dict[PublishedStream, Sequence[Fact]] = attrs.field(init=False, factory=dict)

    def run(self, database: ISqlExecutor, call_reactor: IReactorCalls) -> Sequence[Write]:
        """Call the function, and return what is to be stored; a second call starts over.

        StreamError: the function is a coroutine function or has ``yield``, or returns a Deferred.  RowError: the fact
        is too large.
        """
        token, settled = self._id()
        new = NewFact(self._stream.definition, token, self._encode_invalidation)
        self.result = self._function(database, new)
        if isinstance(self.result, (Deferred, CoroutineType, GeneratorType)):
            if isinstance(self.result, CoroutineType):
                self.result.close()
            why = "it runs on a thread, and can await nothing"
            raise StreamError(f"run_interaction() needs a plain function without `yield`: {why}")
        check_size(new.texts)
        check_size(new.invalidations)
        fact = Fact(token, tuple(new.texts))
        self.committed = {self._stream: [fact]}
        writes = [*self._stream.writes_upto(settled, [fact])]
        if self._stream.definition.name == CACHES:
            new.caches_token = token
        if new.invalidations or self._stream.memory_log is not None:
            added = call_reactor(lambda: self._add(fact, new.invalidations))
            if added is not None:
                self.committed[added.stream] = [added.fact]
                new.caches_token = added.fact.token
                writes += added.stream.writes_upto(added.settled, [added.fact])
        return writes
