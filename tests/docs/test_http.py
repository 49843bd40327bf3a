"""docs/http.md has every call, every metric and every status that the API has."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from twisted.internet.task import Clock

from replication.net.admission import Bounds
from replication.web.auth import AccessPolicy
from replication.web.metrics import METRICS
from replication.web.site import Api
from tests.docs.pages import code, page, table
from tests.system.daemons import CHECKOUT
from tests.web.served import FakeServed

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = page("http.md")


def trees() -> Iterator[ast.AST]:
    """Yield every module, parsed."""
    for path in sorted((CHECKOUT / "replication").rglob("*.py")):
        yield ast.parse(path.read_text())


def made_metrics() -> Iterator[str]:
    """Yield the name of each metric that a module makes; those whose names are put together are two."""
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="Sample"), args=[ast.Constant(value=str(name)), *_]):
                    yield name
                case ast.Call(func=ast.Name(id="Sample"), args=[ast.JoinedStr(), *_]):
                    yield from ("lines_total", "bytes_total")


def test_every_metric_is_there_with_its_kind_and_meaning() -> None:
    rows = table(PAGE, "## `GET /metrics`")
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row["meaning"]).replace("`", "") for row in rows]
    names = [code(row["metric"])[0] for row in rows]
    assert dict(zip(names, plain, strict=True)) == METRICS
    assert {*names} == {*made_metrics()}
    assert all(row["unit"] and row["if it is high"] for row in rows)
    assert [row["type"] for row in rows] == ["counter" if name.endswith("_total") else "gauge" for name in names]


def test_every_path_is_there() -> None:
    """As the routing table has them, with a ``*`` for each parameter."""
    rooms = cast("Any", SimpleNamespace(streams=()))
    api = Api(cast("Any", FakeServed()), AccessPolicy(None), 0, Clock(), rooms=rooms, bounds=Bounds())
    shown = [code(row["call"])[0].partition("?")[0].split(" ") for row in table(PAGE, "## All calls")]
    assert {(method, with_stars(path)) for method, path in shown} == {
        (route.method, with_stars(route.path)) for route in api.routes
    }


def with_stars(path: str) -> str:
    """Return a path with ``*`` for each parameter."""
    return re.sub(r"\b[A-Z]+…?", "*", path)


def test_every_status_that_is_answered_is_there() -> None:
    answered = set()
    for tree in trees():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="RequestError" | "SynapseError"), args=[*args]):
                    answered |= {each.value for each in args if isinstance(each, ast.Constant)}
    numbers = {each for each in answered if isinstance(each, int)}
    shown = {int(row["status"].split()[0]) for row in table(PAGE, "## Errors")}
    assert numbers <= shown, sorted(numbers - shown)
    assert all(400 <= each < 600 for each in shown)
