"""The words of the live page and of a terminal: the documents and the style have them all."""

from __future__ import annotations

import re
from typing import Final

import pytest

from replication.streams.interfaces import WriterStatus
from replication.web.live import words
from replication.wire.grammar import InstanceName, Token
from tests.docs.pages import code, page, section, table

STATES: Final = [code(row["state"])[0] for row in table(page("command-line.md"), "### States")]
SHOWN: Final = section(page("how-to/watch.md"), "## What it shows")


def writer(position: int, published: int, state: str = "catching up", source: str | None = None) -> WriterStatus:
    return WriterStatus(InstanceName("w"), Token(position), Token(published), state, source=source)


def test_every_state_that_needs_attention_is_documented_and_the_others_come_after_it() -> None:
    assert {*words.URGENT} < {*STATES}
    places = {state: words.urgency(state, words.BRIEF + 1) for state in STATES}
    assert sorted(places, key=lambda state: places[state])[: len(words.URGENT)] == [*words.URGENT]
    assert {places[state] for state in STATES if state not in words.URGENT} == {len(words.URGENT)}


def test_a_short_catch_up_moves_no_row() -> None:
    assert words.urgency("catching up", words.BRIEF) == words.urgency("live", 0)


def test_the_states_of_the_code_are_those_of_the_documents() -> None:
    listed = re.search(r"``state`` is (.*?)\.  ``error``", WriterStatus.__doc__ or "", re.DOTALL)
    assert listed is not None
    assert sorted(" ".join(each.split()) for each in re.findall(r"``(.*?)``", listed[1], re.DOTALL)) == sorted(STATES)


@pytest.mark.parametrize("head", [each.lstrip("#") for each in words.STREAM_HEADS[3:]])
def test_a_column_is_in_the_guide(head: str) -> None:
    assert f"`{head}`" in SHOWN


def test_a_cell_stands_below_each_head() -> None:
    cells = words.stream_cells(writer(5, 9, "live"), 1_000, (6, 7.4), None)
    assert dict(zip(words.STREAM_HEADS, cells, strict=True)) == {
        "stream": "",
        "writer": "w",
        "state": "live",
        "#position": "5",
        "#lag": "4",
        "#IDs/s": "-",
        "10 min": "",
        "#open": "1,000",
        "oldest open": "6 for 7 s",
        "#found late": "0",
        "#left out": "0",
    }


@pytest.mark.parametrize(
    ("status", "speed", "shown"),
    [
        (writer(2_500, 10_000, source="a folder"), 25.0, "catching up from a folder: 25 %, 5 min left"),
        (writer(2_500, 10_000), 0.0, "catching up"),
        (writer(2_500, 10_000), None, "catching up"),
        (writer(9_000, 10_000), 10.0, "catching up"),  # 1,000 IDs
        (writer(8_999, 10_000), 100.0, "catching up: 90 %, 10 s left"),
        (writer(1, 10_000, "stopped", source="a folder"), 1.0, "stopped"),
    ],
)
def test_a_catch_up_has_where_from_how_far_and_when_it_is_done(
    status: WriterStatus, speed: float | None, shown: str
) -> None:
    assert words.state_of(status, speed) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "120 min"), (7_200, "2 h")]
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, shown: str) -> None:
    assert words.duration(seconds) == shown
