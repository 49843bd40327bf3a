"""Functions whose results are cached until the stream ``caches`` invalidates them (docs/protocol/streams.md C4).

A row of the stream names a function and the arguments of one call, as strings.  So each call has two keys here.  The
value is stored under the arguments themselves.  It is invalidated under the *wire key*: the ``str()`` of each argument.
``get(17)`` and ``get("17")`` are two entries, and ``["17"]`` invalidates both.  A row with fewer keys than the function
has arguments is a *prefix*: it invalidates every call that begins with them.

A computation in progress is a *flight*, in a table of its own.  To invalidate a key removes its entry and its flight.
The result of a removed flight still goes to its callers, but it is not stored, and no later call joins the flight.
A row may name several caches, and they are invalidated one after the other.  A function that is computed between them
may call another one whose entry is still there.  So a flight that begins meanwhile is not in the table: its result is
not stored.  That prevents stale values; there are no version numbers.

The module has more than 500 lines because entries, flights and keys are one algorithm.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, Self, TypeVar, overload

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure

from replication.errors import ConfigError, RowError
from replication.streams.access_tokens import hide_in_row
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

Arguments = tuple[Any, ...]
WireKey = tuple[str, ...]
KeysOf = Callable[[Sequence[str]], Iterable[Sequence[str]] | None]

# Two equal values of these types have one type and one str().  That is not so for True == 1 == 1.0.
_PLAIN: Final = frozenset((str, int, type(None)))


class CacheInfo(NamedTuple):
    """The counts of a cache, with the fields of ``functools.lru_cache``.

    A miss is a call that computes; every other call is a hit.
    """

    hits: int
    misses: int
    maxsize: int
    currsize: int


class _CarefulKey(tuple[WireKey, tuple[type, ...], Arguments]):
    """The key of a call with an argument that is not plain: it has the wire key and the types too."""

    __slots__ = ()


def encode_key(arguments: Iterable[object]) -> WireKey:
    """Return the wire key of a call: the ``str()`` of each argument; that of None is "None"."""
    return tuple(map(str, arguments))


def _calls_of(found: Iterable[Sequence[str]] | None) -> Sequence[WireKey | None]:
    """Return the wire keys that a function of ``invalidated_by`` has returned."""
    if found is None:
        return (None,)
    calls = [*found]
    if any(isinstance(each, str) for each in calls):
        raise TypeError("it returns one sequence of arguments for each call")
    return [encode_key(each) for each in calls]


def _wire_key(key: Arguments) -> WireKey:
    return key[0] if type(key) is _CarefulKey else encode_key(key)


class _Signature:
    """A function's parameters; ``bind`` makes one tuple of a call's arguments and the defaults, in declared order."""

    def __init__(self, name: str, parameters: Sequence[inspect.Parameter]) -> None:
        self._name = name
        self._signature = inspect.Signature(parameters)
        kinds = [each.kind for each in parameters]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            raise ConfigError(f"cache {name!r}: **{parameters[-1].name} cannot be part of a key; name each parameter")
        positional = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        # Calls with this number of positional arguments need no binding.
        self.arity = positional if positional == len(kinds) else -1
        # How many keys a wire key has; None: any number.
        self.keys = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds)
        self._defaults: dict[int, Arguments] = {}  # the defaults to add, by the number of arguments given
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            for given in range(positional, -1, -1):
                rest = tuple(each.default for each in parameters[given:])
                if inspect.Parameter.empty in rest:
                    break
                self._defaults[given] = rest

    def bind(self, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call with the defaults; TypeError if the function does not accept the call."""
        if not kwargs and (rest := self._defaults.get(len(args))) is not None:
            return args + rest
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}(): {error}") from None
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())


class _Invalidating:
    """Context manager of an invalidation; ``now`` while there is one, in any thread."""

    def __init__(self) -> None:
        self.now = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


@attrs.define(eq=False)
class _Fired:
    """The stored result of a Deferred: each caller gets a new Deferred with it."""

    value: object


