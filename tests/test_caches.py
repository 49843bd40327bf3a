"""Caches: hits, evictions, invalidations, and that no stale value is ever stored."""

from __future__ import annotations

import copy
import enum
import functools
import gc
import inspect
import json
import pickle
import random
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from twisted.internet.defer import CancelledError, Deferred, ensureDeferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from replication.caches import Caches, encode_key
from replication.errors import ConfigError, RowError, StreamError
from replication.wire.grammar import encode_row

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

NOW = 1_700_000_000_000


class Color(enum.StrEnum):
    """Red is ``"red"`` to str() and to ==."""

    RED = "red"


class Wine(enum.StrEnum):
    """Another type with an equal value."""

    RED = "red"


_shelf = Caches()


@_shelf.cached()
def on_the_shelf(book: int) -> int:
    """A function at module level, where pickle finds it."""
    return book


class CacheTests(SynchronousTestCase):
    """Base class: caches, and a record of every computation."""

    def setUp(self) -> None:
        self.caches = Caches()
        self.computed: list[Any] = []

    def note(self, *arguments: Any) -> int:
        """Compute a new result."""
        self.computed.append(arguments)
        return len(self.computed)

    def fact(self, name: str, *keys: str) -> None:
        """Apply a row that invalidates one key."""
        self.caches.apply([[name, list(keys), NOW]])


class FunctionTests(CacheTests):
    """A plain function."""

    def test_the_second_call_does_not_compute(self) -> None:
        """A second call with equal arguments does not compute, for any value."""

        @self.caches.cached()
        def get(order_id: int) -> None:
            self.note(order_id)

        self.assertIsNone(get(17))
        self.assertIsNone(get(17))
        get(18)
        self.assertEqual(self.computed, [(17,), (18,)])

    def test_looks_like_the_function(self) -> None:
        """Name, documentation and signature are the function's, and ``__wrapped__`` is the function."""

        def get(order_id: int, *, full: bool = False) -> str:
            """Return it."""
            return f"{order_id} {full}"

        cached = self.caches.cached()(get)
        self.assertEqual((cached.__doc__, cached.__qualname__), ("Return it.", get.__qualname__))
        self.assertEqual(getattr(cached, "__name__", None), "get")
        self.assertEqual(inspect.signature(cached), inspect.signature(get))
        self.assertIs(cached.__wrapped__, get)

    def test_counts_and_evicts_as_lru_cache_does(self) -> None:
        """The same calls give the same counts as the standard library's ``lru_cache``."""

        def get(number: int) -> int:
            return -number

        cached, reference = self.caches.cached(max_entries=5)(get), functools.lru_cache(maxsize=5)(get)
        for step in range(300):
            number = step * step % 11
            self.assertEqual(cached(number), reference(number))
            self.assertEqual(tuple(cached.cache_info()), tuple(reference.cache_info()))

    def test_evicts_the_least_recently_used(self) -> None:
        """A hit makes an entry the most recently used one."""

        @self.caches.cached(max_entries=2)
        def get(order_id: int) -> int:
            return self.note(order_id)

        for order_id in (1, 2, 1, 3, 1, 2):
            get(order_id)
        self.assertEqual(self.computed, [(1,), (2,), (3,), (2,)])

    def test_memory_is_limited(self) -> None:
        """Evicted, invalidated and failed entries leave nothing in any table."""

        @self.caches.cached(max_entries=3)
        def get(order_id: object) -> int:
            if order_id == 10:
                raise LookupError
            return self.note(order_id)

        for order_id in range(20):
            for alike in (order_id, str(order_id), float(order_id)):
                if order_id == 10 and alike != "10":
                    self.assertRaises(LookupError, get, alike)
                else:
                    get(alike)
        memory = get._memory
        self.assertEqual((len(memory.values), len(memory._flights)), (3, 0))
        self.assertEqual(memory._index.keys(), {("19",), ("19.0",)})
        self.fact("get", "19")
        self.fact("get", "19.0")
        self.assertEqual((len(memory.values), len(memory._index)), (0, 0))

    def test_entries_with_one_wire_key(self) -> None:
        """Entries with one wire key are evicted one by one, and invalidated together."""

        @self.caches.cached(max_entries=2)
        def get(key: str) -> int:
            return self.note(key)

        self.assertEqual([get(each) for each in (Color.RED, Wine.RED, "red", Wine.RED)], [1, 2, 3, 2])
        self.assertEqual(get._memory._index.keys(), {("red",)})
        self.fact("get", "red")
        self.assertEqual([get(each) for each in (Wine.RED, "red")], [4, 5])

    def test_keywords_and_defaults_are_the_same_call(self) -> None:
        """The key of a call is all its arguments in the declared order, in whatever form they are given."""

        @self.caches.cached()
        def get(room: str, user: str = "@a", *, full: bool = False) -> int:
            return self.note(room, user, full)

        self.assertEqual({get("!r"), get("!r", "@a"), get(user="@a", room="!r"), get("!r", full=False)}, {1})
        self.assertEqual(get("!r", full=True), 2)
        self.fact("get", "!r", "@a", "False")
        self.assertEqual((get("!r"), get("!r", full=True)), (3, 2))

    def test_any_number_of_arguments(self) -> None:
        """Each of ``*args`` is one key; keyword-only arguments follow."""

        @self.caches.cached()
        def get(*rooms: str, full: bool = False) -> int:
            return self.note(*rooms, full)

        self.assertEqual([get(), get("!a"), get("!a", "!b"), get("!a", "!b", full=False)], [1, 2, 3, 3])
        self.fact("get", "!a", "!b", "False")
        self.assertEqual([get(), get("!a"), get("!a", "!b")], [1, 2, 4])

    def test_no_arguments(self) -> None:
        """A function without parameters has one entry; its keys are an empty list."""

        @self.caches.cached()
        def get() -> int:
            return self.note()

        self.assertEqual([get(), get()], [1, 1])
        self.fact("get")
        self.assertEqual(get(), 2)

    def test_a_call_with_wrong_arguments(self) -> None:
        """Wrong arguments raise TypeError with the function's name, even if an entry has the same key."""

        @self.caches.cached()
        def get(order_id: int, *, full: bool = False) -> int:
            return self.note(order_id, full)

        get(1, full=True)
        wrong: Any = get
        for args, kwargs in (((), {}), ((1, True), {}), ((1,), {"half": True})):
            self.assertIn("get()", str(self.assertRaises(TypeError, wrong, *args, **kwargs)))
        self.assertIn("unhashable", str(self.assertRaises(TypeError, wrong, [])))
        self.assertEqual(get.cache_info().currsize, 1)

    def test_equal_is_not_enough(self) -> None:
        """Equal arguments share a value only if their types and their ``str()`` are equal too."""

        @self.caches.cached()
        def get(key: object) -> int:
            return self.note(key)

        for alike in (
            (1, "1", True, 1.0),
            ((1, 2), (True, 2), (1.0, 2)),
            (0.0, -0.0),
            ("red", Color.RED),
            (None, "None"),
        ):
            values = [get(each) for each in alike]
            self.assertEqual(len(set(values)), len(alike))
            self.assertEqual([get(each) for each in alike], values)

    def test_an_exception_is_not_stored(self) -> None:
        """After an exception the next call computes again, and other entries stay."""
        broken = [True]

        @self.caches.cached(max_entries=1)
        def get(order_id: int) -> int:
            if order_id == 2 and broken:
                raise LookupError(broken.pop())
            return self.note(order_id)

        get(1)
        error = self.assertRaises(LookupError, get, 2)
        self.assertIsNone(error.__context__)
        self.assertEqual((get(1), get(2)), (1, 2))

    def test_recursion(self) -> None:
        """A cached function may call itself."""

        @self.caches.cached()
        def fibonacci(number: int) -> int:
            return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)

        self.assertEqual(fibonacci(80), 23416728348467685)
        self.assertEqual(fibonacci.cache_info().misses, 81)

    def test_invalidate_by_hand(self) -> None:
        """``invalidate`` takes the arguments of a call and removes what a row would; ``clear`` removes everything."""

        @self.caches.cached()
        def get(order_id: object, limit: int = 10) -> int:
            return self.note(order_id, limit)

        self.assertEqual([get(17), get("17"), get(18)], [1, 2, 3])
        get.invalidate(order_id=17)
        self.assertEqual([get(18), get(17), get("17")], [3, 4, 5])
        get.clear()
        self.assertEqual([get(18), get(17)], [6, 7])

    def test_copies_and_pickles_as_a_function(self) -> None:
        """By name, as with ``lru_cache``; there is only one memory."""
        self.assertIs(copy.deepcopy({"f": on_the_shelf})["f"], on_the_shelf)
        self.assertIs(pickle.loads(pickle.dumps(on_the_shelf)), on_the_shelf)

    def test_refusals(self) -> None:
        """A function whose calls cannot be keyed, and a name that is used twice, are a ConfigError with the cure."""

        def get(order_id: int) -> int:
            return order_id

        def options(**options: int) -> int:
            return len(options)

        def of_class(cls: object) -> object:
            return cls

        self.caches.cached()(get)
        for refused, culprit in ((get, "'get'"), (options, r"\*\*options"), (of_class, "class methods")):
            self.assertRaisesRegex(ConfigError, culprit, self.caches.cached(), refused)
        self.assertRaisesRegex(ConfigError, "name=", self.caches.cached(), functools.partial(get, 1))
        self.assertRaisesRegex(ConfigError, "at least 1", self.caches.cached, max_entries=0)
        self.caches.cached(name="other")(get)
        self.assertEqual(len(self.caches), 2)


