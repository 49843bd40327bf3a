"""The errors: their tree is drawn as it is, and their attributes are documented, kept and typed."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from replication import errors
from replication.errors import escape

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]


def attributes(error: type[Exception]) -> list[str]:
    return [*inspect.get_annotations(error)]


def test_the_drawing_shows_every_error_under_its_parent_with_its_attributes() -> None:
    parents: dict[str, str] = {}
    drawn: dict[str, list[str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+Error)\b(?:[^:]*: (.*))?", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
            drawn[found[2]] = found[3].split(", ") if found[3] else []
    assert parents == {each.__name__: (each.__base__ or object).__name__ for each in CLASSES}
    assert drawn == {each.__name__: attributes(each) for each in CLASSES}


@pytest.mark.parametrize("error", [each for each in CLASSES if attributes(each)])
def test_every_attribute_is_documented_and_survives_pickling(error: type[Exception]) -> None:
    """Spark sends errors from one process to another."""
    names = attributes(error)
    assert all(f"``{name}``" in (error.__doc__ or "") for name in names)
    raised = error("what is wrong", **dict.fromkeys(names, 7))
    copy = pickle.loads(pickle.dumps(raised))
    assert str(copy) == "what is wrong"
    assert [getattr(copy, name) for name in names] == [7] * len(names)
    assert error("what is wrong").args == ("what is wrong",)


def test_the_default_kind_of_a_remote_error_is_bad_line() -> None:
    assert errors.RemoteProtocolError("too long", kind="line length").kind == "line length"
    assert errors.RemoteProtocolError("odd").kind == "bad line"


def test_what_a_terminal_would_obey_is_escaped_as_repr_writes_it() -> None:
    assert escape("plain é 中…") == "plain é 中…"
    assert escape("\x1b[2J\x07\x7f\x9b\n\u202e\ud800") == r"\x1b[2J\x07\x7f\x9b\n\u202e\ud800"
    assert escape("a\nb\tc\r", keep="\n\t") == "a\nb\tc\\r"
