"""The table of what functions count, for the names and rights of followers; the contract of stores has the rest."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from replication.errors import PositionMovedError
from replication.storage.blocking import use_store
from replication.streams.interfaces import IStreamStore, Write
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.postgres import PostgresServer

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
ONE, TWO = InstanceName("worker1"), InstanceName("worker2")


def step(after: int, upto: int, writer: InstanceName = MASTER) -> Write:
    return Write(ORDERS, writer, Token(upto), expected=Token(after), follower=ONE, counts=f"at {upto}")


async def count(store: IStreamStore) -> list[Mapping[InstanceName, str]]:
    """Store a text as one follower, and return what each of two finds."""
    await store.transaction().commit([step(0, 3)])
    return [await store.applied_counts(ORDERS, each) for each in (ONE, TWO)]


async def count_after_failures(store: IStreamStore) -> Mapping[InstanceName, str]:
    """Undo the transaction that creates the table, and one after it; return what is found after two more."""
    other = InstanceName("other")
    with suppress(PositionMovedError):
        await store.transaction().commit([step(0, 3), step(0, 5, other), step(9, 10)])
    await store.transaction().commit([step(0, 3)])
    with suppress(PositionMovedError):
        await store.transaction().commit([step(3, 5), step(9, 10)])
    await store.transaction().commit([step(3, 4), step(0, 7, other)])
    return await store.applied_counts(ORDERS, ONE)


async def move(store: IStreamStore) -> tuple[Mapping[InstanceName, Token], Mapping[InstanceName, str]]:
    """Move a position twice, and return it, with what is counted."""
    await store.transaction().commit([step(0, 3)])
    await store.transaction().commit([step(3, 5)])
    return await store.applied_positions(ORDERS, ONE), await store.applied_counts(ORDERS, ONE)


def test_one_process_uses_a_file_under_any_name(tmp_path: Path) -> None:
    assert use_store(f"sqlite:///{tmp_path}/x.db", count, read_only=False) == [{MASTER: "at 3"}, {MASTER: "at 3"}]


def test_followers_that_share_a_database_are_apart(postgres: PostgresServer) -> None:
    with postgres.database() as name:
        assert use_store(postgres.url(name), count, read_only=False) == [{MASTER: "at 3"}, {}]


def test_a_transaction_that_is_undone_leaves_no_table_and_no_belief_in_one(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with postgres.database() as name:
        for url in (f"sqlite:///{tmp_path}/x.db", postgres.url(name)):
            found = use_store(url, count_after_failures, read_only=False)
            assert found == {MASTER: "at 4", "other": "at 7"}, url


def test_a_user_who_may_create_no_table_moves_the_position_alone(postgres: PostgresServer) -> None:
    """The tables may be those of an older version, which an administrator has created."""
    with postgres.database() as name:
        use_store(postgres.url(name), _open, read_only=False)
        postgres.sql("REVOKE CREATE ON SCHEMA public FROM public; CREATE ROLE counts_nothing LOGIN", database=name)
        try:
            postgres.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO counts_nothing", database=name)
            url = postgres.url(name, "counts_nothing")
            assert use_store(url, move, read_only=False) == ({MASTER: 5}, {})
        finally:
            postgres.sql("DROP OWNED BY counts_nothing; DROP ROLE counts_nothing", database=name)


async def _open(store: IStreamStore) -> None:
    """Create the tables."""