class RaceTests(CacheTests):
    """A plain function that is called while invalidations arrive."""

    def test_invalidated_during_a_plain_computation(self) -> None:
        """The caller gets the value, but it is not stored; values of other keys are."""

        @self.caches.cached()
        def get(order_id: int) -> int:
            self.fact("get", "17")
            return self.note(order_id)

        self.assertEqual([get(17), get(17), get(18), get(18)], [1, 2, 3, 3])
        self.assertEqual(get.cache_info().currsize, 1)

    def test_cleared_during_a_plain_computation(self) -> None:
        """The same for ``clear``."""

        @self.caches.cached()
        def get(order_id: int) -> int:
            self.caches.apply([["get", None, NOW]])
            return self.note(order_id)

        self.assertEqual([get(17), get(17)], [1, 2])

    def test_invalidated_while_another_thread_computes(self) -> None:
        """A value that any thread read before the invalidation is not stored after it."""
        reading, go_on = threading.Event(), threading.Event()

        @self.caches.cached()
        def get(order_id: int) -> int:
            value = self.note(order_id)
            reading.set()
            go_on.wait(10)
            return value

        thread = threading.Thread(target=get, args=(17,))
        thread.start()
        self.assertTrue(reading.wait(10))
        self.fact("get", "17")
        go_on.set()
        thread.join(10)
        self.assertEqual((get(17), get(17)), (2, 2))

    def test_computed_between_the_invalidations_of_two_caches(self) -> None:
        """A value that comes from an entry which the same rows remove a moment later is not stored."""
        truth = "old"

        @self.caches.cached()
        def outer(order_id: str) -> str:
            return inner(order_id)

        def between(keys: Sequence[str]) -> list[Sequence[str]]:
            self.note(outer(keys[0]))  # as another thread does
            return [keys]

        @self.caches.cached()
        def inner(_: str) -> str:
            return truth

        self.caches.fan_out("changed", outer)
        self.caches.cached(name="other", invalidated_by={"changed": between, "other_changed": between})(inner)
        self.caches.fan_out("changed", inner)
        for invalidate in (
            lambda: self.fact("changed", "17"),
            lambda: self.caches.apply([[name, ["17"], NOW] for name in ("outer", "other_changed", "inner")]),
        ):
            self.assertEqual(outer("17"), truth)
            old, truth = truth, truth + "er"
            invalidate()
            self.assertEqual((self.computed.pop(), outer("17"), inner("17")), ((old,), truth, truth))

    def test_two_threads_compute_one_key(self) -> None:
        """Of two computations the later one is stored, in whatever order they finish; neither thread waits."""
        reading, go_on = threading.Event(), threading.Event()

        @self.caches.cached()
        def get(order_id: int) -> int:
            value = self.note(order_id)
            if value == 1:
                reading.set()
                go_on.wait(10)
            return value

        thread = threading.Thread(target=get, args=(17,))
        thread.start()
        self.assertTrue(reading.wait(10))
        self.assertEqual(get(17), 2)
        go_on.set()
        thread.join(10)
        self.assertEqual((get(17), len(get._memory.values), len(get._memory._index)), (2, 1, 1))

    def test_stored_by_one_thread_just_after_another_missed(self) -> None:
        """A thread that begins just before another stores the value stores its own in the same entry."""

        @self.caches.cached()
        def get(order_id: int) -> int:
            return self.note(order_id)

        memory = get._memory
        for value in ("first", "second"):
            memory.keep(memory.flight((17,)), value)
        self.assertEqual((dict(memory.values), memory._index), ({(17,): "second"}, {("17",): {(17,): None}}))


