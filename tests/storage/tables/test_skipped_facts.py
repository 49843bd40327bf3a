"""The table of skipped facts, where the follower's name counts; the contract of stores has the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from twisted.internet.task import Clock

from replication.deferreds import Lifetime
from replication.follower.failures import FailingFacts
from replication.storage.blocking import use_store
from replication.streams.facts import Fact
from replication.streams.interfaces import IStreamStore, Write
from replication.streams.skips import SkippedFact, SkipState
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


async def skip_and_count(store: IStreamStore) -> list[int]:
    """Skip a fact as one follower, and return how many facts each of two has skipped."""
    one, two = InstanceName("worker1"), InstanceName("worker2")
    skipped = [SkippedFact(ORDERS, MASTER, Fact(Token(3), ("[]",)), SkipState.SKIPPED)]
    write = Write(ORDERS, MASTER, Token(3), expected=Token(0), follower=one, skipped=skipped)
    await store.transaction().commit([write])
    return [len(await store.skipped_facts(each, limit=9)) for each in (one, two)]


async def lose_and_load(store: IStreamStore) -> tuple[dict[InstanceName, int], list[SkipState]]:
    """Skip two facts, let a restore take back the second, and load the rest."""
    one = InstanceName("worker1")
    for token in (3, 7):
        skipped = [SkippedFact(ORDERS, MASTER, Fact(Token(token), ("[]",)), SkipState.SKIPPED)]
        requested = [SkippedFact(ORDERS, MASTER, Fact(Token(8), ()), SkipState.SKIP_REQUESTED)]
        write = Write(ORDERS, MASTER, Token(token), follower=one, skipped=[*skipped, *requested])
        await store.transaction().commit([write])
    failing = FailingFacts(ORDERS, Lifetime(Clock()))
    await failing.load(store, one, {MASTER: Token(7)})
    assert failing.counts == {MASTER: 2}
    await failing.load(store, one, {MASTER: Token(5)})
    return dict(failing.counts), [each.state for each in await store.skipped_facts(one, limit=9)]


def test_what_was_skipped_after_a_restored_backup_is_forgotten(tmp_path: Path, postgres: PostgresServer) -> None:
    """``pg_restore --clean`` keeps the tables that are not in the dump; a skip may be requested above the position."""
    expected = {MASTER: 1}, [SkipState.SKIP_REQUESTED, SkipState.SKIPPED]
    assert use_store(f"sqlite:///{tmp_path}/x.db", lose_and_load, read_only=False) == expected
    with postgres.database() as name:
        assert use_store(postgres.url(name), lose_and_load, read_only=False) == expected


def test_one_process_uses_a_file_under_any_name(tmp_path: Path) -> None:
    assert use_store(f"sqlite:///{tmp_path}/x.db", skip_and_count, read_only=False) == [1, 1]


def test_the_reason_may_have_characters_that_the_database_lacks(postgres: PostgresServer) -> None:
    async def skip(store: IStreamStore) -> str:
        skipped = [SkippedFact(ORDERS, MASTER, Fact(Token(3), ("[]",)), SkipState.SKIPPED, "ValueError: 5 €")]
        write = Write(ORDERS, MASTER, Token(3), expected=Token(0), follower=MASTER, skipped=skipped)
        await store.transaction().commit([write])
        return (await store.skipped_facts(MASTER, limit=1))[0].error

    for encoding, reason in (("LATIN1", "ValueError: 5 \\u20ac"), ("UTF8", "ValueError: 5 €")):
        name = f"encoded_{encoding.lower()}"
        postgres.sql(f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
        try:
            assert use_store(postgres.url(name), skip, read_only=False) == reason
        finally:
            postgres.sql(f"DROP DATABASE {name} WITH (FORCE)")


def test_followers_that_share_a_database_are_apart(postgres: PostgresServer) -> None:
    with postgres.database() as name:
        assert use_store(postgres.url(name), skip_and_count, read_only=False) == [1, 0]


@pytest.mark.parametrize("token", [2**62])
def test_a_large_token_is_kept(tmp_path: Path, token: int) -> None:
    async def skip(store: IStreamStore) -> int:
        skipped = [SkippedFact(ORDERS, MASTER, Fact(Token(token), ()), SkipState.SKIPPED)]
        write = Write(ORDERS, MASTER, Token(token), expected=Token(0), follower=MASTER, skipped=skipped)
        await store.transaction().commit([write])
        return (await store.skipped_facts(MASTER, limit=9))[0].fact.token

    assert use_store(f"sqlite:///{tmp_path}/x.db", skip, read_only=False) == token
