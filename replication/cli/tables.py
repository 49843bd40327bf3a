"""Tables on a terminal, or on a pipe, where they have no colours and lines of full length."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from replication.errors import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import ConsoleOptions, RenderResult

PIPE_WIDTH = 100_000  # characters


def make_console() -> Console:
    """Return a console for standard output."""
    return _Console() if sys.stdout.isatty() else _Console(force_terminal=False, color_system=None, width=PIPE_WIDTH)


class _Console(Console):
    """Raises the error of a reader that has closed the output: rich's own ends the process, with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise  # noqa: PLE0704 (rich calls this in its except clause)


def plain(text: str) -> Text:
    """Return text that is shown as it is: it has no styles, and nothing that a terminal obeys."""
    return Text(escape(text))


class FittingTable:
    """A table without rules that leaves out columns where the terminal is too narrow for all of them.

    A title that begins with # is that of a column of numbers.  ``optional`` are the titles of the columns that may be
    left out, the first of them first.  ``styles`` are those of rich for cells with these texts.
    """

    def __init__(self, *titles: str, optional: Sequence[str] = (), styles: Mapping[str, str] | None = None) -> None:
        self._titles = titles
        self._optional = optional
        self._styles = styles or {}
        self._rows: list[list[str]] = []

    def add(self, *cells: object) -> None:
        """Add a row with a cell for each title."""
        self._rows.append([str(each) for each in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, with as many columns as fit; where all do, without measuring each cell as rich does."""
        if options.max_width >= PIPE_WIDTH:
            yield Segment(self._lines())
            return
        for count in range(len(self._optional) + 1):
            table = self._table(self._optional[:count])
            if Measurement.get(console, options.update(max_width=PIPE_WIDTH), table).maximum <= options.max_width:
                break
        yield table

    def _lines(self) -> str:
        """Return the text that rich makes of the table."""
        rows = [[title.lstrip("#") for title in self._titles], *[[escape(each) for each in row] for row in self._rows]]
        columns = []
        for title, cells in zip(self._titles, zip(*rows, strict=True), strict=True):
            sizes = [cell_len(each) for each in cells]
            width = max(sizes)
            padding = [" " * (width - size) for size in sizes]
            pairs = zip(cells, padding, strict=True)
            columns.append([space + cell if title.startswith("#") else cell + space for cell, space in pairs])
        return "".join(["  ".join(row) + "\n" for row in zip(*columns, strict=True)])

    def _table(self, left_out: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        places = [place for place, title in enumerate(self._titles) if title.lstrip("#") not in left_out]
        for title in [self._titles[place] for place in places]:
            table.add_column(title.lstrip("#"), justify="right" if title.startswith("#") else "left", overflow="fold")
        for row in self._rows:
            table.add_row(*[Text(escape(row[place]), self._styles.get(row[place], "")) for place in places])
        return table
