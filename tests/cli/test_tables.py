"""Tables that fit a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from replication.cli.tables import PIPE_WIDTH, FittingTable, make_console


def shown(table: FittingTable, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_optional_columns_are_left_out_in_their_order_until_the_rest_fits() -> None:
    table = FittingTable("ONE", "#TWO", "THREE", "FOUR", optional=["TWO", "FOUR"])
    table.add("a", 22, "[bold]", "dddd")
    assert shown(table, 80).split() == ["ONE", "TWO", "THREE", "FOUR", "a", "22", "[bold]", "dddd"]
    assert shown(table, 20).split() == ["ONE", "THREE", "FOUR", "a", "[bold]", "dddd"]
    assert shown(table, 15).split() == ["ONE", "THREE", "a", "[bold]"]


def test_numbers_stand_at_the_right() -> None:
    table = FittingTable("#SIZE")
    table.add(1)
    assert shown(table, 80) == "SIZE\n   1\n"


def test_a_cell_has_no_control_character() -> None:
    table = FittingTable("NAME")
    table.add("\x1b[31mred")
    assert shown(table, 80).splitlines()[1].rstrip() == r"\x1b[31mred"


def test_a_pipe_gets_the_text_that_rich_makes() -> None:
    table = FittingTable("NAME", "#SIZE", "一二三", "#", optional=["SIZE"])
    table.add("a", 1, "\x1b[31mred", "")
    table.add("一二", 100_000, "", 7)
    table.add("[bold]é", -1, "x", "  ")
    assert shown(table, PIPE_WIDTH) == shown(table, PIPE_WIDTH - 1)
    assert shown(FittingTable("ONE", "#TWO"), PIPE_WIDTH) == shown(FittingTable("ONE", "#TWO"), PIPE_WIDTH - 1)


def test_a_pipe_gets_lines_of_full_length() -> None:
    assert make_console().width == 100_000


def test_a_reader_that_closes_the_output_does_not_end_the_process() -> None:
    """Rich's own console would end it with status 1."""

    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    console = make_console()
    console.file = Closed()
    with pytest.raises(BrokenPipeError):
        console.print("x")
