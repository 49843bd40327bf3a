"""docs/api/ has every public name of ``replication``, once."""

from __future__ import annotations

import inspect
import pydoc
import re

import replication
from tests.docs.pages import DOCS, page


def test_every_public_name_is_there_once() -> None:
    text = "".join(each.read_text(encoding="utf-8") for each in (DOCS / "api").glob("*.md"))
    found = re.findall(r"^\.\. auto\w+:: replication\.(\w+)$", text, re.MULTILINE)
    assert sorted(found) == sorted(each for each in replication.__all__ if each != "__version__")


def test_each_name_is_printed_with_its_signature_as_the_page_advises() -> None:
    """The pages themselves have none before Sphinx has made them."""
    assert "`python -m pydoc replication.Master`" in page("api/index.md")
    for name in (each for each in replication.__all__ if each != "__version__"):
        text = pydoc.plain(pydoc.render_doc(f"replication.{name}"))
        found = getattr(replication, name)
        assert (inspect.getdoc(found) or "").partition("\n")[0] in text, name
        assert re.search(rf"\b{found.__name__}\(", text), name
