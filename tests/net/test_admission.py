"""Each bound refuses the connection that is beyond it, and no other."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack
from pathlib import Path

import pytest
from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.task import Clock
from twisted.logger import LogLevel

from replication.net.admission import MAX_ADDRESSES, PERIOD, RESERVED_FILES, Admission, Bounds, host_of
from tests.doubles import logged, shown_metrics

ONE, OTHER = IPv4Address("TCP", "192.0.2.1", 40_000), IPv4Address("TCP", "192.0.2.2", 40_000)
HERE = IPv4Address("TCP", "127.0.0.1", 40_000)
NONE = Bounds(0, 0, 0, 0)


def refusals(admission: Admission) -> dict[str, float]:
    """Return the metrics of refused connections."""
    return shown_metrics(admission.samples())


def test_connections_in_all_are_bounded_and_one_that_ends_makes_room() -> None:
    admission = Admission("wire", Bounds(max_connections=2), Clock())
    assert [admission.enter(each) for each in (HERE, ONE, OTHER)] == [True, True, False]
    admission.leave(HERE)
    assert admission.enter(OTHER)
    assert admission.open == 2
    assert refusals(admission) == {"connections_refused_total socket=wire bound=max_connections": 1}


@pytest.mark.parametrize(("socket", "reserved"), [("http", RESERVED_FILES), ("wire", 2 * RESERVED_FILES)])
def test_connections_leave_the_reserved_files_to_the_process(socket: str, reserved: int) -> None:
    admission = Admission(socket, NONE, Clock())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    with logged(LogLevel.warn) as warnings:
        try:
            for left, accepted in ((reserved + 1, True), (reserved, False), (0, False)):
                used = max(free, 4 * RESERVED_FILES)
                with ExitStack() as files:
                    while files.enter_context(Path(os.devnull).open("rb")).fileno() < used - 1:
                        pass
                    resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, hard))
                    assert admission.enter(ONE) is accepted
                assert admission.enter(ONE), "files were closed"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refusals(admission) == {f"connections_refused_total socket={socket} bound=ulimit -n": 2}
    assert ": raise it, or lower max_connections" in str(warnings)


def test_connections_of_one_address_are_bounded_and_others_are_accepted() -> None:
    admission = Admission("http", Bounds(max_connections_per_address=2), Clock())
    assert [admission.enter(each) for each in (ONE, ONE, ONE, OTHER)] == [True, True, False, True]
    admission.leave(ONE)
    assert admission.enter(ONE)
    assert refusals(admission) == {"connections_refused_total socket=http bound=max_connections_per_address": 1}


def test_new_connections_of_one_address_are_bounded_for_a_minute() -> None:
    clock = Clock()
    admission = Admission("wire", Bounds(max_connects_per_minute=2), clock)
    for _ in range(2):
        assert admission.enter(ONE)
        admission.leave(ONE)
    assert [admission.enter(each) for each in (ONE, OTHER)] == [False, True]
    clock.advance(PERIOD - 1)
    assert not admission.enter(ONE)
    clock.advance(1)
    assert admission.enter(ONE)


def test_an_address_with_many_faults_is_refused_for_a_minute() -> None:
    clock = Clock()
    admission = Admission("wire", Bounds(max_faults_per_minute=2), clock)
    for _ in range(2):
        assert admission.enter(ONE)
        admission.faulted(ONE)
    assert [admission.enter(each) for each in (ONE, OTHER)] == [False, True]
    clock.advance(PERIOD)
    assert admission.enter(ONE)


@pytest.mark.parametrize("address", [HERE, IPv6Address("TCP", "::1", 1), UNIXAddress("wire"), None])
def test_the_limits_of_one_address_do_not_count_for_this_machine(address: object) -> None:
    """There may be a proxy, behind which all clients are."""
    admission = Admission("wire", Bounds(10, 1, 1, 1), Clock())
    for _ in range(10):
        assert admission.enter(address)
        admission.faulted(address)
    assert not admission.enter(address)
    for _ in range(10):
        admission.leave(address)
    assert admission.open == 0


def test_zero_is_no_limit() -> None:
    admission = Admission("wire", NONE, Clock())
    for _ in range(1_000):
        assert admission.enter(ONE)
        admission.faulted(ONE)
    assert refusals(admission) == {}


def test_an_address_of_ipv6_is_a_network() -> None:
    """A host has 2**64 addresses there."""
    near, far = IPv6Address("TCP", "2001:db8::1", 1), IPv6Address("TCP", "2001:db8:0:1::1", 1)
    assert host_of(near) == host_of(IPv6Address("TCP", "2001:db8::ffff:2", 1))
    assert host_of(near) != host_of(far)
    assert host_of(IPv6Address("TCP", "::ffff:192.0.2.1", 1)) == host_of(ONE) == "192.0.2.1"
    assert host_of(IPv4Address("TCP", "a name", 1)) == "a name"


def test_a_flood_of_refusals_is_one_line_of_the_log_in_a_minute() -> None:
    clock = Clock()
    admission = Admission("wire", Bounds(max_connections=1, max_connections_per_address=1), clock)
    with logged(LogLevel.warn) as lines:
        for _ in range(100):
            admission.enter(ONE)
    assert lines == ["wire: refusing connections, such as one from 192.0.2.1: max_connections is 1"]
    clock.advance(PERIOD)
    with logged(LogLevel.warn) as lines:
        admission.enter(ONE)
    assert len(lines) == 1


def test_the_memory_for_addresses_is_bounded() -> None:
    admission = Admission("wire", NONE, Clock())
    for number in range(MAX_ADDRESSES + 2):
        address = IPv4Address("TCP", f"10.{number // 65_536}.{number // 256 % 256}.{number % 256}", 1)
        assert admission.enter(address)
        admission.leave(address)
    assert len(admission._new) == 1
    assert admission._by_host == {}
