"""docs/configuration.md has every option that there is, with its default; its TOML is configuration that is read."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from msgspec.structs import asdict

from replication import ConfigError, SourceTable, StreamDefinition, config, service
from replication.urls import Url
from tests.docs.pages import blocks, code, page, section, table
from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

    from twisted.python import usage

PAGE = page("configuration.md")
OPTIONS = table(PAGE, "## Options")
ROLES: dict[config.Role, type[usage.Options]] = {"master": service.MasterOptions, "worker": service.WorkerOptions}
ONLY_ON_THE_COMMAND_LINE = {"config", "help", "version"}
# Of each fixed limit, the constant that it is.
LIMITS = {
    "nested arrays and objects of a row ([JSON](protocol/wire.md#a3-json))": "MAX_NESTING",
    "rows of one fact": "MAX_FACT_ROWS",
    "bytes of one fact in a page: for each row its text and 24 bytes more": "MAX_FACT_BYTES",
    "values of one fact, or of a JSON body: numbers, texts, arrays, objects, …": "MAX_VALUES",
    "digits of a number, in a JSON body of more than 1,000,000 bytes": "MAX_DIGITS",
    "a line of a segment; a longer one is a POSITION in the file, whatever `line_limit` is": "MAX_LINE",
    "`manifest.json` or `histories.json` of a segments folder": "MAX_INDEX",
    "bytes of one answer that a worker, a command or the Spark source reads; a fact of a "
    "[mapped table](operations.md#mapped-tables), or an old one, may be larger": "MAX_ANSWER",
    "bytes of the status and the headers of one answer that a worker reads; checked after each read of at most "
    "64 KiB, so almost 128 KiB may pass": "HEAD_LIMIT",
    "answers that wait for clients of HTTP to read them, all together": "MOST_UNREAD",
    "facts of one connection that have begun and are not complete": "MAX_INCOMPLETE",
    "positions on one connection, of different streams and writers": "MAX_WRITERS",
    "one message of Redis": "MAX_MESSAGE",
    "memory for users that sync, all together": "MAX_SYNCING_BYTES",
    "rows that wait to be written to `users_last_seen`": "MAX_WAITING",
    "texts that wait to be written to `users_last_seen`": "MAX_WAITING_BYTES",
    "senders whose FEDERATION_ACK counts": "MAX_SENDERS",
    "REPLICATE of one peer before this process is ready": "MAX_REPLICATE",
    "body of an HTTP request": "MAX_BODY",
    "lines of an HTTP request to `…/facts`": "MAX_LINES",
    "bodies of HTTP requests that arrive or are processed, all together; those below 16 KiB do not count": (
        "MOST_BODIES"
    ),
    "rows of one page, default": "PAGE_ROWS",
    "rows of one page, maximum": "MAX_PAGE_ROWS",
    "bytes of one page, about": "PAGE_AIM",
    "bytes of one page, before it is cut after a whole fact": "PAGE_BYTES",
    "life of an idempotency key": "RECEIPT_LIFE",
    "life of an idempotency key while [the wall clock](operations.md#the-clock) is not known to be steady": (
        "LIFE_WHILE_UNSURE"
    ),
    "in-memory stream without a key: age of a fact": "MAX_AGE",
    "in-memory stream: memory": "MAX_BYTES",
}


def fields(role: config.Role) -> dict[str, Any]:
    """Return the keys that a role has, with their fields."""
    wanted = {field.name: field for field in attrs.fields(config.Config)}
    return {name: field for name, field in wanted.items() if field.metadata.get("role", role) == role}


def role_of(row: dict[str, str]) -> list[config.Role]:
    """Return the roles that have an option."""
    roles: dict[str, list[config.Role]] = {"both": ["master", "worker"], "master": ["master"], "worker": ["worker"]}
    return roles[row["role"]]


def default_of(row: dict[str, str], role: config.Role) -> object:
    """Return the default that the table shows for a role."""
    cell = row["default"]
    for part in re.split(r", (?=`|none)", cell):
        text, _, whose = part.partition(" (")
        if whose.rstrip(")") in ("", role):
            return None if text == "none" else tomllib.loads(f"value = {text.strip('`')}")["value"]
    raise AssertionError(f"{row['key']}: no default for a {role} in {cell}")


def plain(value: object) -> object:
    """Return the value of a key as TOML has it."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, config.Tls):
        return {name: each for name, each in asdict(value).items() if each != getattr(config.Tls(), name)}
    return value.reveal() if isinstance(value, Url) else value


