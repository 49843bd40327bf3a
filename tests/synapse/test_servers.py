"""Tests of the rows of streams about servers."""

from __future__ import annotations

from replication.synapse.servers import (
    CACHES,
    FEDERATION,
    GROUPS,
    PRESENCE_FEDERATION,
    CachesRow,
    FederationRow,
    GroupsRow,
    PresenceFederationRow,
)


def test_the_keys_of_a_cache_may_be_null() -> None:
    assert CACHES.read_row('["get_user","@u:h",1]'.replace('"@u:h"', "null")) == CachesRow("get_user", None, 1)
    assert CACHES.read_row('["get_user",["@u:h"],null]') == CachesRow("get_user", ["@u:h"], None)


def test_rows_of_the_other_streams_are_typed() -> None:
    assert PRESENCE_FEDERATION.read_row('["h.example","@u:h"]') == PresenceFederationRow("h.example", "@u:h")
    assert FEDERATION.read_row('["e",{"edu_type":"m.typing"}]') == FederationRow("e", {"edu_type": "m.typing"})
    text = '["+g:h","@u:h","membership",{"membership":"join"}]'
    assert GROUPS.read_row(text) == GroupsRow("+g:h", "@u:h", "membership", {"membership": "join"})