class MethodTests(CacheTests):
    """A method: a cache per instance."""

    def setUp(self) -> None:
        super().setUp()
        note, cached = self.note, self.caches.cached

        @attrs.define
        class Orders:
            """An instance that is equal to others, and not hashable."""

            shop: str

            @cached()
            def get(self, order_id: object) -> int:
                """Return it."""
                return note(self.shop, order_id)

            @cached()
            async def fetch(self, order_id: int) -> int:
                return note(self.shop, order_id)

            @staticmethod
            @cached()
            def price(article: str) -> int:
                return note(article)

        self.Orders = Orders
        self.a, self.b = Orders("a"), Orders("a")

    def test_instances_do_not_share(self) -> None:
        """Equal instances and unhashable ones have a memory each, with ``max_entries`` entries."""
        self.assertEqual([self.a.get(17), self.b.get(17), self.a.get(17), self.b.get(17)], [1, 2, 1, 2])
        self.assertEqual(tuple(self.a.get.cache_info()), (1, 1, 10_000, 1))

    def test_an_instance_is_not_kept_alive(self) -> None:
        """Its memory is removed at once with it; its counts stay."""
        self.a.get(17)
        self.a.get(17)
        gone = weakref.ref(self.a)
        gc.disable()
        try:
            del self.a
            self.assertIsNone(gone())
        finally:
            gc.enable()
        self.assertEqual(self.caches.stats()["get"], ((1, 1, 10_000, 0), 0))
        self.assertEqual(len(self.Orders.get._cache._instances), 0)
        self.assertEqual(self.Orders("b").get(18), 2)

    def test_a_row_reaches_every_instance(self) -> None:
        """A row has no ``self``.  ``invalidate`` on an instance removes its own entries, on the class those of all."""
        get = self.Orders.get
        self.assertEqual([self.a.get(17), self.b.get(17)], [1, 2])
        self.fact("get", "17")
        self.assertEqual([self.a.get(17), self.b.get(17)], [3, 4])
        self.a.get.invalidate(17)
        self.assertEqual([self.a.get(17), self.b.get(17)], [5, 4])
        get.invalidate(self.b, 17)
        self.assertEqual([self.a.get(17), self.b.get(17)], [5, 6])
        self.a.get.clear()
        self.assertEqual([self.a.get(17), self.b.get(17)], [7, 6])
        get.clear()
        self.assertEqual([self.a.get(17), self.b.get(17)], [8, 9])
        self.assertEqual(tuple(get.cache_info()), (3, 9, 10_000, 2))

    def test_called_through_the_class(self) -> None:
        """A call through the class is the same call of the instance."""
        self.assertEqual([self.a.get(17), self.Orders.get(self.a, 17), self.Orders.get(self.a, order_id=17)], [1, 1, 1])
        wrong: Any = self.Orders.get
        self.assertRaisesRegex(TypeError, r"get\(\) is a method", wrong)

    def test_looks_like_a_method(self) -> None:
        """A method on an instance has no ``self`` in its signature."""
        self.assertEqual(list(inspect.signature(self.a.get).parameters), ["order_id"])
        self.assertEqual(list(inspect.signature(self.Orders.get).parameters), ["self", "order_id"])
        self.assertEqual((self.a.get.__doc__, self.Orders.get.__doc__), ("Return it.", "Return it."))

    def test_coroutine_method(self) -> None:
        """It returns coroutines on an instance and through the class."""
        results = [self.a.fetch(17), self.a.fetch(order_id=17), self.Orders.fetch(self.a, 17), self.b.fetch(17)]
        self.assertEqual([self.successResultOf(ensureDeferred(each)) for each in results], [1, 1, 1, 2])

    def test_static_method(self) -> None:
        """A static method is a function: the class and every instance share it."""
        on_an_instance: Any = self.a  # mypy takes a static method that is no plain function for a method
        self.assertEqual([on_an_instance.price("x"), self.Orders.price("x")], [1, 1])

    def test_an_alias_in_a_class_leaves_the_function_alone(self) -> None:
        """A function stays a function although a class uses it as a method."""

        @self.caches.cached()
        def describe(thing: object) -> int:
            return self.note(thing)

        class Thing:
            described = describe

        self.assertEqual([describe("x"), Thing().described(), describe("x")], [1, 2, 1])

    def test_super(self) -> None:
        """A method that overrides a cached one may be cached itself, under another name."""
        cached, Orders = self.caches.cached, self.Orders  # noqa: N806

        class Dear(Orders):  # type: ignore[misc, valid-type]
            @cached(name="get_dear")
            def get(self, order_id: object) -> int:
                value: int = super().get(order_id)
                return 100 * value

        dear = Dear("a")
        self.assertEqual([dear.get(17), dear.get(17)], [100, 100])
        self.fact("get", "17")
        self.assertEqual(dear.get(17), 100)
        self.fact("get_dear", "17")
        self.assertEqual(dear.get(17), 200)

    def test_needs_weak_references(self) -> None:
        """An instance without weak references is a ConfigError with the cure."""
        cached = self.caches.cached

        class Small:
            __slots__ = ()

            @cached(name="small")
            def get(self) -> int:
                return 1

        self.assertRaisesRegex(ConfigError, "'small'.*__weakref__", lambda: Small().get())


