"""Every citation of the documents in code and tests names a page, and a section of it, that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PROTOCOL = "docs/protocol/"
TRAPS = DOCS / "protocol" / "traps.md"
TARGET = re.compile(r"^\((?:trap-)?([A-Z0-9]+)\)=$", re.MULTILINE)
INVARIANT = re.compile(r"\bI[1-9][0-9]?\b")

_SECTION = r"(?:[A-H][1-9]|I[1-9][0-9]?|[A-I](?=[^\w\s])|[1-9][0-9]?)"
_BREAK = r"[\s#]+"  # a citation may go on in the next line, of a comment too
CITATION = re.compile(
    rf"docs/[\w./-]+?\.md(?:{_BREAK}(?P<sections>{_SECTION}(?:(?:,| and| to){_BREAK}{_SECTION})*)\b)?"
)
# ``Class.method`` in ``follower/worker.py``: where the documents place a name of the code.
PLACE = re.compile(r"`([A-Za-z_][\w.]*)`\s+in\s+`((?:replication|tests)/[\w/]+\.py|[a-z_]+(?:/[\w/]+)?\.py)`")
# How the same was cited when the texts were not in the checkout.
OLD = re.compile(
    r"\b[Pp]rotocol`*,?\s+[A-I]\d?\b|\((?:protocol, )?[Tt]raps? \d|\binterfaces`*,\s+section"
    r"|(?<![/\w-])(?:protocol|interfaces|field|style)\.md\b|\b[Ff]aults? F\d|\([A-H]\d(?: to [A-H]\d)?[,)]"
)


def modules() -> list[Path]:
    """Return all modules of the package and the tests but this one."""
    found = [*(ROOT / "replication").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return sorted(path for path in found if path != Path(__file__))


def citations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each page that a text cites, with the sections that it names."""
    for match in CITATION.finditer(text):
        page = re.match(r"docs/[\w./-]+?\.md", match[0])
        assert page is not None
        yield page[0], re.findall(r"[A-I][0-9]*|[0-9]+", match["sections"] or "")


def sections(page: str) -> set[str]:
    """Return the names of the sections of a page of the protocol."""
    return set(TARGET.findall((ROOT / page).read_text()))


def test_every_citation_names_a_page_and_a_section_that_exist() -> None:
    wrong = []
    for path in modules():
        for page, names in citations(path.read_text()):
            if not (ROOT / page).is_file():
                wrong.append(f"{path.relative_to(ROOT)}: there is no {page}")
            elif page.startswith(PROTOCOL):
                missing = set(names) - sections(page)
                wrong += [f"{path.relative_to(ROOT)}: {page} has no section {name}" for name in sorted(missing)]
    assert wrong == []


def test_every_invariant_that_a_test_names_is_defined() -> None:
    named = {number for path in modules() for number in INVARIANT.findall(path.read_text())}
    assert named <= sections("docs/protocol/invariants.md")


def test_no_citation_names_a_text_that_is_not_in_the_checkout() -> None:
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in modules() for match in OLD.finditer(path.read_text())]
    assert found == []


def pages() -> list[Path]:
    """Return all documents for users and contributors."""
    return sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def test_every_name_that_a_document_places_in_a_file_is_defined_there() -> None:
    places = [(path, *found) for path in pages() for found in PLACE.findall(path.read_text())]
    assert len(places) > 20
    wrong = []
    for path, name, file in places:
        code = next((each for each in (ROOT / file, ROOT / "replication" / file) if each.is_file()), None)
        defined = rf"^\s*(?:class |(?:async )?def )?{name.rpartition('.')[2]}\b"
        if code is None or re.search(defined, code.read_text(), re.MULTILINE) is None:
            wrong.append(f"{path.relative_to(ROOT)}: {file} does not define {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "page", "names"),
    [
        ("(docs/protocol/wire.md A4)", "docs/protocol/wire.md", ["A4"]),
        ("docs/protocol/ids.md F3, F4 and F6", "docs/protocol/ids.md", ["F3", "F4", "F6"]),
        ("docs/protocol/wire.md A1 to A5", "docs/protocol/wire.md", ["A1", "A5"]),
        ("docs/protocol/traps.md\n    # 17).", "docs/protocol/traps.md", ["17"]),
        ("docs/protocol/rooms.md H.", "docs/protocol/rooms.md", ["H"]),
        ("docs/http.md has every call", "docs/http.md", []),
    ],
)
def test_a_citation_is_read_with_its_sections(text: str, page: str, names: list[str]) -> None:
    assert list(citations(text)) == [(page, names)]


def test_the_traps_are_numbered_without_a_gap_and_targets_match_headings() -> None:
    text = TRAPS.read_text()
    targets = re.findall(r"^\(trap-(\d+)\)=\n### (\d+)\. ", text, re.MULTILINE)
    assert [int(number) for number, _ in targets] == list(range(1, len(targets) + 1))
    assert all(target == heading for target, heading in targets)
    assert text.count("\n### ") == len(targets)


def test_each_trap_lists_files_whose_tests_are_about_it() -> None:
    wrong = []
    for entry in TRAPS.read_text().split("\n### ")[1:]:
        number = entry.partition(".")[0]
        (line,) = re.findall(r"^\*\*Tests:\*\* (.*)\.$", entry, re.MULTILINE)
        for name in [] if line == "none" else re.findall(r"`(tests/[^`]+)`", line):
            path = ROOT / name
            if not path.is_file() or f"trap_{number}_" not in path.read_text():
                wrong.append(f"docs/protocol/traps.md {number}: {name} has no test of this trap")
        if line != "none" and "`tests/" not in line:
            wrong.append(f"docs/protocol/traps.md {number}: no test is listed")
    assert wrong == []
