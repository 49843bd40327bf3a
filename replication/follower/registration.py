"""The functions that an application registers for streams, before its worker starts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final, TypeVar

import attrs

from replication.deferreds import NO_GENERATOR
from replication.errors import ConfigError, StreamError, decorator_error
from replication.follower.application import FailedFactFunction
from replication.follower.failures import DEFAULT_ATTEMPTS
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.follower.streams import FollowedStreams
    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact
    from replication.streams.skips import FailedFact
    from replication.wire.grammar import InstanceName, StreamName, Token

ADD_STREAM: Final = "add it to streams, or to a daemon's key stream (option --stream)"

ApplyFunction = TypeVar("ApplyFunction", bound="Callable[[list[Fact], ApplyTransaction], object]")
ResetFunction = TypeVar("ResetFunction", bound="Callable[[InstanceName, Token, ApplyTransaction], object]")
DecideFunction = TypeVar("DecideFunction", bound="Callable[[FailedFact, ApplyTransaction], object]")


@attrs.define(eq=False, repr=False, kw_only=True)
class StreamFunctions:
    """The functions of an application, by stream.

    Args:
        names: of the streams that are followed; None means all.
        described: the definitions of streams that other programs write, by name.

    """

    _names: Sequence[StreamName] | None
    _described: Mapping[StreamName, StreamDefinition]
    apply: dict[StreamName, Callable[..., object]] = attrs.field(init=False, factory=dict)
    linear: set[StreamName] = attrs.field(init=False, factory=set)  # whose facts are applied in one order
    undo: dict[StreamName, Callable[..., object]] = attrs.field(init=False, factory=dict)  # of on_reset
    on_failed: dict[StreamName, FailedFactFunction] = attrs.field(init=False, factory=dict)

    def add(self, stream: StreamName, function: Callable[..., object], *, linear: bool) -> None:
        """Add the function that applies a stream's facts; ConfigError if that cannot be."""
        if self._names is not None and stream not in self._names:
            raise ConfigError(f"on({stream!r}): it is not among the streams to follow; {ADD_STREAM}")
        if self.apply.setdefault(stream, function) is not function:
            raise ConfigError(f"stream {stream!r} has a function already")
        if linear and stream in self._described and self._described[stream].known_by_token:
            raise ConfigError(f"on({stream!r}, linear=True): its writers send each other's facts, so there is no order")
        if linear:
            self.linear.add(stream)

    def check(self) -> None:
        """Raise ConfigError if ``on_reset`` or ``on_failed_fact`` names a stream without ``on``."""
        for decorator, registered in (("on_reset", self.undo.keys()), ("on_failed_fact", self.on_failed.keys())):
            for name in registered - self.apply.keys():
                raise ConfigError(f"{decorator}({name!r}): no function is registered with on({name!r})")


class RegistersFunctions:
    """The decorators of a ``Worker`` that register functions for a stream."""

    _followed: FollowedStreams
    _start: object

    def on(self, stream: str, *, linear: bool = False) -> Callable[[ApplyFunction], ApplyFunction]:
        """Register a function that applies a stream's facts: ``function(facts, transaction)``.

        ``facts`` are a list of ``Fact`` of one writer, ascending.  ``transaction`` is an ``ApplyTransaction``; it also
        stores the position.  The function may be plain, ``async`` or return a Deferred.  It receives 100 facts at
        first, and then as many as it takes in about a second, at most 10,000 rows.  If it raises, its transaction is
        rolled back, and it is called again with fewer of the facts, down to one.  Other streams go on.

        With ``linear``, the facts of all writers come in one order, that of their tokens, and ``transaction.writer_of``
        returns the writer of each.  All facts then wait for the slowest writer (docs/protocol/ids.md F1).

        ConfigError: the stream is not followed, or has a function; or ``function`` does not take the two arguments.
        StreamError: the worker has started.
        """
        if not isinstance(stream, str):
            raise decorator_error("on() takes the name of a stream", "@worker.on('orders')", stream)
        name = grammar.stream_name(stream)

        def register(function: ApplyFunction) -> ApplyFunction:
            if self._start is not None:
                raise StreamError(f"on({stream!r}): register functions before start()")
            _check_call("on", stream, function, "facts, txn")
            self._followed.functions.add(name, function, linear=linear)
            return function

        return register

    def on_reset(self, stream: str) -> Callable[[ResetFunction], ResetFunction]:
        """Register a function that undoes what a stream's function has applied: ``undo(writer, to, transaction)``.

        It is called when the writer's database was restored: the facts of ``writer`` above the ID ``to`` are lost.
        ``transaction`` is an ``ApplyTransaction``; it also lowers the position.  The function may be plain, ``async``
        or return a Deferred.  Without it the stream stops then, unless the worker has ``accept_new_history``.

        ConfigError: ``undo`` does not take the three arguments; or, by ``start``: ``on`` has registered no function.
        StreamError: the worker has started.
        """
        if not isinstance(stream, str):
            raise decorator_error("on_reset() takes the name of a stream", "@worker.on_reset('orders')", stream)

        def register(undo: ResetFunction) -> ResetFunction:
            if self._start is not None:
                raise StreamError(f"on_reset({stream!r}): register functions before start()")
            _check_call("on_reset", stream, undo, "writer, to, txn")
            self._followed.functions.undo[grammar.stream_name(stream)] = undo
            return undo

        return register

    def on_failed_fact(
        self, stream: str, *, attempts: int = DEFAULT_ATTEMPTS
    ) -> Callable[[DecideFunction], DecideFunction]:
        """Register a function that decides about a fact that a stream's function cannot take: ``decide(failed, txn)``.

        It is called after the stream's function received only this fact and raised, ``attempts`` times in a row.
        ``failed`` is a ``FailedFact``: its fact, the exception and the number of attempts.  ``txn`` is an
        ``ApplyTransaction``.  The function returns ``FailedFactAction.SKIP`` or ``FailedFactAction.STOP``; it may be
        plain, ``async`` or return a Deferred.

        With SKIP, its transaction is committed with the position, and ``replication skipped`` lists the fact
        (docs/operations.md).  With STOP, or if it raises, its transaction is rolled back, the stream stays stopped, and
        it is called after each further attempt.

        ConfigError: ``attempts`` is less than 1, or ``decide`` does not take the two arguments; or, by ``start``:
        ``on`` has registered no function.  StreamError: the worker has started.
        """
        if not isinstance(stream, str):
            raise decorator_error(
                "on_failed_fact() takes the name of a stream", "@worker.on_failed_fact('orders')", stream
            )
        if attempts < 1:
            raise ConfigError(f"on_failed_fact({stream!r}): attempts is {attempts}, and must be 1 or more")

        def register(decide: DecideFunction) -> DecideFunction:
            if self._start is not None:
                raise StreamError(f"on_failed_fact({stream!r}): register functions before start()")
            _check_call("on_failed_fact", stream, decide, "failed, txn")
            self._followed.functions.on_failed[grammar.stream_name(stream)] = FailedFactFunction(decide, attempts)
            return decide

        return register


def _check_call(decorator: str, stream: str, function: Callable[..., object], arguments: str) -> None:
    """Raise ConfigError if a function cannot be called with these arguments, or does nothing when it is called.

    One without a signature passes.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"{decorator}({stream!r}): {name}() has `yield`, so a call does nothing: {NO_GENERATOR}")
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except ValueError:
        return
    except TypeError as error:
        call = f"{getattr(function, '__name__', repr(function))}({arguments})"
        raise ConfigError(f"{decorator}({stream!r}) calls {call}, which does not take these: {error}") from error