class WaitingTests(CacheTests):
    """Functions that return Deferreds, and coroutine functions."""

    def setUp(self) -> None:
        super().setUp()
        self.under_way: list[Deferred[str]] = []
        self.cancelled: list[Deferred[str]] = []

        def start(order_id: int) -> Deferred[str]:
            self.note(order_id)
            self.under_way.append(Deferred(self.cancelled.append))
            return self.under_way[-1]

        @self.caches.cached()
        def get(order_id: int) -> Deferred[str]:
            return start(order_id)

        @self.caches.cached()
        async def fetch(order_id: int) -> str:
            return await start(order_id)

        self.get, self.fetch = get, fetch

    def both(self, case: Callable[[Callable[[int], Deferred[str]], str], None]) -> None:
        """Run a test with either kind of function."""
        case(self.get, "get")
        self.under_way.clear()
        self.cancelled.clear()
        self.computed.clear()
        case(lambda order_id: ensureDeferred(self.fetch(order_id)), "fetch")

    def test_callers_share_a_computation(self) -> None:
        """Calls during the computation wait for it; later calls get its value; each call has its own Deferred."""

        def case(get: Callable[[int], Deferred[str]], name: str) -> None:
            first, second = get(17), get(17)
            self.assertIsNot(first, second)
            self.assertNoResult(second)
            self.under_way[0].callback("placed")
            first.addCallback(lambda _: "changed")
            self.assertEqual(self.successResultOf(second), "placed")
            third, fourth = get(17), get(17)
            third.addCallback(lambda _: "changed")
            self.assertEqual(self.successResultOf(fourth), "placed")
            self.assertEqual(self.computed, [(17,)])
            self.assertEqual(self.caches.stats()[name], ((3, 1, 10_000, 1), 0))

        self.both(case)

    def test_every_caller_gets_the_exception_and_no_later_one(self) -> None:
        """A failed computation fails all its callers, logs nothing, and is not stored."""

        def case(get: Callable[[int], Deferred[str]], _: str) -> None:
            first, second = get(17), get(17)
            self.under_way[0].errback(LookupError("no such order"))
            self.failureResultOf(first, LookupError)
            self.failureResultOf(second, LookupError)
            again = get(17)
            self.under_way[1].callback("placed")
            self.assertEqual(self.successResultOf(again), "placed")

        self.both(case)
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_cancelling_one_leaves_the_others(self) -> None:
        """The computation continues while one caller waits."""

        def case(get: Callable[[int], Deferred[str]], _: str) -> None:
            first, second = get(17), get(17)
            first.cancel()
            self.failureResultOf(first, CancelledError)
            self.assertEqual(self.cancelled, [])
            self.under_way[0].callback("placed")
            self.assertEqual(self.successResultOf(second), "placed")

        self.both(case)

    def test_cancelling_all_cancels_the_computation(self) -> None:
        """No call joins a computation that is being cancelled; the next call starts another."""

        def case(get: Callable[[int], Deferred[str]], _: str) -> None:
            first, second = get(17), get(17)
            first.cancel()
            second.cancel()
            self.failureResultOf(first, CancelledError)
            self.failureResultOf(second, CancelledError)
            self.assertEqual(self.cancelled, self.under_way)
            third = get(17)
            self.under_way[1].callback("placed")
            self.assertEqual(self.successResultOf(third), "placed")

        self.both(case)

    def test_a_computation_that_ends_some_time_after_its_cancellation(self) -> None:
        """No call joins it meanwhile, and its result is not stored."""
        last_words: Deferred[None] = Deferred()

        @self.caches.cached()
        async def slow(order_id: int) -> int:
            computation = self.note(order_id)
            if computation == 1:
                try:
                    await Deferred()
                except CancelledError:
                    await last_words
            return computation

        first = ensureDeferred(slow(17))
        first.cancel()
        second = ensureDeferred(slow(17))
        last_words.callback(None)
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.successResultOf(second), 2)
        self.assertEqual(self.successResultOf(ensureDeferred(slow(17))), 2)

    def test_invalidated_during_a_computation(self) -> None:
        """Callers that wait get the value; it is not stored, and calls after the invalidation do not join."""

        def case(get: Callable[[int], Deferred[str]], name: str) -> None:
            first = get(17)
            self.fact(name, "17")
            second = get(17)
            self.assertEqual(len(self.under_way), 2)
            self.under_way[1].callback("new")
            self.under_way[0].callback("old")
            self.assertEqual((self.successResultOf(first), self.successResultOf(second)), ("old", "new"))
            self.assertEqual(self.successResultOf(get(17)), "new")

        self.both(case)

    def test_cleared_during_a_computation(self) -> None:
        """The same for ``clear``, and for a stale value that comes first."""

        def case(get: Callable[[int], Deferred[str]], name: str) -> None:
            first = get(17)
            self.caches.apply([[name, None, NOW]])
            self.under_way[0].callback("old")
            self.assertEqual(self.successResultOf(first), "old")
            self.assertEqual(self.caches.stats()[name][0].currsize, 0)
            self.assertNoResult(get(17))

        self.both(case)

    def test_a_waiter_may_call_again(self) -> None:
        """When a callback gets the value, it is stored already.  The callback may invalidate it, or cancel another."""

        def case(get: Callable[[int], Deferred[str]], name: str) -> None:
            first, second, third = get(17), get(17), get(17)
            received: list[str] = []

            def again(_: str) -> None:
                get(17).addCallback(received.append)
                self.fact(name, "17")
                second.cancel()

            first.addCallback(again)
            self.under_way[0].callback("placed")
            self.assertEqual(received, ["placed"])
            self.failureResultOf(second, CancelledError)
            self.assertEqual(self.successResultOf(third), "placed")
            self.assertNoResult(get(17))

        self.both(case)

    def test_a_deferred_that_has_fired(self) -> None:
        """A Deferred that fired before it was returned works the same."""

        @self.caches.cached()
        def known(order_id: int) -> Deferred[int]:
            return succeed(self.note(order_id))

        self.assertEqual([self.successResultOf(known(17)), self.successResultOf(known(17))], [1, 1])

    def test_a_plain_function_that_returns_a_coroutine(self) -> None:
        """A plain function that returns a coroutine is cached by the coroutine's result."""

        async def look(order_id: int) -> int:
            return self.note(order_id)

        @self.caches.cached()
        def traced(order_id: int) -> Coroutine[Any, Any, int]:
            return look(order_id)

        async def twice() -> list[int]:
            return [await traced(17), await traced(17)]

        self.assertEqual(self.successResultOf(ensureDeferred(twice())), [1, 1])

    def test_a_coroutine_does_nothing_before_it_is_awaited(self) -> None:
        """So it cannot return a value from before it is awaited."""
        first = ensureDeferred(self.fetch(17))
        self.under_way[0].callback("old")
        self.assertEqual(self.successResultOf(first), "old")
        coroutine = self.fetch(17)
        self.fact("fetch", "17")
        second = ensureDeferred(coroutine)
        self.under_way[1].callback("new")
        self.assertEqual(self.successResultOf(second), "new")


