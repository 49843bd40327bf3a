"""The pages of ``docs/``, as tests read them: sections, tables, blocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs

from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCS = CHECKOUT / "docs"
_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\S+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
_CELL = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"`([^`]+)`")


@attrs.frozen
class Block:
    """A fenced block; ``file`` is the name that the page gives it, if any."""

    file: str | None
    language: str
    body: str


def page(name: str) -> str:
    """Return the text of a page, as in ``configuration.md``."""
    return (DOCS / name).read_text(encoding="utf-8")


def pages() -> list[Path]:
    """Return every page."""
    return sorted(DOCS.rglob("*.md"))


def section(text: str, heading: str) -> str:
    """Return what stands below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    found = re.search(rf"^{re.escape(heading)}$\n(.*?)(?=^#{{1,{level}}} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no heading {heading!r}"
    return found[1]


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """Yield each table as a list of rows, which map the titles of its columns to cells."""
    for found in re.finditer(r"^\|.*\|\n\|[ :|-]+\|\n(?:\|.*\|\n)*", text, re.MULTILINE):
        head, _, *body = found[0].splitlines()
        titles = _cells(head)
        rows = [_cells(line) for line in body]
        assert all(len(row) == len(titles) for row in rows), f"a row of the table {head} has another number of cells"
        yield [dict(zip(titles, row, strict=True)) for row in rows]


def table(text: str, heading: str) -> list[dict[str, str]]:
    """Return the first table below a heading."""
    return next(tables(section(text, heading)))


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in _CELL.split(line.strip()[1:-1])]


def code(cell: str) -> list[str]:
    """Return what a cell has in backquotes."""
    return _CODE.findall(cell)


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(each["file"], each["language"], each["body"]) for each in _BLOCK.finditer(text)]
