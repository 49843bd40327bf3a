"""Functions that remember what they returned, until the caches stream says that it is no longer true.

A row of the stream names a function and the arguments of one call, as strings (``protocol`` C4).  So each call has two
keys here: its arguments as they are, under which the value is kept, and its *wire key*, the same arguments spelt by
``str()``, under which it is invalidated.  ``get(17)`` and ``get("17")`` are two entries; ``["17"]`` drops both.

A computation that is under way is kept in a table of its own, as a flight.  To invalidate a key is to drop its entry
and its flight: the value that the flight brings still goes to whoever waits for it, but a flight that is in no table
can store nothing, and no later call can join it.  That is all there is against stale values; nothing counts versions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, Self, TypeVar, overload

from twisted.internet.defer import Deferred, succeed
from twisted.python.failure import Failure

from replication.errors import ConfigError, RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

Arguments = tuple[Any, ...]
WireKey = tuple[str, ...]

# Two values of these types are equal only if they have one type and one spelling.  True == 1 == 1.0 are none of it.
_PLAIN: Final = frozenset((str, int, type(None)))


class CacheInfo(NamedTuple):
    """What ``cache_info()`` returns, field by field as ``functools.lru_cache`` has it."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class CacheStats(NamedTuple):
    """One cache's figures since the start; a miss is a computation, a hit any call answered without one of its own."""

    hits: int
    misses: int
    size: int
    invalidations: int


class _CarefulKey(tuple[WireKey, tuple[type, ...], Arguments]):
    """The key of a call with an argument that is not plain: equal arguments must also look alike to be one entry."""

    __slots__ = ()


def spell_key(arguments: Iterable[object]) -> WireKey:
    """Return the wire key of a call: each argument's ``str()``; ``True`` is "True" and ``None`` is "None"."""
    return tuple(map(str, arguments))


def _careful_key(arguments: Arguments) -> _CarefulKey:
    return _CarefulKey((spell_key(arguments), tuple(map(type, arguments)), arguments))


def _wire_key(key: Arguments) -> WireKey:
    return key[0] if type(key) is _CarefulKey else spell_key(key)