class StreamTests(CacheTests):
    """Rows of the stream ``caches``."""

    def setUp(self) -> None:
        super().setUp()

        @self.caches.cached()
        def get_order(order_id: object) -> int:
            return self.note("order", order_id)

        @self.caches.cached()
        def get_total(order_id: object) -> int:
            return self.note("total", order_id)

        self.get_order, self.get_total = get_order, get_total

    def test_keys_are_the_str_of_arguments(self) -> None:
        """The strings of a row match every argument with the same ``str()``, and no other."""
        self.assertEqual([self.get_order(each) for each in (17, "17", None, "None", 2.5, 1, True)], [*range(1, 8)])
        for key in ("17", "None", "2.5", "True"):
            self.fact("get_order", key)
        self.assertEqual((self.get_order(1), self.get_order.cache_info().currsize), (6, 1))
        self.assertEqual(encode_key((17, True, None, "x")), ("17", "True", "None", "x"))

    def test_null_clears_one_cache(self) -> None:
        """Null removes every entry of one cache, and of no other."""
        for order_id in (17, 18):
            self.get_order(order_id)
            self.get_total(order_id)
        self.caches.apply([["get_order", None, NOW]])
        self.assertEqual([each.currsize for each, _ in self.caches.stats().values()], [0, 2])

    def test_unknown_names_and_keys_are_ignored(self) -> None:
        """Unknown names, unknown keys, and fields of a newer release are ignored."""
        self.get_order(17)
        self.caches.apply([["get_user", ["17"], NOW], ["get_order", ["18"], NOW]])
        self.assertEqual(self.get_order(17), 1)
        self.caches.apply([["get_order", ["17"], NOW, "later"]])
        self.assertEqual(self.get_order(17), 2)

    def test_keys_beyond_the_arguments_do_not_count(self) -> None:
        """One row may be for several functions; it removed nothing from one with fewer arguments."""

        @self.caches.cached()
        def get_price(product: str) -> int:
            return self.note("price", product)

        @self.caches.cached()
        def get_sum() -> int:
            return self.note("sum")

        self.caches.fan_out("changed", "get_price", "get_sum")
        for product in ("tea", "rice"):
            get_price(product)
        get_sum()
        self.caches.apply([["changed", ["tea", "EUR"], 1]])
        self.computed.clear()
        for product in ("tea", "rice"):
            get_price(product)
        get_sum()
        self.assertEqual(self.computed, [("price", "tea"), ("sum",)])

    def test_fewer_keys_than_arguments_are_a_prefix(self) -> None:
        """A Synapse names all entries of a user so; an exact key was required, and they stayed."""

        @self.caches.cached()
        def get_device(user_id: str, device_id: object, *, full: bool = False) -> int:
            return self.note("device", user_id, device_id, full)

        @self.caches.cached()
        def get_any(*ids: str) -> int:
            return self.note("any", *ids)

        calls = [(user, device, full) for user in ("a", "b") for device in ("1", 1, 2) for full in (False, True)]
        for keys, gone in (
            (("a",), [each for each in calls if each[0] == "a"]),
            (("b", "1"), [("b", "1", False), ("b", "1", True), ("b", 1, False), ("b", 1, True)]),
            (("b", "2", "True"), [("b", 2, True)]),
            ((), calls),
            (("c",), []),
            (("a", "1", "True", "more"), [("a", "1", True), ("a", 1, True)]),
        ):
            for user, device, full in calls:
                get_device(user, device, full=full)
            self.computed.clear()
            self.fact("get_device", *keys)
            for user, device, full in calls:
                get_device(user, device, full=full)
            self.assertEqual([each[1:] for each in self.computed], gone, keys)
        get_any("1"), get_any("1", "2")
        self.fact("get_any", "1")
        self.assertEqual(get_any.cache_info().currsize, 1)

    def test_a_prefix_reaches_computations_in_progress(self) -> None:
        answers: list[Deferred[str]] = []

        @self.caches.cached()
        def fetch(user_id: str, device_id: str) -> Deferred[str]:
            answers.append(Deferred())
            return answers[-1]

        first, other = fetch("a", "1"), fetch("b", "1")
        self.fact("fetch", "a")
        answers[0].callback("old")
        answers[1].callback("other")
        self.assertEqual([self.successResultOf(each) for each in (first, other)], ["old", "other"])
        self.assertEqual(fetch.cache_info().currsize, 1)

    def test_memory_of_prefixes_is_limited(self) -> None:
        """The index has what the cache has, whatever was evicted, invalidated and stored again."""

        @self.caches.cached(max_entries=5)
        def get(first: object, second: object) -> int:
            return self.note(first, second)

        memory, pick = get._memory, random.Random(1)
        for _ in range(1000):
            first, second = pick.choice([1, "1", 2, 2.5]), pick.choice([1, "1", None])
            get(first, second)
            if pick.random() < 0.3:
                self.fact("get", *map(str, (first, second)[: pick.randrange(3)]))
            wires = {key: key[0] if isinstance(key[0], tuple) else encode_key(key) for key in memory.values}
            index: dict[Any, set[Any]] = {}
            for key, wire in wires.items():
                for each in ((wire,) if key != wire else ()) + (wire[:1],):
                    index.setdefault(each, set()).add(key)
            self.assertEqual({each: {*keys} for each, keys in memory._index.items()}, index)
        self.assertEqual(get.cache_info().currsize, len(memory.values))

    def test_applied_twice(self) -> None:
        """To apply a row twice changes nothing more."""
        row = ["get_order", ["17"], NOW]
        self.get_order(17)
        self.caches.apply([row, row])
        self.assertEqual([self.get_order(17), self.get_order(17)], [2, 2])

    def test_malformed_rows(self) -> None:
        """A malformed row is in the error; the other rows are applied."""
        bad: list[Any] = [
            ["get_total", ["17"]],
            ["get_total", "17", NOW],
            ["get_total", [17], NOW],
            ["get_total", {"0": "17"}, NOW],
            ["get_total", ["17"], "now"],
            [17, ["17"], NOW],
            {"cache_func": "get_total"},
            "get_total",
            None,
            [],
        ]
        self.get_total(17)
        for row in bad:
            before = self.get_order(17)
            error = self.assertRaises(RowError, self.caches.apply, [row, ["get_order", ["17"], NOW]])
            self.assertIsInstance(error, StreamError)
            self.assertIn(encode_row(row), str(error))
            self.assertNotEqual(self.get_order(17), before)
        self.assertEqual(self.caches.stats()["get_total"], ((0, 1, 10_000, 1), 0))
        token = self.assertRaises(RowError, self.caches.apply, [["get_user_by_access_token", ["syt_1"], None]])
        self.assertIn('["get_user_by_access_token",null,null]', str(token))
        long = self.assertRaises(RowError, self.caches.apply, [["%s" * 10_000]])
        self.assertLess(len(str(long)), 400)

    def test_fan_out(self) -> None:
        """A row about a special name invalidates several caches, with the same keys; later caches too."""
        self.caches.fan_out("order_changed", "get_order", "get_history")
        self.caches.fan_out("order_changed", "get_total")
        self.fact("order_changed", "17")

        @self.caches.cached()
        def get_history(order_id: int) -> int:
            return self.note("history", order_id)

        for _ in range(2):
            for order_id in (17, 18):
                self.get_order(order_id)
                self.get_total(order_id)
                get_history(order_id)
        self.fact("order_changed", "17")
        self.assertEqual([each.currsize for each, _ in self.caches.stats().values()], [1, 1, 1])
        self.caches.apply([["order_changed", None, NOW]])
        self.assertEqual([each.currsize for each, _ in self.caches.stats().values()], [0, 0, 0])

    def test_fan_out_of_a_cache(self) -> None:
        """A cache's own name may fan out; the cache is invalidated too."""
        self.caches.fan_out("get_order", "get_total")
        self.get_order(17)
        self.get_total(17)
        self.fact("get_order", "17")
        self.assertEqual([each.currsize for each, _ in self.caches.stats().values()], [0, 0])

    def test_fan_out_takes_cached_functions(self) -> None:
        self.caches.fan_out("order_changed", self.get_order, "get_total")
        self.get_order(17)
        self.get_total(17)
        self.fact("order_changed", "17")
        self.assertEqual([each.currsize for each, _ in self.caches.stats().values()], [0, 0])

    def test_invalidated_by_other_names(self) -> None:
        """A row about a room and its users: one cache has rooms, another has users, a third has neither."""

        @self.caches.cached(invalidated_by={"changed": lambda keys: [keys[:1]]})
        def in_room(room_id: int) -> int:
            return self.note("room", room_id)

        @self.caches.cached(
            invalidated_by={"changed": lambda keys: ([each] for each in keys[1:]), "ended": lambda _: None}
        )
        def of_user(user_id: int) -> int:
            return self.note("user", user_id)

        def sizes() -> list[int]:
            return [each.cache_info().currsize for each in (in_room, of_user)]

        for each in (17, 18, 19):
            in_room(each), of_user(each)
        self.fact("changed", "17", "18", "19")
        self.assertEqual(sizes(), [2, 1])
        self.fact("ended", "17")
        self.assertEqual(sizes(), [2, 0])
        self.fact("in_room", "18")
        self.assertEqual(sizes(), [1, 0])
        self.caches.apply([["changed", None, NOW]])
        self.assertEqual(sizes(), [0, 0])

    def test_keys_that_are_not_understood_remove_everything(self) -> None:
        """No stale value stays, the other rows are applied, and no key is in the error."""
        wrong: list[Any] = [lambda keys: [json.loads(each) for each in keys], lambda keys: keys, lambda _: [17]]
        for function in wrong:
            caches = Caches()

            @caches.cached(invalidated_by={"changed": function})
            def get(order_id: int) -> int:
                return -order_id

            @caches.cached()
            def look(order_id: int) -> int:
                return -order_id

            for each in (17, 18):
                get(each), look(each)
            error = self.assertRaises(RowError, caches.apply, [["changed", ["secret"], NOW], ["look", ["17"], NOW]])
            self.assertRegex(str(error), "all of get is invalidated: its function for changed raised")
            self.assertNotIn("secret", str(error))
            self.assertEqual([each.cache_info().currsize for each in (get, look)], [0, 1])

    def test_a_name_that_cannot_invalidate_another(self) -> None:
        """And the cache is not made."""
        for name in ("get_user", "get_order"):
            with self.assertRaisesRegex(ConfigError, "fans out to caches itself"):
                self.caches.cached(name="get_user", invalidated_by={name: lambda _: None})(len)
            self.caches.fan_out("get_user", "get_total")
        self.assertEqual(self.caches.stats().keys(), {"get_order", "get_total"})

    def test_fan_out_refuses_what_names_no_cache(self) -> None:
        """A tuple, or a function that is not cached, was accepted, and nothing was invalidated."""
        wrong: list[Any] = [["get_order"], ("get_order", "get_total"), len, None]
        for each in wrong:
            self.assertRaisesRegex(ConfigError, f"a {type(each).__name__}", self.caches.fan_out, "changed", each)
        self.assertRaisesRegex(ConfigError, "itself", self.caches.fan_out, "get_order", self.get_order)

    def test_fan_out_has_one_step(self) -> None:
        """A special name among those that another fans out to is a ConfigError, whichever comes first."""
        self.caches.fan_out("order_changed", "get_order")
        self.assertRaisesRegex(ConfigError, "order_changed", self.caches.fan_out, "shop_changed", "order_changed")
        self.assertRaisesRegex(ConfigError, "get_order", self.caches.fan_out, "get_order", "get_total")
        self.assertRaisesRegex(ConfigError, "itself", self.caches.fan_out, "itself", "itself")

    def test_stats(self) -> None:
        """Each cache counts hits, misses, size and invalidations, also those without an entry."""
        self.caches.fan_out("order_changed", "get_order", "get_total")
        for order_id in (17, 17, 18):
            self.get_order(order_id)
        self.fact("order_changed", "17")
        self.fact("get_order", "99")
        self.get_order.invalidate(99)
        stats = self.caches.stats()
        self.assertEqual(dict(stats), {"get_order": ((1, 2, 10_000, 1), 3), "get_total": ((0, 0, 10_000, 0), 1)})

    def test_trap_30_applied_when_apply_returns(self) -> None:
        """A reader that waits for the position finds no old value, because ``apply`` does everything at once."""
        self.get_order(17)
        position, seen = 58, []
        self.fact("get_order", "17")
        seen.append(self.get_order.cache_info().currsize)
        position = 59
        self.assertEqual((position, seen, self.get_order(17)), (59, [0], 2))

    def test_trap_43_one_fact_with_many_keys(self) -> None:
        """All rows of a token are applied, not only the last."""
        for order_id in (17, 18, 19):
            self.get_order(order_id)
        self.caches.apply([["get_order", ["17"], NOW], ["get_order", ["18"], NOW]])
        self.assertEqual(self.get_order(19), 3)
        self.assertEqual(self.get_order.cache_info().currsize, 1)


