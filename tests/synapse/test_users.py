"""Tests of the rows of streams about users."""

from __future__ import annotations

from replication.synapse.users import (
    ACCOUNT_DATA,
    PRESENCE,
    PUSH_RULES,
    PUSHERS,
    TAG_ACCOUNT_DATA,
    AccountDataRow,
    PresenceRow,
    PusherRow,
    PushRulesRow,
    TagAccountDataRow,
)


def test_presence_has_booleans_from_both_databases() -> None:
    row = PresenceRow("@u:h", "online", 3, 2, 1, None, True)
    assert PRESENCE.read_row('["@u:h","online",3,2,1,null,1]') == row
    assert PRESENCE.read_row('["@u:h","online",3,2,1,null,true]') == row


def test_rows_of_the_other_streams_are_typed() -> None:
    assert PUSH_RULES.read_row('["@u:h"]') == PushRulesRow("@u:h")
    assert PUSHERS.read_row('["@u:h","app","key",true]') == PusherRow("@u:h", "app", "key", True)
    assert ACCOUNT_DATA.read_row('["@u:h",null,"m.direct"]') == AccountDataRow("@u:h", None, "m.direct")
    text = '["@u:h","!r:h","{\\"m.favourite\\":{}}"]'
    assert TAG_ACCOUNT_DATA.read_row(text) == TagAccountDataRow("@u:h", "!r:h", '{"m.favourite":{}}')