@attrs.define(eq=False)
class _Flight:
    """A computation in progress, and the Deferreds of its callers."""

    _memory: _Memory
    key: Arguments
    wire: WireKey
    _waiters: dict[Deferred[Any], None] = attrs.field(init=False, factory=dict)
    # None: a plain function computes in its caller's thread, and others cannot join.
    computation: Deferred[Any] | None = attrs.field(init=False, default=None)

    def share(self, computation: Deferred[Any]) -> Deferred[Any]:
        """Let other calls join from now on; return the first caller's Deferred."""
        self.computation = computation
        waiter = self.join()
        computation.addBoth(self._land)
        return waiter

    def join(self) -> Deferred[Any]:
        """Return a new Deferred that fires with the result."""
        waiter: Deferred[Any] = Deferred(self._leave)
        self._waiters[waiter] = None
        return waiter

    def _leave(self, waiter: Deferred[Any]) -> None:
        """Remove a cancelled Deferred; without any left, cancel the computation."""
        self._waiters.pop(waiter, None)
        if not self._waiters and self.computation is not None:
            self._memory.abandon(self)
            self.computation.cancel()

    def _land(self, result: object) -> None:
        """Store the value, then fire the Deferreds: their callbacks may call the function again."""
        if isinstance(result, Failure):
            self._memory.abandon(self)
        else:
            self._memory.keep(self, _Fired(result))
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.called:  # a callback before it may have cancelled it
                waiter.callback(result)


@attrs.define(eq=False)
class _Memory:
    """The values and flights of one function, or of a method of one instance; the least recently used value is first.

    A hit takes no lock, because each of its steps is one operation of a C dictionary.
    """

    _max_entries: int
    _keys: int | None  # of each wire key; None: any number
    _invalidating: _Invalidating
    # Re-entrant: the application's code may run when a value is removed.
    _lock: threading.RLock = attrs.field(init=False, factory=threading.RLock)
    hits: int = attrs.field(init=False, default=0)
    misses: int = attrs.field(init=False, default=0)
    values: OrderedDict[Arguments, Any] = attrs.field(init=False, factory=OrderedDict)
    # Stored keys by wire key, without those that equal it; if wire keys have several parts, by the first part as well.
    _index: dict[WireKey, dict[Arguments, None]] = attrs.field(init=False, factory=dict)
    _flights: dict[WireKey, dict[Arguments, _Flight]] = attrs.field(init=False, factory=dict)

    def flight(self, key: Arguments) -> _Flight:
        """Return a flight that can be joined, or a new one."""
        wire = _wire_key(key)
        with self._lock:
            if self._invalidating.now:
                self.misses += 1
                return _Flight(self, key, wire)
            flights = self._flights.setdefault(wire, {})
            flight = flights.get(key)
            if flight is not None and flight.computation is not None:
                self.hits += 1
                return flight
            self.misses += 1
            flight = flights[key] = _Flight(self, key, wire)
            return flight

    def abandon(self, flight: _Flight) -> bool:
        """Remove a flight; return False if it was invalidated or replaced before."""
        with self._lock:
            flights = self._flights.get(flight.wire)
            if flights is None or flights.get(flight.key) is not flight:
                return False
            del flights[flight.key]
            if not flights:
                del self._flights[flight.wire]
            return True

    def keep(self, flight: _Flight, value: object) -> None:
        """Store the value of a flight, unless the flight was invalidated or replaced before."""
        key, wire = flight.key, flight.wire
        with self._lock:
            if not self.abandon(flight):
                return
            if key not in self.values:
                for each in self._index_keys(key, wire):
                    self._index.setdefault(each, {})[key] = None
            self.values[key] = value
            if len(self.values) > self._max_entries:
                key, _ = self.values.popitem(last=False)
                self._remove_from_index(key)

    def invalidate(self, wire: WireKey) -> None:
        """Remove every entry and flight with the wire key ``wire``, or that begin with it if it is shorter.

        Keys beyond the last argument are of another function, which has more: they do not count.
        """
        with self._lock:
            wire = wire[: self._keys]
            size = len(wire)
            if self._keys is None or size == self._keys:
                self._flights.pop(wire, None)
                found = [wire, *self._index.get(wire, ())]
            elif size:
                for each in [each for each in self._flights if each[:size] == wire]:
                    del self._flights[each]
                found = [each for each in self._index.get(wire[:1], ()) if _wire_key(each)[:size] == wire]
            else:
                self.clear()
                return
            for key in found:
                if key in self.values:
                    self._remove_from_index(key)
                    del self.values[key]

    def _remove_from_index(self, key: Arguments) -> None:
        for each in self._index_keys(key, _wire_key(key)):
            alike = self._index[each]
            del alike[key]
            if not alike:
                del self._index[each]

    def _index_keys(self, key: Arguments, wire: WireKey) -> list[WireKey]:
        """Return the keys of the index under which an entry is found."""
        return [*((wire,) if key != wire else ()), *((wire[:1],) if self._keys is not None and self._keys > 1 else ())]

    def clear(self) -> None:
        """Remove every entry and flight."""
        with self._lock:
            self.values, self._index, self._flights = OrderedDict(), {}, {}


