"""Tests of access tokens in facts: they are hidden, and nothing else is changed."""

from __future__ import annotations

import pytest

from replication.streams.access_tokens import hide_access_tokens, hide_in_row
from replication.streams.facts import Fact
from replication.wire.grammar import StreamName, Token
from tests.synapse.published import published_facts

CACHES = StreamName("caches")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ('["get_user_by_access_token",["syt_1"],1795376369152]', '["get_user_by_access_token",null,1795376369152]'),
        ('["get_user_by_access_token",["syt_1"],null,"new"]', '["get_user_by_access_token",null,null,"new"]'),
        (r'["get_user_by_access\u005ftoken",["syt_1"],5]', '["get_user_by_access_token",null,5]'),
        ('["get_user_by_access_token",["syt_1"],1e999]', '["get_user_by_access_token",null,1e999]'),
        (r'["get_user_by_id",["\u0040u:h"],5]', r'["get_user_by_id",["\u0040u:h"],5]'),
        ('["get_user_by_access_token",null,5]', '["get_user_by_access_token",null,5]'),
        ('["get_user_by_access_token",["syt', '["get_user_by_access_token",null,null]'),
        ('["get_user_by_id",["get_user_by_access_token"],5]', '["get_user_by_id",["get_user_by_access_token"],5]'),
        ('{"get_user_by_access_token":1}', '{"get_user_by_access_token":1}'),
        ('["get_user_by_id", ["@u:h"],5]', '["get_user_by_id", ["@u:h"],5]'),
    ],
)
def test_keys_that_are_access_tokens_become_null(text: str, hidden: str) -> None:
    assert hide_in_row(text) == hidden


def test_a_name_is_found_however_its_json_is_escaped() -> None:
    facts = [Fact(Token(2), ("[1]", r'["get_user_by_access\u005ftoken",["syt_1"],5]'))]
    assert hide_access_tokens(CACHES, facts) == [Fact(Token(2), ("[1]", '["get_user_by_access_token",null,5]'))]


def test_rows_of_other_streams_stay() -> None:
    facts = [Fact(Token(2), ('["get_user_by_access_token",["syt_1"],5]',))]
    assert hide_access_tokens(StreamName("orders"), facts) is facts
    assert hide_access_tokens(CACHES, facts) == [Fact(Token(2), ('["get_user_by_access_token",null,5]',))]


def test_no_token_of_the_recorded_server_is_left_and_all_other_rows_are_the_same() -> None:
    facts = [Fact(Token(token), tuple(texts)) for token, (_, texts) in published_facts()["caches"].items()]
    hidden = hide_access_tokens(CACHES, facts)
    changed = [(old, new) for old, new in zip(facts, hidden, strict=True) if old != new]
    assert len(changed) == sum("syt_" in text for fact in facts for text in fact.texts) > 10
    assert not any("syt_" in text for fact in hidden for text in fact.texts)
