"""A configuration: what is accepted makes sockets, bounds and streams; what is not is refused with a ConfigError."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

from twisted.internet.testing import MemoryReactorClock

from replication import config
from replication.errors import ConfigError
from replication.net.access import Access
from replication.net.endpoints import default_http_url, has_tls
from replication.web import address
from replication.wire import grammar

if TYPE_CHECKING:
    from types import ModuleType

FILE = "conf.toml"
ROLES: tuple[Literal["master", "worker"], ...] = ("master", "worker")
FILES: dict[str, str] = {"secret": "hush\n", "empty": ""}
read_text = address.read_text


def guarded_read(path: str, what: str) -> str:
    """Read only what this module has, but pass names that no system accepts on to it."""
    if path in FILES:
        return FILES[path]
    if path.isprintable():
        raise ConfigError(f"cannot read the {what} {path}: No such file or directory")
    return read_text(path, what)


def guarded_import(name: str) -> ModuleType:
    """Import nothing new: an import runs code."""
    if name in sys.modules or not name.replace(".", "").isidentifier():
        return import_module(name)
    raise ModuleNotFoundError(f"No module named {name!r}")


def check(data: bytes) -> None:
    """Load a file with this content, as each role, without another file and without a new import."""
    try:
        FILES[FILE] = data.decode()
    except UnicodeDecodeError:
        return  # read_text refuses it
    with (
        patch.object(config, "read_text", guarded_read),
        patch.object(address, "read_text", guarded_read),
        patch.object(config, "import_module", guarded_import),
    ):
        check_file()


def check_file() -> None:
    """Load the file, as each role."""
    for role in (*ROLES, None):
        try:
            found = config.load(role, FILE)
        except ConfigError as error:
            assert str(error)
        else:
            check_loaded(found)


def check_loaded(found: config.Config) -> None:
    """Use a configuration as a daemon does, without opening anything."""
    assert "hush" not in repr(found)
    tomllib.loads(FILES[FILE])
    grammar.instance_name(found.instance_name)
    assert found.bounds.max_connections >= 0
    Access(found.grants).replace(found.grants, found.secret)
    for each in found.connect:
        default_http_url(each.reveal())
    for socket in config.sockets_of(found, object, lambda **_: object()):
        if not has_tls(socket.endpoint):
            try:
                socket.parse(MemoryReactorClock(), insecure=found.insecure)
            except ConfigError as error:
                assert str(error)
