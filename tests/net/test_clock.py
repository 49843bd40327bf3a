"""The timers of a reactor whose wall clock is set back."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.base import ReactorBase
from twisted.internet.task import Clock

from replication.net import clock
from replication.net.clock import steady_seconds, use_monotonic_clock
from twisted import internet


class Reactor(ReactorBase):
    """A reactor without sockets: a test moves its clocks and lets it run."""

    def __init__(self) -> None:
        super().__init__()
        self.wall = 1_800_000_000.0
        self.monotonic = 5_000.0
        self.seconds: Any = lambda: self.wall
        self.fired: list[str] = []

    def installWaker(self) -> None:
        """Do nothing: no thread wakes it."""

    def later(self, seconds: float, name: str) -> Any:
        """Append a name to ``fired`` after that time."""
        return self.callLater(seconds, self.fired.append, name)

    def turn(self, seconds: float) -> list[str]:
        """Let time pass, and return the names of the calls that are due."""
        self.wall += seconds
        self.monotonic += seconds
        self.fired.clear()
        self.runUntilCurrent()
        return [*self.fired]


@pytest.fixture
def reactor(monkeypatch: pytest.MonkeyPatch) -> Reactor:
    """Return a reactor whose two clocks a test moves."""
    made = Reactor()
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: made.monotonic))
    return made


def test_timers_fire_while_the_wall_clock_stands_back(reactor: Reactor) -> None:
    use_monotonic_clock(reactor)
    reactor.later(10, "a")
    reactor.wall -= 7_200
    assert reactor.timeout() == 10
    assert reactor.turn(9.5) == []
    assert reactor.turn(0.5) == ["a"]


def test_a_step_forward_fires_no_timer_early(reactor: Reactor) -> None:
    use_monotonic_clock(reactor)
    reactor.later(10, "a")
    reactor.wall += 7_200
    assert reactor.turn(9.5) == []


def test_calls_that_wait_keep_the_rest_of_their_time(reactor: Reactor) -> None:
    for name, seconds in {"e": 5, "c": 3, "b": 2, "d": 4, "never": 1}.items():
        call = reactor.later(seconds, name)
    assert reactor.turn(0.5) == []  # they stand in the reactor's heap
    call.cancel()
    delayed, sooner, new = reactor.later(1, "f"), reactor.later(9, "a"), reactor.later(7, "g")
    delayed.delay(4.75)
    use_monotonic_clock(reactor)
    reactor.wall -= 7_200
    assert sorted(each.getTime() - reactor.seconds() for each in reactor.getDelayedCalls()) == [
        *(1.5, 2.5, 3.5, 4.5),
        *(5.75, 7, 9),
    ]
    sooner.reset(1)  # by the same clock
    new.delay(-0.5)
    assert [reactor.turn(0.5) for _ in range(14)] == [
        *([], ["a"], ["b"], [], ["c"], [], ["d"]),
        *([], ["e"], [], [], ["f"], ["g"], []),
    ]


def test_the_clock_is_pythons_and_a_second_call_changes_nothing() -> None:
    reactor = Reactor()
    use_monotonic_clock(reactor)
    reactor.later(10, "a")
    use_monotonic_clock(reactor)
    assert reactor.seconds is time.monotonic
    assert reactor.timeout() == pytest.approx(10, abs=5)


def test_without_a_reactor_it_changes_the_global_one(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internet, "reactor", reactor, raising=False)
    use_monotonic_clock()
    assert reactor.seconds() == reactor.monotonic


def test_ages_do_not_follow_the_wall_clock_of_a_reactor(reactor: Reactor) -> None:
    before = steady_seconds(reactor)
    reactor.wall += 7_200
    assert steady_seconds(reactor) == before
    reactor.turn(5)
    assert steady_seconds(reactor) == before + 5


def test_ages_follow_the_clock_of_a_test() -> None:
    clock = Clock()
    clock.advance(5)
    assert steady_seconds(clock) == 5
