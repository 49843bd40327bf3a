"""docs/api/ has every public name of ``replication``, once."""

from __future__ import annotations

import re

import replication
from tests.docs.pages import DOCS


def test_every_public_name_is_there_once() -> None:
    text = "".join(each.read_text(encoding="utf-8") for each in (DOCS / "api").glob("*.md"))
    found = re.findall(r"^\.\. auto\w+:: replication\.(\w+)$", text, re.MULTILINE)
    assert sorted(found) == sorted(each for each in replication.__all__ if each != "__version__")