def test_every_option_has_one_row_and_no_other_is_there() -> None:
    names = [code(row["key"])[0] for row in OPTIONS]
    assert sorted(names) == sorted({*fields("master"), *fields("worker")})


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row["key"].strip("`"))
def test_an_option_has_the_role_the_flag_and_the_default_of_its_row(row: dict[str, str]) -> None:
    (key,) = code(row["key"])
    assert role_of(row) == [role for role in ROLES if key in fields(role)]
    for role in role_of(row):
        found = getattr(config.load(role), key)
        shown = default_of(row, role)
        assert plain(found) == shown, f"{key} of a {role}"
    has_flag = any(key.replace("_", "-") in long_options(role) for role in role_of(row))
    assert code(row["flag"]) == ([f"--{key.replace('_', '-')}"] if has_flag else [])


def long_options(role: config.Role) -> set[str]:
    """Return the names of a role's flags."""
    return {each.rstrip("=") for each in ROLES[role]().longOpt}


@pytest.mark.parametrize("role", ROLES)
def test_every_flag_is_in_the_table(role: config.Role) -> None:
    shown = {flag.removeprefix("--") for row in OPTIONS if role in role_of(row) for flag in code(row["flag"])}
    assert long_options(role) - ONLY_ON_THE_COMMAND_LINE == shown


@pytest.mark.parametrize(
    ("heading", "described"),
    [
        ("## `[[streams]]`", StreamDefinition),
        ("## `[[streams.tables]]`", SourceTable),
        ("## `[writers.NAME]`", config.WriterPlace),
        ("## `[tls]`", config.Tls),
        ("## `[access.NAME]`", config.AccessTable),
    ],
)
def test_every_key_of_a_table_is_there_with_its_default(heading: str, described: type[object]) -> None:
    shown = {code(row["key"])[0]: row["default"] for row in table(PAGE, heading)}
    keys = signature(described).parameters
    assert sorted(shown) == sorted(keys)
    for name, key in keys.items():
        cell = shown[name]
        if key.default is key.empty:
            assert cell == "required", name
        elif key.default is None:
            assert cell == "none", name
        else:
            default = list(key.default) if isinstance(key.default, tuple) else key.default
            assert tomllib.loads(f"value = {cell.strip('`')}")["value"] == default, name


@pytest.mark.parametrize(
    "block", [each for each in blocks(PAGE) if each.language == "toml"], ids=lambda each: each.file
)
def test_the_toml_is_configuration(block: Any, tmp_path: Path) -> None:
    path = tmp_path / block.file
    path.write_text(block.body)
    role: config.Role = "worker" if "writers." in block.body else "master"
    if "nmae" in block.body:
        with pytest.raises(ConfigError, match="server_nmae"):
            config.load(role, str(path))
    else:
        config.load(role, str(path))


@cache
def constants() -> dict[str, set[str]]:
    """Return the expressions that the constants of each name are, in any module."""
    found: dict[str, set[str]] = {}
    for path in (CHECKOUT / "replication").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                found.setdefault(ast.unparse(node.target), set()).add(ast.unparse(node.value))
    return found


@pytest.mark.parametrize(("row", "name"), LIMITS.items())
def test_a_fixed_limit_is_what_the_code_has(row: str, name: str) -> None:
    (shown,) = [each["value"] for each in table(PAGE, "## Fixed limits") if each["limit"] == row]
    assert float(shown) in {float(eval(each, {})) for each in constants()[name]}


def test_every_metric_of_a_limit_is_a_metric() -> None:
    known = {code(row["metric"])[0] for row in table((CHECKOUT / "docs/http.md").read_text(), "## `GET /metrics`")}
    named = {metric for row in table(PAGE, "## Fixed limits") for metric in code(row["metric"])}
    assert "users_refused_total" in named
    assert named <= known


def test_database_urls_and_sources_are_those_that_are_opened() -> None:
    urls = code(section(PAGE, "## Database URLs"))
    assert {url.partition(":")[0] for url in urls if "://" in url} == {"sqlite", "postgresql"}
