"""Tables on a terminal, or on a pipe, where they have no colours and lines of full length."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from replication.errors import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import ConsoleOptions, RenderResult

PIPE_WIDTH = 100_000  # characters


def make_console() -> Console:
    """Return a console for standard output."""
    return Console() if sys.stdout.isatty() else Console(force_terminal=False, color_system=None, width=PIPE_WIDTH)


def plain(text: str) -> Text:
    """Return text that is shown as it is: it has no styles, and nothing that a terminal obeys."""
    return Text(escape(text))


class FittingTable:
    """A table without rules that leaves out columns where the terminal is too narrow for all of them.

    A title that begins with # is that of a column of numbers.  ``optional`` are the titles of the columns that may be
    left out, the first of them first.
    """

    def __init__(self, *titles: str, optional: Sequence[str] = ()) -> None:
        self._titles = titles
        self._optional = optional
        self._rows: list[list[str]] = []

    def add(self, *cells: object) -> None:
        """Add a row with a cell for each title."""
        self._rows.append([str(each) for each in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, with as many columns as fit."""
        for count in range(len(self._optional) + 1):
            table = self._table(self._optional[:count])
            if Measurement.get(console, options.update(max_width=PIPE_WIDTH), table).maximum <= options.max_width:
                break
        yield table

    def _table(self, left_out: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        places = [place for place, title in enumerate(self._titles) if title.lstrip("#") not in left_out]
        for title in [self._titles[place] for place in places]:
            table.add_column(title.lstrip("#"), justify="right" if title.startswith("#") else "left", overflow="fold")
        for row in self._rows:
            table.add_row(*[plain(row[place]) for place in places])
        return table