class _Cache:
    """One name of the stream ``caches``: the memory of a function, or those of a method's instances."""

    def __init__(
        self, name: str, max_entries: int, parameters: Sequence[inspect.Parameter], invalidating: _Invalidating
    ) -> None:
        self.name = name
        self.max_entries = max_entries
        self.signature = _Signature(name, parameters)
        self.method_signature = _Signature(name, parameters[1:])
        self._invalidating = invalidating
        self.memory = _Memory(max_entries, self.signature.keys, invalidating)
        self.invalidations = 0
        self._instances: dict[int, tuple[weakref.ref[Any], _Memory]] = {}  # by id(): instances need not be hashable

    def memory_of(self, instance: object) -> _Memory:
        """Return the memory of one instance; it is removed with the instance."""
        place = id(instance)
        known = self._instances.get(place)
        if known is not None:
            return known[1]
        try:
            reference = weakref.ref(instance, lambda _: self._retire(place))
        except TypeError as error:
            raise ConfigError(f"cache {self.name!r}: {error}; add '__weakref__' to its __slots__") from error
        memory = _Memory(self.max_entries, self.method_signature.keys, self._invalidating)
        return self._instances.setdefault(place, (reference, memory))[1]

    def _retire(self, place: int) -> None:
        _, memory = self._instances.pop(place)
        self.memory.hits += memory.hits  # a method has no other use for it
        self.memory.misses += memory.misses

    def _memories(self, memory: _Memory | None) -> list[_Memory]:
        """Return one memory, or all if it is None."""
        return [self.memory, *(each for _, each in list(self._instances.values()))] if memory is None else [memory]

    def invalidate(self, wire: WireKey | None, memory: _Memory | None = None) -> None:
        """Remove the wire key ``wire``, or everything if it is None, from one memory or from all."""
        self.invalidations += 1
        with self._invalidating:
            for each in self._memories(memory):
                if wire is None:
                    each.clear()
                else:
                    each.invalidate(wire)

    def info(self, memory: _Memory | None = None) -> CacheInfo:
        """Return the counts of one memory, or of all, including those of instances that no longer exist."""
        memories = self._memories(memory)
        hits, misses = sum(each.hits for each in memories), sum(each.misses for each in memories)
        return CacheInfo(hits, misses, self.max_entries, sum(len(each.values) for each in memories))