ARGUMENTS = st.sampled_from([1, "1", True, "True", 1.0, (1,), (True,), None, "None"])
PICKS = st.integers(min_value=0, max_value=1_000)


@attrs.define(eq=False)
class Started:
    """The model of a computation in progress."""

    argument: Any
    version: int
    answer: Deferred[int]
    waiters: list[Deferred[int]]


class CachesMachine(RuleBasedStateMachine):
    """Two caches of values that change; each change is a row of the stream.

    The model has version numbers, which the code has not: a value is stale once the version that it was read from is
    not the present one.
    """

    MAX_ENTRIES = 3

    @initialize()
    def start(self) -> None:
        self.caches = Caches()
        self.caches.fan_out("changed", "look", "fetch")
        self.truth: dict[str, int] = {}
        self.age = 0
        self.change_while_looking: str | None = None
        self.started: list[Started] = []
        self.kept: dict[str, OrderedDict[Any, int]] = {"look": OrderedDict(), "fetch": OrderedDict()}
        self.hits, self.misses = {"look": 0, "fetch": 0}, {"look": 0, "fetch": 0}

        @self.caches.cached(max_entries=self.MAX_ENTRIES)
        def look(argument: Any) -> int:
            version = self.version(argument)
            if self.change_while_looking is not None:
                self.change(self.change_while_looking)
            return version

        @self.caches.cached(max_entries=self.MAX_ENTRIES)
        async def fetch(argument: Any) -> int:
            started = Started(argument, self.version(argument), Deferred(), [])
            self.started.append(started)
            await started.answer
            return started.version

        self.look, self.fetch = look, fetch

    @staticmethod
    def key(argument: Any) -> tuple[str, str]:
        """Return the key of an argument in the model."""
        return type(argument).__name__, str(argument)

    def version(self, argument: Any) -> int:
        """Return the true value of an argument now."""
        return self.truth.setdefault(str(argument), 0)

    def change(self, encoded: str | None) -> None:
        """Change the true value of one wire key, or of all, and invalidate it."""
        self.age += 1
        for each in [encoded] if encoded is not None else list(self.truth):
            self.truth[each] = self.age
        self.caches.apply([["changed", None if encoded is None else [encoded], NOW]])
        for kept in self.kept.values():
            for key in [key for key in kept if encoded in (None, key[1])]:
                del kept[key]

    def keep(self, name: str, argument: Any, version: int) -> None:
        """Store a value that is still true, and evict beyond the limit."""
        if version == self.version(argument):
            self.kept[name][self.key(argument)] = version
            if len(self.kept[name]) > self.MAX_ENTRIES:
                self.kept[name].popitem(last=False)

    def hit(self, name: str, argument: Any) -> bool:
        """Return whether the model has it; that makes it the most recently used."""
        kept = self.key(argument) in self.kept[name]
        if kept:
            self.kept[name].move_to_end(self.key(argument))
        return kept

    @rule(argument=ARGUMENTS, meanwhile=st.none() | ARGUMENTS.map(str))
    def call(self, argument: Any, meanwhile: str | None) -> None:
        """Call the plain function; if it computes, a value may change meanwhile."""
        now, hit = self.version(argument), self.hit("look", argument)
        self.change_while_looking = meanwhile
        assert self.look(argument) == now
        if hit:
            self.hits["look"] += 1
        else:
            self.misses["look"] += 1
            self.keep("look", argument, now)

    @rule(argument=ARGUMENTS)
    def call_and_wait(self, argument: Any) -> None:
        """Call the coroutine function: a stored value, a computation that is still valid, or a new one."""
        now, hit, before = self.version(argument), self.hit("fetch", argument), len(self.started)
        good = [each for each in self.started if self.key(each.argument) == self.key(argument) and each.version == now]
        waiter = ensureDeferred(self.fetch(argument))
        self.hits["fetch"] += hit or bool(good)
        self.misses["fetch"] += not (hit or good)
        if hit:
            values: list[int] = []
            waiter.addCallback(values.append)
            assert values == [now]
        else:
            assert not waiter.called
            assert len(self.started) == before + (not good)
            (good or self.started)[-1].waiters.append(waiter)

    @precondition(lambda self: self.started)
    @rule(pick=PICKS, fails=st.booleans())
    def land(self, pick: int, fails: bool) -> None:
        """Finish a computation: all callers get the value that it read, or its exception."""
        started = self.started.pop(pick % len(self.started))
        received: list[object] = []
        for waiter in started.waiters:
            waiter.addCallbacks(received.append, lambda failure: received.append(failure.type))
        if fails:
            started.answer.errback(LookupError())
        else:
            started.answer.callback(0)
            self.keep("fetch", started.argument, started.version)
        assert received == [LookupError if fails else started.version] * len(started.waiters)

    @precondition(lambda self: self.started)
    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        """Cancel a caller; only the last one cancels the computation."""
        started = self.started[pick % len(self.started)]
        waiter = started.waiters.pop(pick % len(started.waiters))
        reasons: list[object] = []
        waiter.addErrback(lambda failure: reasons.append(failure.type))
        waiter.cancel()
        assert reasons == [CancelledError]
        assert started.answer.called == (not started.waiters)
        if not started.waiters:
            self.started.remove(started)

    @rule(argument=ARGUMENTS)
    def invalidate(self, argument: Any) -> None:
        """Change the true value of one wire key."""
        self.change(str(argument))

    @rule()
    def invalidate_all(self) -> None:
        """Change all true values."""
        self.change(None)

    @invariant()
    def the_figures_agree(self) -> None:
        """Each cache has the entries of the model, and the flights that can still be joined."""
        for name, function in (("look", self.look), ("fetch", self.fetch)):
            assert function.cache_info() == (self.hits[name], self.misses[name], self.MAX_ENTRIES, len(self.kept[name]))
            memory = function._memory
            assert sum(map(len, memory._index.values())) == sum(key[0] != "str" for key in self.kept[name])
            good = [each for each in self.started if each.version == self.version(each.argument)]
            assert sum(map(len, memory._flights.values())) == (len(good) if name == "fetch" else 0)


CachesMachineTests = CachesMachine.TestCase