class _Shape:
    """A function's parameters, and how a call fills them: one tuple, defaults included, in the order of declaration."""

    def __init__(self, name: str, parameters: Sequence[inspect.Parameter]) -> None:
        self._name = name
        self._signature = inspect.Signature(parameters)
        kinds = [each.kind for each in parameters]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            raise ConfigError(f"cache {name!r}: **{parameters[-1].name} has no place in a key; name each parameter")
        positional = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        self.arity = positional if positional == len(kinds) else -1  # so many arguments need no second look
        self._defaults: dict[int, Arguments] = {}  # by the number of arguments given: what fills the rest
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            for given in range(positional, -1, -1):
                rest = tuple(each.default for each in parameters[given:])
                if inspect.Parameter.empty in rest:
                    break
                self._defaults[given] = rest

    def bind(self, args: Arguments, kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call; TypeError if the function could not be called so."""
        if not kwargs and (rest := self._defaults.get(len(args))) is not None:
            return args + rest
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}(): {error}") from None
        bound.apply_defaults()
        return (*bound.args, *bound.kwargs.values())


class _Fired:
    """Stands among the values for a Deferred that fired: each caller gets a Deferred of its own."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _Flight:
    """A computation under way, and the Deferreds that wait for it."""

    __slots__ = ("_memory", "_waiters", "computation", "key", "wire")

    def __init__(self, memory: _Memory, key: Arguments, wire: WireKey) -> None:
        self._memory = memory
        self._waiters: dict[Deferred[Any], None] = {}
        self.key = key
        self.wire = wire
        self.computation: Deferred[Any] | None = None  # None: it runs in some caller's own time, nobody can wait for it

    def share(self, computation: Deferred[Any]) -> Deferred[Any]:
        """Let others join from now on; return the first one's Deferred."""
        self.computation = computation
        waiter = self.join()
        computation.addBoth(self._land)
        return waiter

    def join(self) -> Deferred[Any]:
        """Return one more Deferred that fires when the computation does."""
        waiter: Deferred[Any] = Deferred(self._leave)
        self._waiters[waiter] = None
        return waiter

    def _leave(self, waiter: Deferred[Any]) -> None:
        """Let one waiter be cancelled; the last to leave cancels the computation."""
        self._waiters.pop(waiter, None)
        if not self._waiters and self.computation is not None:
            self._memory.abandon(self)
            self.computation.cancel()

    def _land(self, result: object) -> None:
        """Keep the value, then tell whoever waits: a waiter may call again at once."""
        if isinstance(result, Failure):
            self._memory.abandon(self)
        else:
            self._memory.keep(self, _Fired(result))
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.called:  # a waiter before it may have cancelled it
                waiter.callback(result)


class _Memory:
    """The values of one function, or of one instance's method, least recently used first, and its flights.

    Hits take no lock: each of their steps is one operation of a C dictionary.
    """

    __slots__ = ("_flights", "_lock", "_max_entries", "_spelt", "hits", "misses", "values")

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._lock = threading.RLock()  # re-entrant: a value that is dropped may run code of the application
        self.hits = self.misses = 0
        self._forget_all()

    def _forget_all(self) -> None:
        self.values: OrderedDict[Arguments, Any] = OrderedDict()
        self._spelt: dict[WireKey, list[Arguments]] = {}  # stored keys, but for those of strings: they are their own
        self._flights: dict[WireKey, dict[Arguments, _Flight]] = {}

    def flight(self, key: Arguments) -> _Flight:
        """Return a flight that can be joined, else a new one."""
        wire = _wire_key(key)
        with self._lock:
            flights = self._flights.setdefault(wire, {})
            flight = flights.get(key)
            if flight is not None and flight.computation is not None:
                self.hits += 1
                return flight
            self.misses += 1
            flight = flights[key] = _Flight(self, key, wire)
            return flight

    def abandon(self, flight: _Flight) -> bool:
        """Forget a flight; False if it was invalidated or overtaken before."""
        with self._lock:
            flights = self._flights.get(flight.wire)
            if flights is None or flights.get(flight.key) is not flight:
                return False
            del flights[flight.key]
            if not flights:
                del self._flights[flight.wire]
            return True

    def keep(self, flight: _Flight, value: object) -> None:
        """Store what a flight brought, unless it was invalidated or overtaken before."""
        key, wire = flight.key, flight.wire
        with self._lock:
            if not self.abandon(flight):
                return
            if key not in self.values and key != wire:
                self._spelt.setdefault(wire, []).append(key)
            self.values[key] = value
            if len(self.values) > self._max_entries:
                self._evict()

    def _evict(self) -> None:
        key, _ = self.values.popitem(last=False)
        wire = _wire_key(key)
        if key != wire:
            alike = self._spelt[wire]
            alike.remove(key)
            if not alike:
                del self._spelt[wire]

    def invalidate(self, wire: WireKey) -> None:
        """Drop every entry and flight that is spelt ``wire``."""
        with self._lock:
            self._flights.pop(wire, None)
            self.values.pop(wire, None)
            for key in self._spelt.pop(wire, ()):
                self.values.pop(key, None)

    def clear(self) -> None:
        """Drop every entry and flight."""
        with self._lock:
            self._forget_all()


class _Cache:
    """What is kept under one name: a function's memory, or those of a method's instances."""

    def __init__(self, name: str, max_entries: int, parameters: Sequence[inspect.Parameter]) -> None:
        self.name = name
        self.max_entries = max_entries
        self.shape = _Shape(name, parameters)
        self.method_shape = _Shape(name, parameters[1:])
        self.memory = _Memory(max_entries)
        self.invalidations = 0
        self._instances: dict[int, tuple[weakref.ref[Any], _Memory]] = {}  # by id(): instances need not be hashable
        self._retired_hits = self._retired_misses = 0

    def memory_of(self, instance: object) -> _Memory:
        """Return the memory of one instance; it goes when the instance goes."""
        place = id(instance)
        try:
            return self._instances[place][1]
        except KeyError:
            pass
        try:
            reference = weakref.ref(instance, lambda _: self._retire(place))
        except TypeError as error:
            raise ConfigError(f"cache {self.name!r}: {error}; add '__weakref__' to its __slots__") from error
        return self._instances.setdefault(place, (reference, _Memory(self.max_entries)))[1]

    def _retire(self, place: int) -> None:
        _, memory = self._instances.pop(place)
        self._retired_hits += memory.hits
        self._retired_misses += memory.misses

    def _memories(self) -> list[_Memory]:
        return [self.memory, *(memory for _, memory in list(self._instances.values()))]

    def invalidate(self, wire: WireKey | None, memory: _Memory | None = None) -> None:
        """Drop what is spelt ``wire``, or everything if that is None, from one memory or all."""
        self.invalidations += 1
        for each in self._memories() if memory is None else [memory]:
            if wire is None:
                each.clear()
            else:
                each.invalidate(wire)

    def stats(self, memory: _Memory | None = None) -> CacheStats:
        """Return the figures of one memory or all, those of instances that are gone included."""
        if memory is not None:
            return CacheStats(memory.hits, memory.misses, len(memory.values), self.invalidations)
        memories = self._memories()
        return CacheStats(
            self._retired_hits + sum(each.hits for each in memories),
            self._retired_misses + sum(each.misses for each in memories),
            sum(len(each.values) for each in memories),
            self.invalidations,
        )


class CachedFunction(Generic[P, R]):
    """A function with a memory; what ``Caches.cached`` makes of it, and of a method on its class or on an instance.

    Arguments must be hashable.  Two calls share a value if their arguments are equal, of the same types, and spelt
    alike by ``str()``; defaults and keywords count as if they had been given in the order of declaration.  What the
    function returns is shared, not copied: do not change it.  If it returns a Deferred, calls that come before that has
    fired share the computation, later ones its value, and every caller gets a Deferred of its own; cancelling one
    leaves the others alone, cancelling the last cancels the computation.  No exception or Failure is kept.
    """

    __wrapped__: Callable[P, R]
    __qualname__: str

    def __init__(self, function: Callable[P, R], cache: _Cache) -> None:
        functools.update_wrapper(self, function)
        self._cache = cache
        self._shape = cache.shape
        self._arity = cache.shape.arity
        self._memory: _Memory = cache.memory
        self._instance_memory: _Memory | None = None
        self._of_class = False  # if so, the first argument of a call is the instance, and _arity is -1

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what is remembered of such a call, else call the function and remember."""
        arguments: Arguments = args
        if kwargs or len(args) != self._arity:
            if self._of_class:
                return self._bound(args)(*args[1:], **kwargs)  # type: ignore[no-any-return]
            arguments = self._shape.bind(args, kwargs)
        for each in arguments:
            if type(each) not in _PLAIN:
                key: Arguments = _careful_key(arguments)
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
        """Return the method as seen on its class, or with an instance's own memory."""
        view = object.__new__(type(self))
        view.__dict__ = self.__dict__.copy()
        view._of_class = instance is None
        if instance is None:
            view._arity = -1
        else:
            view.__wrapped__ = types.MethodType(self.__wrapped__, instance)
            view._shape = self._cache.method_shape
            view._arity = view._shape.arity
            view._memory = view._instance_memory = self._cache.memory_of(instance)
        return view

    def __reduce__(self) -> str:
        """Copy and pickle as a function does: by its name."""
        return self.__qualname__

    def _bound(self, args: Arguments) -> CachedFunction[..., Any]:
        if not args:
            raise TypeError(f"{self._cache.name}() is a method: its instance comes first")
        return self.__get__(args[0])

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Forget, in this process, the calls with the same wire key as this one."""
        if self._of_class:
            self._bound(args).invalidate(*args[1:], **kwargs)
        else:
            self._cache.invalidate(spell_key(self._shape.bind(args, kwargs)), self._instance_memory)

    def clear(self) -> None:
        """Forget every call, in this process; for a method on its class, those of all instances."""
        self._cache.invalidate(None, self._instance_memory)

    def cache_info(self) -> CacheInfo:
        """Return figures like ``lru_cache``'s; for a method on its class, the sums over all instances."""
        stats = self._cache.stats(self._instance_memory)
        return CacheInfo(stats.hits, stats.misses, self._cache.max_entries, stats.size)


class CachedCoroutineFunction(CachedFunction[P, Coroutine[Any, Any, T]], Generic[P, T]):
    """A :class:`CachedFunction` made of an ``async def`` that awaits Deferreds: it returns coroutines, too."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what is remembered of such a call, else wait for the computation."""
        return await super().__call__(*args, **kwargs)


class Caches:
    """The caches of one process, by the names that the caches stream knows them by."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._fans: dict[str, tuple[str, ...]] = {}

    def __len__(self) -> int:
        """How many caches there are."""
        return len(self._caches)

    def cached(
        self, *, max_entries: int = 10_000, name: str | None = None
    ) -> Callable[[Callable[P, R]], CachedFunction[P, R]]:
        """Return a decorator that makes a function or method remember its latest ``max_entries`` different calls.

        ``name`` is what the caches stream calls it, by default the function's own.  A method has so many entries per
        instance, none of which keeps the instance alive, unless a value refers to it; ``self`` is in no key.  Put it
        below ``@staticmethod``.  Plain functions may be called from any thread, coroutine functions and those that
        return Deferreds from the reactor's.  ConfigError if the name is taken, or if calls have no wire key.
        """
        if max_entries < 1:
            raise ConfigError(f"a cache needs room for at least 1 entry, not {max_entries}")

        def decorate(function: Callable[P, R]) -> CachedFunction[P, R]:
            known_as = name or getattr(function, "__name__", None)
            if known_as is None:
                raise ConfigError(f"{function!r} has no name of its own: say cached(name=…)")
            if known_as in self._caches:
                raise ConfigError(f"there is a cache {known_as!r} already: say cached(name=…)")
            parameters = list(inspect.signature(function).parameters.values())
            if parameters and parameters[0].name == "cls":
                raise ConfigError(f"cache {known_as!r}: class methods cannot be cached; use a static one or a function")
            cache = self._caches[known_as] = _Cache(known_as, max_entries, parameters)
            make: Any = CachedCoroutineFunction if inspect.iscoroutinefunction(function) else CachedFunction
            return make(function, cache)  # type: ignore[no-any-return]

        return decorate

    def fan_out(self, special: str, *names: str) -> None:
        """Let one fact about ``special`` invalidate the caches of these names as well, with the same keys.

        They need not be there yet.  ConfigError if one of them fans out itself: facts go one step far.
        """
        chained = {*self._fans, special} & {*names, *itertools.chain(*self._fans.values())}
        if chained:
            raise ConfigError(
                f"{', '.join(sorted(chained))} fans out to caches itself: fan_out() takes names of caches"
            )
        self._fans[special] = (*self._fans.get(special, ()), *names)

    def clear(self) -> None:
        """Forget everything: nobody knows what has become untrue."""
        for cache in self._caches.values():
            cache.invalidate(None)

    def apply(self, rows: Sequence[Any]) -> None:
        """Invalidate what rows of the caches stream name: ``[function, [key, …] | null, time in ms, …]``.

        Call it before the position moves past the rows.  Names that nobody has here are ignored.  If a row is
        malformed, the others are applied all the same, then RowError shows it.
        """
        malformed: list[object] = []
        for row in rows:
            match row:
                case [str(name), None, int(), *_]:
                    self._invalidate(name, None)
                case [str(name), [*keys], int(), *_] if all(isinstance(key, str) for key in keys):
                    self._invalidate(name, tuple(keys))
                case _:
                    malformed.append(row)
        if malformed:
            shown = repr(malformed[0])[:200]
            raise RowError(f"not a row of the caches stream: {shown}; that is [function, [key, …] or null, time in ms]")

    def _invalidate(self, name: str, wire: WireKey | None) -> None:
        for each in (name, *self._fans.get(name, ())):
            cache = self._caches.get(each)
            if cache is not None:
                cache.invalidate(wire)

    def stats(self) -> Mapping[str, CacheStats]:
        """Return every cache's figures by name; counters never go back, whatever becomes of instances."""
        return {name: cache.stats() for name, cache in self._caches.items()}
