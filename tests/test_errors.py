"""The drawn tree of errors is the tree."""

from __future__ import annotations

import re

from replication import errors


def test_the_drawing_shows_every_error_under_its_parent() -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            drawn[found[2]] = path[depth - 1] if depth else "Exception"
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert drawn == {name: value.__base__.__name__ for name, value in classes.items() if value.__base__}


def test_a_refusal_knows_under_what_to_count_it() -> None:
    assert errors.RemoteProtocolError("too long", "line length").kind == "line length"
    assert errors.RemoteProtocolError("odd").kind == "bad line"
