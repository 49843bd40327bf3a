"""The lines that ``replication tail`` prints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from replication.cli.fact_lines import RETRY_AFTER, ColouredLines, encode_json, encode_rdata, encode_typed, escape_rows
from replication.errors import CatchUpError
from replication.streams.facts import Fact
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.synapse.recorded import lines_of, recorded_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts)


def test_a_row_keeps_its_bytes() -> None:
    facts = [fact(2, '["\\u00e9",1.0]', "{}"), fact(3), fact(4, '"é"')]
    assert encode_rdata(ORDERS, MASTER, facts).decode() == (
        'RDATA orders master batch ["\\u00e9",1.0]\nRDATA orders master 2 {}\nRDATA orders master 4 "é"\n'
    )
    assert encode_json(ORDERS, MASTER, facts[2:]).decode() == (
        '{"stream":"orders","instance":"master","token":4,"row":"é"}\n'
    )


def test_what_a_terminal_would_obey_is_printed_as_json_escapes_it() -> None:
    text = '["\x7f\x9b31m é\u202e\U000e0001",\t1,\r2]'
    escaped = encode_json(ORDERS, MASTER, [fact(4, text)])
    assert json.loads(escaped)["row"] == ["\x7f\x9b31m é\u202e\U000e0001", 1, 2]
    assert rb'"\u007f\u009b31m ' + "é".encode() + rb'\u202e\udb40\udc01"' in escaped
    assert escape_rows(b"RDATA orders master 2 {}\n") == b"RDATA orders master 2 {}\n"


def test_a_row_that_is_longer_than_a_line_of_the_wire_is_printed_all_the_same() -> None:
    text = '"' + "x" * 20_000 + '"'
    assert encode_rdata(ORDERS, MASTER, [fact(2, text)]).decode() == f"RDATA orders master 2 {text}\n"


def test_json_and_types_name_the_fields_of_a_synapses_streams() -> None:
    events = StreamName("events")
    facts = [fact(2, '["state",["!r","t","\\ud800",null]]'), fact(3, '["mine","other fields"]')]
    assert encode_json(events, MASTER, facts).decode() == (
        '{"stream":"events","instance":"master","token":2,"row":["state",["!r","t","\\ud800",null]],'
        '"fields":{"kind":"state","room_id":"!r","type":"t","state_key":"\\ud800","event_id":null}}\n'
        '{"stream":"events","instance":"master","token":3,"row":["mine","other fields"]}\n'
    )
    assert encode_typed(events, MASTER, facts).decode() == (
        "events master 2 StateRow(data=State(room_id='!r', type='t', state_key='\\ud800', event_id=None))\n"
        'events master 3 ["mine","other fields"]\n'
    )
    assert encode_typed(ORDERS, MASTER, [fact(2, '"é"')]).decode() == 'orders master 2 "é"\n'


@pytest.mark.parametrize("name", ["synapse-sqlite", "synapse-postgres"])
def test_every_recorded_row_has_fields(name: str) -> None:
    for stream, facts in recorded_facts(name).items():
        recorded = [Fact(Token(token), tuple(rows)) for token, rows in facts.items()]
        for line in encode_json(StreamName(stream), MASTER, recorded).splitlines():
            assert json.loads(line)["fields"]
        assert encode_typed(StreamName(stream), MASTER, recorded).count(b"Row(") == len(lines_of(stream, facts))


class Names:
    """A source of names that answers when the test does."""

    def __init__(self) -> None:
        self.asked: list[Deferred[dict[str, Sequence[str]]]] = []

    async def row_names(self) -> Any:
        self.asked.append(Deferred())
        return await self.asked[-1]


def coloured(monkeypatch: pytest.MonkeyPatch, source: Names | None = None, **environment: str) -> ColouredLines:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return ColouredLines(source)  # type: ignore[arg-type]


def test_on_a_terminal_fields_have_names_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Names()
    lines = coloured(monkeypatch, source)
    facts = [fact(2, '["a","paid"]', '["b"]')]
    before = lines(ORDERS, MASTER, facts).decode()
    assert '["a", "paid"]\n' in before
    source.asked[0].callback({"orders": ["order_id", "state"]})
    first, second = lines(ORDERS, MASTER, facts).decode().splitlines()
    assert first == (
        "\x1b[36morders\x1b[0m \x1b[1m2\x1b[0m \x1b[2mmaster\x1b[0m "
        '\x1b[2morder_id\x1b[0m="a"  \x1b[2mstate\x1b[0m="paid"'
    )
    assert second.endswith('["b"]')
    assert len(source.asked) == 1


def test_without_colours_the_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = coloured(monkeypatch, NO_COLOR="1")
    assert lines(StreamName("events"), MASTER, [fact(2, '["state",["!r","t","",null]]')]).decode() == (
        'events 2 master kind="state"  room_id="!r"  type="t"  state_key=""  event_id=null\n'
    )


def test_nothing_of_a_row_reaches_the_terminal_as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = coloured(monkeypatch, NO_COLOR="1")
    shown = lines(ORDERS, MASTER, [fact(2, '["\x9b31m\\u001b[2J\u202e"]')]).decode()
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "\u202e" not in shown


def test_names_are_requested_again_some_time_after_a_failure() -> None:
    source = Names()
    clock = Clock()
    lines = ColouredLines(source, clock.seconds)  # type: ignore[arg-type]
    lines.read_names()
    source.asked[0].errback(CatchUpError("away"))
    for _ in range(10):  # a busy stream requests them no more often
        lines(ORDERS, MASTER, [fact(2, "[1]")])
    assert len(source.asked) == 1
    clock.advance(RETRY_AFTER)
    lines(ORDERS, MASTER, [fact(2, "[1]")])
    assert len(source.asked) == 2
