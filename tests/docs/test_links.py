"""Each link between documents leads to a file, and to a heading of it, as GitHub shows them.

Sphinx checks the links inside docs/ again. Links to other sites are not checked: the machines that run the tests
reach no sites but package indexes, and a test must not fail because another site is away.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import pages
from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOP = [each for each in sorted(CHECKOUT.glob("*.md")) if each.name != "CHANGELOG.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = 0
        while anchor in found:
            count += 1
            anchor = f"{slug}-{count}"
        found.add(anchor)
    return found


def links(path: Path) -> Iterator[str]:
    """Yield the links of a page that lead to this project."""
    for link in LINK.findall(FENCED.sub("", path.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:", link):
            yield link


@pytest.mark.parametrize("path", [*TOP, *pages()], ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_each_link_leads_to_a_page_and_a_heading(path: Path) -> None:
    wrong = []
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert wrong == []
