"""docs/troubleshooting.md quotes messages that the code has: a message that is reworded is reworded there, too."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import code, page, tables
from tests.system.daemons import CHECKOUT

ROWS = [row for found in tables(page("troubleshooting.md")) for row in found if "message" in row]
QUOTED = [code(row["message"])[0] for row in ROWS]


def texts() -> set[str]:
    """Return every text in the code, with an ellipsis for what is filled in."""
    found = set()
    for path in (CHECKOUT / "replication").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr(values=parts):
                    found.add("".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in parts))
                case ast.Constant(value=str(text)):
                    found.add(re.sub(r"{\w+[^}]*}", "…", text))
                case ast.Constant(value=bytes(line)):
                    found.add(line.decode(errors="replace"))
    return found


TEXTS = texts()


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_that_is_quoted_is_in_the_code(quoted: str) -> None:
    """It may be filled in at its end, where the code adds the reason later."""
    assert any(quoted in text or quoted.rstrip("…") in text for text in TEXTS), quoted


def test_every_message_has_a_cause_and_a_cure() -> None:
    assert [row["message"] for row in ROWS if not row["cause"] or not row["cure"]] == []
    assert len(QUOTED) == len(set(QUOTED))
