"""The in-memory log: against a model, and at its limits."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from replication.streams import memory_log as module
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import InMemoryLogStatus
from replication.streams.memory_log import InMemoryLog
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

QUEUE = StreamDefinition("federation", row=("type", "data"), in_memory=True)
TYPING = StreamDefinition("typing", row=("room_id", "user_ids"), key=["room_id"], in_memory=True)
ONE, TWO = InstanceName("sender1"), InstanceName("sender2")


def fact(token: int, *rows: object) -> Fact:
    return Fact(Token(token), tuple(map(grammar.encode_row, rows)))


def tokens(kept: InMemoryLog, after: int = 0, upto: int = 1_000_000, limit: int = 1_000_000) -> list[int]:
    return [each.token for each in kept.page(after=Token(after), upto=Token(upto), limit=limit).facts]


def test_pages_are_like_a_stores() -> None:
    """Trap 13: a fact is never cut, and a limited page has the token up to which it is complete."""
    kept = InMemoryLog(QUEUE)
    kept.add([fact(2, ["e", 1], ["e", 2]), fact(3), fact(4, ["e", 3])], 0.0)
    kept.add([fact(7, ["e", 4])], 0.0)
    assert len(kept) == 3
    page = kept.page(after=Token(1), upto=Token(9), limit=1)
    assert ([each.token for each in page.facts], page.upto, page.limited) == ([2], 2, True)
    page = kept.page(after=Token(2), upto=Token(9), limit=2)
    assert ([each.token for each in page.facts], page.upto, page.limited) == ([4, 7], 9, False)
    assert tokens(kept, 4, 6) == []


def test_facts_are_dropped_after_300_s() -> None:
    kept = InMemoryLog(QUEUE)
    kept.add([fact(2, ["e", 1])], 0.0)
    kept.add([fact(3, ["e", 2])], 299.0)
    assert tokens(kept) == [2, 3]
    kept.expire(300.0)
    assert tokens(kept) == [3]
    kept.add([], 599.0)
    assert (len(kept), kept.bytes) == (0, 0)


def test_facts_that_all_senders_have_acknowledged_are_dropped() -> None:
    kept = InMemoryLog(QUEUE)
    kept.add([fact(each, ["e", each]) for each in range(2, 8)], 0.0)
    kept.acknowledge(ONE, Token(3))
    assert tokens(kept) == [4, 5, 6, 7]
    kept.acknowledge(TWO, Token(2))
    kept.acknowledge(ONE, Token(6))
    assert tokens(kept) == [4, 5, 6, 7]
    kept.acknowledge(TWO, Token(5))
    kept.acknowledge(TWO, Token(4))
    assert tokens(kept) == [6, 7]
    assert kept.acknowledged == {ONE: 6, TWO: 5}


def test_the_last_row_of_each_key_is_kept_at_any_age() -> None:
    kept = InMemoryLog(TYPING)
    kept.add([fact(2, ["!a", ["@u"]], ["!b", []]), fact(3, ["!a", []], ["!a", ["@v"]])], 0.0)
    kept.add([fact(5, ["!b", ["@w"]])], 1_000.0)
    assert kept.page(after=Token(0), upto=Token(5), limit=10).facts == [
        fact(3, ["!a", ["@v"]]),
        fact(5, ["!b", ["@w"]]),
    ]
    kept.drop(Token(3))
    assert tokens(kept) == [5]


def test_the_oldest_facts_are_dropped_beyond_the_memory_limit() -> None:
    kept = InMemoryLog(QUEUE, max_bytes=10_000)
    for token in range(2, 1_000):
        kept.add([fact(token, ["e", "x" * 50])], 0.0)
        assert kept.bytes <= 10_000
    assert tokens(kept)[-1] == 999
    assert tokens(kept) == [*range(tokens(kept)[0], 1_000)]
    assert len(kept) > 20
    kept.add([fact(1_000, ["e", "x" * 20_000])], 0.0)
    assert (len(kept), kept.bytes) == (0, 0)


def test_the_facts_may_take_exactly_the_memory_limit() -> None:
    facts = [fact(2, ["e", 1]), fact(3, ["e", 2])]
    size = InMemoryLog(QUEUE)
    size.add(facts, 0.0)
    for limit, left in ((size.bytes, [2, 3]), (size.bytes - 1, [3])):
        kept = InMemoryLog(QUEUE, max_bytes=limit)
        kept.add(facts, 0.0)
        assert tokens(kept) == left


def test_replaced_rows_are_removed_from_memory() -> None:
    kept = InMemoryLog(TYPING)
    for token in range(2, 10_000):
        kept.add([fact(token, [f"!{token % 10}", []])], 0.0)
    assert len(kept) <= 1_020
    assert tokens(kept) == [*range(9_990, 10_000)]


@given(st.data())
def test_with_a_key_it_equals_a_dict_of_the_newest_rows(data: st.DataObject) -> None:
    kept, model = InMemoryLog(TYPING), dict[str, tuple[int, object]]()
    token = 1
    with patch.object(module, "_MIN_REPLACED", 2):
        for _ in range(data.draw(st.integers(0, 30))):
            if data.draw(st.integers(0, 3)):
                token += data.draw(st.integers(1, 3))
                rows = data.draw(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=3))
                kept.add([fact(token, *rows)], 0.0)
                model |= {key: (token, value) for key, value in rows}
            else:
                upto = data.draw(st.integers(0, token))
                kept.drop(Token(upto))
                model = {key: each for key, each in model.items() if each[0] > upto}
    assert {*kept._newest.values()} == {each for each, _ in model.values()}
    assert kept._replaced == sum(map(len, kept._keys)) - len(kept._newest)
    page = kept.page(after=Token(0), upto=Token(token), limit=1_000)
    assert {key: (each.token, value) for each in page.facts for key, value in each.rows} == model
    assert sum(len(each.texts) for each in page.facts) == len(model)


def test_a_sender_beyond_the_limit_is_not_waited_for_and_known_ones_are() -> None:
    kept = InMemoryLog(QUEUE)
    kept.add([fact(token, ["e"]) for token in range(2, 6)], 0.0)
    with patch.object(module, "MAX_SENDERS", 2):
        for sender, token in (("a", 2), ("b", 3), ("c", 5), ("a", 5)):
            kept.acknowledge(InstanceName(sender), Token(token))
    assert sorted(kept.acknowledged.items()) == [("a", 5), ("b", 3)]
    assert tokens(kept) == [4, 5]


def test_the_status_shows_the_facts_their_memory_and_the_acknowledgements() -> None:
    kept = InMemoryLog(QUEUE)
    kept.add([fact(2, ["e"]), fact(3, ["e"])], 0.0)
    kept.acknowledge(InstanceName("a"), Token(2))
    status = kept.status()
    assert status == InMemoryLogStatus(1, kept.bytes, {InstanceName("a"): Token(2)})
    kept.acknowledge(InstanceName("a"), Token(3))
    assert status.acknowledged == {"a": 2}, "a status does not change later"


def test_dropped_facts_leave_no_key_and_no_count_of_replaced_rows() -> None:
    kept = InMemoryLog(TYPING)
    kept.add([fact(2, ["!a", 1], ["!b", 1]), fact(3, ["!a", 2]), fact(4, ["!a", 3], ["!c", 1])], 0.0)
    assert (kept._replaced, kept._newest) == (2, {'["!a"]': 4, '["!b"]': 2, '["!c"]': 4})
    kept.drop(Token(2))
    assert (kept._replaced, kept._newest) == (1, {'["!a"]': 4, '["!c"]': 4})
    kept.drop(Token(4))
    assert (kept._replaced, kept._newest, kept.bytes) == (0, {}, 0)
