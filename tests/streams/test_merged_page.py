"""Merged pages: pages of any size have every fact of every writer, once and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import FactsGoneError
from replication.storage.contract import facts_gone
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.streams.merged_page import MergedPage, read_merged_page, read_page_since
from replication.streams.positions import MultiWriterToken, token_of
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

T = TypeVar("T")
ORDERS = StreamName("orders")
ONE, TWO, THREE = (InstanceName(each) for each in ("one", "two", "three"))


def result_of(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine that never waits."""
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
    ) -> MergedPage:
        return result_of(read_merged_page(self.fetch, ORDERS, after, positions, limit=limit, max_bytes=max_bytes))


def test_a_page_has_the_facts_between_each_writers_two_positions() -> None:
    history = History([ONE, TWO, ONE, TWO, ONE, TWO])
    since = history.since(MultiWriterToken(Token(2), {TWO: Token(5)}), {ONE: Token(4), TWO: Token(7)})
    assert [(each.token, each.writer) for each in since.written] == [(4, ONE), (7, TWO)]
    assert (since.upto, since.limited) == (MultiWriterToken(Token(4), {TWO: Token(7)}), False)


def test_without_new_facts_the_page_is_empty_and_the_token_the_same() -> None:
    after = MultiWriterToken(Token(5), {TWO: Token(9)})
    assert History([]).since(after, {ONE: Token(3)}) == MergedPage([], after, limited=False)
    assert History([]).since(after, {}) == MergedPage([], after, limited=False)


def test_the_position_of_a_writer_does_not_go_back() -> None:
    since = History([ONE] * 6).since(MultiWriterToken(Token(5), {TWO: Token(9)}), {ONE: Token(7), TWO: Token(8)})
    assert [each.token for each in since.written] == [6, 7]
    assert since.upto == MultiWriterToken(Token(7), {TWO: Token(9)})


def test_a_page_of_a_source_that_lags_ends_the_page_of_all_writers() -> None:
    class Lagging(History):
        async def fetch(
            self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
        ) -> Page:
            reached = min(upto, Token(4)) if writer == ONE else upto
            return await super().fetch(stream, writer, after=after, upto=reached, limit=limit)

    positions = {ONE: Token(6), TWO: Token(7)}
    lagging, whole = Lagging([ONE, TWO] * 3), History([ONE, TWO] * 3)
    first = lagging.since(MultiWriterToken(Token(1)), positions)
    assert [each.token for each in first.written] == [2, 3, 4]
    assert (first.upto, first.limited) == (MultiWriterToken(Token(4)), True)
    assert [each.token for each in whole.since(first.upto, positions).written] == [5, 6, 7]


def test_a_long_fact_is_alone_and_whole() -> None:
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
def test_pages_of_every_size_have_every_fact_once(
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


@given(
    owners=st.lists(st.sampled_from([ONE, TWO, THREE]), max_size=30),
    growth=st.lists(st.tuples(st.sampled_from([ONE, TWO, THREE]), st.integers(1, 6)), max_size=20),
    limit=st.integers(1, 8),
)
def test_the_order_over_answers_is_that_of_each_writer_and_of_the_tokens_number(
    owners: list[InstanceName], growth: list[tuple[InstanceName, int]], limit: int
) -> None:
    """Writers advance between answers, so IDs may go back; none is at or below the number S of an earlier token."""
    history = History(owners)
    positions = dict.fromkeys([ONE, TWO, THREE], Token(1))
    token, seen = MultiWriterToken(Token(0)), dict[InstanceName, list[int]]()
    for writer, more in growth:
        positions[writer] = Token(positions[writer] + more)
        since = history.since(token, positions, limit)
        tokens = [each.token for each in since.written]
        assert tokens == sorted(tokens)
        assert all(each > token.stream for each in tokens)
        assert since.upto.stream >= token.stream
        for each in since.written:
            seen.setdefault(each.writer, []).append(each.token)
        token = since.upto
    for writer, received in seen.items():
        expected = [each.token for each in history.facts[writer] if each.token <= token.of(writer)]
        assert received == expected


class Texts:
    """A codec whose token of several writers is a text with a number for each."""

    numbers: ClassVar = {ONE: 1, TWO: 2, THREE: 3}

    async def encode(self, token: MultiWriterToken) -> str:
        return token.encode(self.numbers)


AFTER = MultiWriterToken(Token(2), {TWO: Token(4)})


def error_since(error: FactsGoneError) -> FactsGoneError:
    """Return what is raised for a page after ``AFTER`` if the pages of TWO end with ``error``."""
    history = History([ONE, TWO, ONE, TWO])

    async def fetch(stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        if writer == TWO:
            raise error
        return await history.fetch(stream, writer, after=after, upto=upto, limit=limit)

    with pytest.raises(FactsGoneError) as raised:
        result_of(read_page_since(Texts().encode, fetch, ORDERS, AFTER, {ONE: Token(9), TWO: Token(9)}, limit=9))
    return raised.value


def test_a_page_comes_with_the_text_of_its_last_token() -> None:
    history = History([ONE, TWO, ONE, TWO])
    reading = read_page_since(
        Texts().encode, history.fetch, ORDERS, AFTER, {ONE: Token(4), TWO: Token(5)}, limit=9, all_known=False
    )
    page, text = result_of(reading)
    assert [each.token for each in page.written] == [4, 5]
    assert text == "m2~1.4~2.5"


def test_of_facts_that_are_gone_the_error_has_the_token_that_leaves_out_nothing_else() -> None:
    error = error_since(facts_gone(ORDERS, TWO, Token(6)))
    cure = "get them from segments, or go on with since=m2~2.6"
    assert str(error) == f"facts of orders by two up to 6 are gone: {cure}"
    assert (error.stream, error.writer, error.upto, error.since) == (ORDERS, TWO, 6, "m2~2.6")


def test_the_cure_in_the_answer_of_a_source_is_replaced_too() -> None:
    """A relay fetches pages over HTTP: the message of its source names an ID."""
    text = f"http://one: HTTP 410: {facts_gone(ORDERS, TWO, Token(6))}; name a folder"
    error = error_since(FactsGoneError(text, stream=ORDERS, writer=TWO, upto=Token(6)))
    gone = "facts of orders by two up to 6 are gone: get them from segments, or go on with since=m2~2.6"
    assert str(error) == f"http://one: HTTP 410: {gone}; name a folder"


def test_where_a_source_never_has_the_facts_there_is_no_token() -> None:
    error = FactsGoneError("the folder has no segments", stream=ORDERS, writer=TWO)
    assert error_since(error) is error
    assert error.since is None