class CachedFunction(Generic[P, R]):
    """A function or method with a cache, as ``Caches.cached`` returns it.

    Arguments must be hashable.  Two calls share a value if their arguments are equal, and have the same types and the
    same ``str()``.  Defaults and keyword arguments count as positional ones.  A value is shared, not copied: do not
    change it.  Exceptions and Failures are not stored.

    If the function returns a Deferred, calls before it fires share the computation, and later calls share the value.
    Each caller gets a Deferred of its own.  To cancel one does not affect the others; to cancel the last one cancels
    the computation.
    """

    __wrapped__: Callable[P, R]
    __qualname__: str

    def __init__(self, function: Callable[P, R], cache: _Cache) -> None:
        functools.update_wrapper(self, function)
        self._cache = cache
        self._signature = cache.signature
        self._arity = cache.signature.arity
        self._memory: _Memory = cache.memory
        self._instance_memory: _Memory | None = None
        self._of_class = False  # if so, the first argument of a call is the instance, and _arity is -1

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the cached value of this call; if there is none, call the function and store its result."""
        arguments: Arguments = args
        if kwargs or len(args) != self._arity:
            if self._of_class:
                return self._bound(args)(*args[1:], **kwargs)  # type: ignore[no-any-return]
            arguments = self._signature.bind(args, kwargs)
        for each in arguments:
            if type(each) not in _PLAIN:
                key: Arguments = _CarefulKey((encode_key(arguments), tuple(map(type, arguments)), arguments))
                break
        else:
            key = arguments
        memory = self._memory
        try:
            value = memory.values[key]
            memory.values.move_to_end(key)
        except KeyError:
            pass
        else:
            memory.hits += 1
            return succeed(value.value) if type(value) is _Fired else value  # type: ignore[return-value]
        return self._compute(key, args, kwargs)  # type: ignore[no-any-return]

    def _compute(self, key: Arguments, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        flight = self._memory.flight(key)
        if flight.computation is not None:
            return flight.join()
        try:
            result: object = self.__wrapped__(*args, **kwargs)
        except BaseException:
            self._memory.abandon(flight)
            raise
        if inspect.iscoroutine(result):
            result = Deferred.fromCoroutine(result)
        if isinstance(result, Deferred):
            return flight.share(result)
        self._memory.keep(flight, result)
        return result

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(
        self: CachedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
    ) -> CachedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method on its class, or on an instance, with that instance's memory."""
        view = object.__new__(type(self))
        view.__dict__ = self.__dict__.copy()
        view._of_class = instance is None
        if instance is None:
            view._arity = -1
        else:
            view.__wrapped__ = types.MethodType(self.__wrapped__, instance)
            view._signature = self._cache.method_signature
            view._arity = view._signature.arity
            view._memory = view._instance_memory = self._cache.memory_of(instance)
        return view

    def __reduce__(self) -> str:
        """Copy and pickle by name, as functions do."""
        return self.__qualname__

    def _bound(self, args: Arguments) -> CachedFunction[..., Any]:
        if not args:
            raise TypeError(f"{self._cache.name}() is a method: give its instance as the first argument")
        return self.__get__(args[0])

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Remove, in this process, the entries with the wire key of this call."""
        if self._of_class:
            self._bound(args).invalidate(*args[1:], **kwargs)
        else:
            self._cache.invalidate(encode_key(self._signature.bind(args, kwargs)), self._instance_memory)

    def clear(self) -> None:
        """Remove, in this process, every entry; for a method on its class, those of all instances."""
        self._cache.invalidate(None, self._instance_memory)

    def cache_info(self) -> CacheInfo:
        """Return the counts as ``lru_cache`` does; for a method on its class, the sums over all instances."""
        return self._cache.info(self._instance_memory)


class CachedCoroutineFunction(CachedFunction[P, Coroutine[Any, Any, T]], Generic[P, T]):
    """A :class:`CachedFunction` of an ``async def`` that awaits Deferreds; its calls return coroutines."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the cached value of this call, or await the computation."""
        return await super().__call__(*args, **kwargs)


