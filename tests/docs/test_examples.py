"""examples/ has the programs of the pages as files, and each is on a page."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import Block, blocks, pages
from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = CHECKOUT / "examples"


def all_blocks() -> Iterator[tuple[str, Block]]:
    """Yield every block of every page, with the page's name."""
    for each in [CHECKOUT / "README.md", *pages()]:
        for block in blocks(each.read_text(encoding="utf-8")):
            yield str(each.relative_to(CHECKOUT)), block


def test_a_program_on_a_page_is_the_file_in_examples() -> None:
    for page, block in all_blocks():
        if block.file is not None and (block.language == "python" or (EXAMPLES / block.file).exists()):
            assert (EXAMPLES / block.file).read_text(encoding="utf-8") == block.body, f"{page}: {block.file}"


def test_every_file_in_examples_is_on_a_page() -> None:
    shown = {block.file for _, block in all_blocks()}
    assert {each.name for each in EXAMPLES.iterdir() if each.is_file()} - shown == set()


def test_an_upsert_names_the_table_because_postgresql_refuses_the_bare_column_as_ambiguous() -> None:
    for page, block in all_blocks():
        assert re.search(r"DO\s+UPDATE\s+SET\s+(\w+)\s*=\s*\1\b", block.body) is None, f"{page}: {block.body[:100]!r}"


READ: dict[str, Callable[[str], object]] = {"python": ast.parse, "toml": tomllib.loads, "json": json.loads}


@pytest.mark.parametrize("language", READ)
def test_a_block_can_be_read(language: str) -> None:
    """The tests that run the blocks of a page use the blocks that the page calls files, too."""
    for page, block in all_blocks():
        if block.language == language:
            try:
                READ[language](block.body)
            except (SyntaxError, ValueError) as error:
                raise AssertionError(f"{page}: {block.body[:100]!r}") from error
