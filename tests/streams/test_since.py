"""Since a token: pages of any size add up to every fact of every writer, once and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from replication.streams.facts import Fact
from replication.streams.positions import MultiWriterToken, token_of
from replication.streams.seams import Page
from replication.streams.since import Since, facts_since
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

T = TypeVar("T")
ORDERS = StreamName("orders")
ONE, TWO, THREE = (InstanceName(each) for each in ("one", "two", "three"))


def result_of(work: Coroutine[object, object, T]) -> T:
    """Run what waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


class History:
    """Facts by writer, in pages."""

    def __init__(self, owners: Sequence[InstanceName], sizes: Sequence[int] = ()) -> None:
        self.facts: dict[InstanceName, list[Fact]] = {}
        for token, owner in enumerate(owners, 2):
            rows = sizes[token % len(sizes)] if sizes else 1
            self.facts.setdefault(owner, []).append(Fact(Token(token), (f"[{token}]",) * rows))

    async def fetch(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        assert stream == ORDERS
        assert after < upto
        found: list[Fact] = []
        for fact in self.facts.get(writer, []):
            if after < fact.token <= upto:
                if found and sum(len(each.texts) for each in found) + len(fact.texts) > limit:
                    return Page(found, found[-1].token, limited=True)
                found.append(fact)
        return Page(found, upto, limited=False)

    def since(
        self,
        after: MultiWriterToken,
        positions: Mapping[InstanceName, Token],
        limit: int = 1_000,
        max_bytes: int = 10**6,
    ) -> Since:
        return result_of(facts_since(self.fetch, ORDERS, after, positions, limit=limit, max_bytes=max_bytes))


def test_only_what_is_between_each_writers_two_places_comes() -> None:
    history = History([ONE, TWO, ONE, TWO, ONE, TWO])
    since = history.since(MultiWriterToken(Token(2), {TWO: Token(5)}), {ONE: Token(4), TWO: Token(7)})
    assert [(each.token, each.writer) for each in since.written] == [(4, ONE), (7, TWO)]
    assert (since.upto, since.limited) == (MultiWriterToken(Token(4), {TWO: Token(7)}), False)


def test_where_nobody_is_further_nothing_comes_and_the_token_stays() -> None:
    after = MultiWriterToken(Token(5), {TWO: Token(9)})
    assert History([]).since(after, {ONE: Token(3)}) == Since([], after, limited=False)
    assert History([]).since(after, {}) == Since([], after, limited=False)


def test_a_long_fact_comes_alone_and_whole() -> None:
    history = History([ONE, TWO, ONE], [3])
    since = history.since(token_of({}), {ONE: Token(4), TWO: Token(4)}, limit=1)
    assert [each.token for each in since.written] == [2]
    since = history.since(since.upto, {ONE: Token(4), TWO: Token(4)}, limit=1_000, max_bytes=1)
    assert [each.token for each in since.written] == [3]
    assert since.limited


@given(
    owners=st.lists(st.sampled_from([ONE, TWO, THREE]), max_size=30),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    limits=st.lists(st.integers(1, 8), min_size=1),
    max_bytes=st.sampled_from([1, 500, 10**6]),
    behind=st.integers(0, 10),
)
def test_pages_of_every_size_add_up_to_the_whole(
    owners: list[InstanceName], sizes: list[int], limits: list[int], max_bytes: int, behind: int
) -> None:
    history = History(owners, sizes)
    last = len(owners) + 1
    positions = {ONE: Token(last), TWO: Token(max(1, last - behind)), THREE: Token(last)}
    want = [token for token, owner in enumerate(owners, 2) if token <= positions[owner]]
    token, seen, limited, turns = MultiWriterToken(Token(0)), list[int](), True, 0
    while limited:
        since = history.since(token, positions, limits[turns % len(limits)], max_bytes)
        assert token <= since.upto
        seen += [each.token for each in since.written]
        token, limited = since.upto, since.limited
        turns += 1
        assert turns <= len(owners) + 2, "it never ends"
    assert seen == want
    assert token == token_of(positions)
