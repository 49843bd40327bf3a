"""Transactions of the application: an INSERT of its own and a fact, durable together, 1, 8 and 32 at once.

``bare`` is the database's driver alone, which runs the same two INSERTs in a thread per caller: sqlite3 (WAL, FULL) on
one connection behind a lock, psycopg on a connection per thread.  ``run_interaction`` and ``reserve`` are the two ways
of this package.  The three run in turns in every round, and the ratios are of one round.
"""

from __future__ import annotations

import itertools
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred, gatherResults

from replication.bench.cluster import POSTGRES, database_kinds
from replication.bench.daemons import BenchMaster, serve_master, short_row
from replication.bench.processes import ChildProcess
from replication.bench.series import Sample, Series, Stopwatch
from replication.wire.grammar import encode_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions
    from replication.streams.interfaces import ISqlExecutor
    from replication.writer.interaction import NewFact

AT_ONCE: Final = 1, 8, 32
TRANSACTIONS: Final = 2_000  # of a round

_MARKS: Final = {"sqlite": "?", "postgresql": "%s"}
_OWN: Final = "CREATE TABLE orders (id TEXT NOT NULL, state TEXT NOT NULL)"
_INSERT_OWN: Final = "INSERT INTO orders (id, state) VALUES ({0}, {0})"
_FACTS: Final = (
    "CREATE TABLE stream_bare (stream_id BIGINT NOT NULL, ord INTEGER NOT NULL, instance_name TEXT NOT NULL, "
    '"row" TEXT NOT NULL, PRIMARY KEY (stream_id, ord))'
)
_INSERT_FACT: Final = 'INSERT INTO stream_bare (stream_id, ord, instance_name, "row") VALUES ({1}, 0, {0}, {0})'


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each database, and each number of callers."""
    transactions = options.size(TRANSACTIONS, 64)
    with database_kinds() as kinds:
        for kind in kinds:
            with ExitStack() as stack:
                master = stack.enter_context(ChildProcess(serve_master, kind.make()))
                master.call(_create)
                bare = stack.enter_context(ChildProcess(_bare(kind), kind.make()))
                for callers in AT_ONCE:
                    rounds = [_round(kind, master, bare, callers, transactions) for _ in range(options.rounds)]
                    yield from _series(f"{kind.name}, {callers} at once", rounds)


def _round(
    kind: DatabaseKind, master: ChildProcess, bare: ChildProcess, callers: int, transactions: int
) -> Mapping[str, Sample]:
    """Measure the three ways in turn, with a part of the transactions for each caller."""
    each = transactions // callers
    return {
        "bare": bare.call(_Bare.run, callers, each),
        "run_interaction": master.call(_interact, callers, each),
        "reserve": master.call(_reserve, callers, each, "%s" if kind.name == POSTGRES else "?"),
    }


def _series(what: str, rounds: Sequence[Mapping[str, Sample]]) -> Iterator[Series]:
    for name in rounds[0]:
        variant, samples = f"{what}, {name}", [found[name] for found in rounds]
        yield Series(variant, "transactions", "transactions/s", [one.count / one.wall for one in samples])
        yield Series(variant, "per CPU second", "transactions/s", [one.count / one.cpu for one in samples])
        if name != "bare":
            yield Series(variant, "ratio to bare", "x", [found["bare"].wall / found[name].wall for found in rounds])


# ---- in the master's process


async def _create(master: BenchMaster) -> None:
    await master.writer.run_interaction(lambda txn, _: txn.execute(_OWN))


def _order(number: int) -> tuple[str, str]:
    return f"o{number}", "placed"


def _place(txn: ISqlExecutor, fact: NewFact, number: int) -> None:
    txn.execute(_INSERT_OWN.format(_MARKS[txn.dialect]), _order(number))
    fact.write(short_row(number))


async def _interact(master: BenchMaster, callers: int, each: int) -> Sample:
    async def call() -> None:
        for number in range(each):
            await master.writer.run_interaction(_place, number)

    return await _together(call, callers, each)


async def _reserve(master: BenchMaster, callers: int, each: int, mark: str) -> Sample:
    insert = _INSERT_OWN.format(mark)

    async def call() -> None:
        for number in range(each):
            async with master.writer.reserve() as fact:
                await fact.execute(insert, _order(number))
                await fact.write(short_row(number))

    return await _together(call, callers, each)


async def _together(call: Callable[[], Any], callers: int, each: int) -> Sample:
    watch = Stopwatch()
    await gatherResults([Deferred.fromCoroutine(call()) for _ in range(callers)])
    return watch.sample(callers * each)


# ---- in the process of the bare driver


class _Bare:
    """A program with the driver alone."""

    def run(self, callers: int, each: int) -> Sample:
        """Run ``each`` transactions in each of so many threads."""
        with ThreadPoolExecutor(callers) as threads:
            watch = Stopwatch()
            list(threads.map(self.call, [each] * callers))
            return watch.sample(callers * each)

    def call(self, each: int) -> None:
        """Run transactions, one after the other."""
        raise NotImplementedError


class _BareSqlite(_Bare):
    def __init__(self, _: object, database: str) -> None:
        self._connection = sqlite3.connect(
            database.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False
        )
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", _OWN, f"{_FACTS} WITHOUT ROWID"):
            self._connection.execute(statement)
        self._lock = Lock()
        self._ids = itertools.count(2)

    def call(self, each: int) -> None:
        execute = self._connection.execute
        own, fact = _INSERT_OWN.format("?"), _INSERT_FACT.format("?", "?")
        for number in range(each):
            text = encode_row(short_row(number))
            with self._lock:
                execute("BEGIN IMMEDIATE")
                execute(own, _order(number))
                execute(fact, (next(self._ids), "master", text))
                execute("COMMIT")


class _BarePostgres(_Bare):
    def __init__(self, _: object, database: str) -> None:
        import psycopg  # noqa: PLC0415 (an extra)

        self._connections = [psycopg.connect(database) for _ in range(max(AT_ONCE))]
        for statement in (_OWN, _FACTS, "CREATE SEQUENCE ids"):
            self._connections[0].execute(statement)
        self._connections[0].commit()

    def call(self, each: int) -> None:
        connection = self._connections.pop()
        own, fact = _INSERT_OWN.format("%s"), _INSERT_FACT.format("%s", "nextval('ids')")
        for number in range(each):
            text = encode_row(short_row(number))
            connection.execute(own, _order(number))
            connection.execute(fact, ("master", text))
            connection.commit()
        self._connections.append(connection)


def _bare(kind: DatabaseKind) -> type[_Bare]:
    return _BarePostgres if kind.name == POSTGRES else _BareSqlite