class Caches:
    """The caches of one process, by their names in the stream ``caches``."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._invalidating = _Invalidating()
        self._fans: dict[str, tuple[tuple[str, KeysOf | None], ...]] = {}

    def __len__(self) -> int:
        """Return the number of caches."""
        return len(self._caches)

    def cached(
        self, *, max_entries: int = 10_000, name: str | None = None, invalidated_by: Mapping[str, KeysOf] | None = None
    ) -> Callable[[Callable[P, R]], CachedFunction[P, R]]:
        """Return a decorator that caches the results of a function or method.

        Args:
            max_entries: the largest number of entries; for a method, of each instance.  The least recently used entry
                is removed first.
            name: the name in the stream ``caches``; by default the function's own.
            invalidated_by: other names in the stream whose rows invalidate this cache too, each with a function.  It
                returns the arguments of each call to invalidate, from the keys of the row; None: all calls.  If it
                raises an exception, all calls are invalidated, and that is logged.

        Write it below ``@staticmethod``.  For a method, ``self`` is not part of the key, and the cache does not keep
        the instance alive.  Plain functions may be called from any thread; coroutine functions, and functions that
        return Deferreds, only from the reactor's thread.

        ConfigError if the name is used already, or if calls of the function have no wire key.

        """
        if max_entries < 1:
            raise ConfigError(f"a cache needs room for at least 1 entry, not {max_entries}")

        def decorate(function: Callable[P, R]) -> CachedFunction[P, R]:
            known_as = name or getattr(function, "__name__", None)
            if known_as is None:
                raise ConfigError(f"{function!r} has no name of its own: write cached(name=…)")
            if known_as in self._caches:
                raise ConfigError(f"there is a cache {known_as!r} already: write cached(name=…)")
            parameters = list(inspect.signature(function).parameters.values())
            if parameters and parameters[0].name == "cls":
                raise ConfigError(f"cache {known_as!r}: class methods cannot be cached; use a static one or a function")
            cache = _Cache(known_as, max_entries, parameters, self._invalidating)
            for special, keys in (invalidated_by or {}).items():
                self._fan_out(special, [known_as], keys)
            self._caches[known_as] = cache
            make: Any = CachedCoroutineFunction if inspect.iscoroutinefunction(function) else CachedFunction
            return make(function, cache)  # type: ignore[no-any-return]

        return decorate

    def fan_out(self, special: str, *caches: str | CachedFunction[Any, Any]) -> None:
        """Make each row with the function ``special`` invalidate ``caches`` too, with the same keys.

        Each is a cached function, or the name of a cache, which may be made later.  ConfigError if one fans out itself,
        or is neither.
        """
        names = [each._cache.name if isinstance(each, CachedFunction) else each for each in caches]  # noqa: SLF001
        for each in (special, *names):
            if not isinstance(each, str):
                raise ConfigError(
                    f"fan_out() takes a name, then cached functions or names of caches one by one, not a "
                    f"{type(each).__name__}: write fan_out('order_changed', get_order, get_total)"
                )
        self._fan_out(special, names, None)

    def _fan_out(self, special: str, names: Sequence[str], keys: KeysOf | None) -> None:
        reached = {name for fan in self._fans.values() for name, _ in fan}
        chained = {*self._fans, special} & {*names, *reached}
        if chained:
            raise ConfigError(
                f"{', '.join(sorted(chained))} fans out to caches itself: fan_out() takes names of caches"
            )
        self._fans[special] = (*self._fans.get(special, ()), *((name, keys) for name in names))

    def clear(self) -> None:
        """Remove every entry of every cache: rows of the stream were lost, so any value may be stale."""
        with self._invalidating:
            for cache in self._caches.values():
                cache.invalidate(None)

    def apply(self, rows: Sequence[Any]) -> None:
        """Apply rows of the stream ``caches``: ``[function, [key, …] or null, time in ms, …]``.

        Call it before the position moves past the rows (docs/protocol/traps.md 30).  Unknown functions are ignored.
        RowError is raised after all other rows: a row is malformed, or a function of ``invalidated_by`` has failed.
        """
        with self._invalidating:
            errors = self._apply(rows)
        if errors:
            raise RowError(errors[0])

    def _apply(self, rows: Sequence[Any]) -> list[str]:
        """Apply rows; return the errors."""
        errors: list[str] = []
        for row in rows:
            match row:
                case [str(name), None, int(), *_]:
                    errors += self._invalidate(name, None)
                case [str(name), [*keys], int(), *_] if all(isinstance(key, str) for key in keys):
                    errors += self._invalidate(name, tuple(keys))
                case _:
                    shown = hide_in_row(grammar.encode_row(row))[:200]
                    errors.append(
                        f"not a row of the caches stream: {shown}; a row is [function, [key, …] or null, time in ms]"
                    )
        return errors

    def _invalidate(self, name: str, wire: WireKey | None) -> Iterable[str]:
        """Invalidate a cache, and those that a special name fans out to; return the errors of functions."""
        errors = []
        for each, keys in ((name, None), *self._fans.get(name, ())):
            cache = self._caches.get(each)
            if cache is None:
                continue
            calls: Iterable[WireKey | None] = (wire,)
            if keys is not None and wire is not None:
                try:
                    calls = _calls_of(keys(wire))
                except Exception as error:  # noqa: BLE001 (the application's function)
                    calls = (None,)
                    errors.append(
                        f"all of {each} is invalidated: its function for {name} raised {type(error).__name__}"
                    )
            for call in calls:
                cache.invalidate(call)
        return errors

    def stats(self) -> Mapping[str, tuple[CacheInfo, int]]:
        """Return the counts and the number of invalidations of every cache; only sizes ever decrease."""
        return {name: (cache.info(), cache.invalidations) for name, cache in self._caches.items()}
