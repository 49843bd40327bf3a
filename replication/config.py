"""What a daemon is told: TOML and command-line options, checked and frozen.

Every key is a field of :class:`Config` under the same name (``server_name`` in the file is ``--server-name`` on the
command line), and its annotation is the check.  Whatever is wrong raises ConfigError in one line that names the file,
the key, and the key that was probably meant.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import attrs
import msgspec

from replication.errors import ConfigError, RemoteProtocolError
from replication.session.connection import Keepalive
from replication.streams.registry import SourceTable, StreamDefinition
from replication.streams.typed import TypedStream
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Role = Literal["master", "worker"]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = tuple[Text, ...]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]

_DEFAULTS: Final[Mapping[Role, Mapping[str, Any]]] = {
    "master": {
        "instance_name": "master",
        "database": "sqlite:///replication.db",
        "listen": ("tcp:9092:interface=127.0.0.1",),
        "http": "tcp:9093:interface=127.0.0.1",
    },
    "worker": {
        "instance_name": "worker1",
    },
}
DEFAULT_CONNECT: Final = ("tcp:127.0.0.1:9092",)
_MASTER: Final = {"role": "master"}
_WORKER: Final = {"role": "worker"}
_NO_KEY: Final = {"role": "nobody"}


@attrs.frozen
class WriterPlace:
    """``[writers.NAME]``: where a worker finds one writer, its wire (an endpoint) and its HTTP (a URL)."""

    connect: Text
    http: Text | None = None


@attrs.frozen(kw_only=True)
class Config:
    """All that a master or a worker is told.

    ``stream`` are names given one by one, ``streams`` full definitions, one per ``[[streams]]`` table, and what the
    modules in ``definitions`` have in their ``STREAMS``, unless a table has that name, too.  Times are in seconds,
    ``line_limit`` and ``max_queued_bytes`` in bytes.  ``rooms``, in the file a table without keys, says that a master
    keeps rooms.  ``secret`` is what the file ``secret_file`` holds.

    ``writes`` names the streams that a worker writes, and ``listen`` is for those who follow it; those of ``writes``
    that have no definition have a generic table each.
    """

    role: Role = attrs.field(metadata=_NO_KEY)
    server_name: Text = "localhost"
    instance_name: Text
    database: Text
    http: Text | None = None
    stream: Texts = ()
    secret_file: Text | None = None
    secret: str | None = attrs.field(default=None, repr=False, metadata=_NO_KEY)
    ping_after: Seconds = Keepalive().ping_after
    give_up_after: Seconds = Keepalive().give_up_after
    line_limit: Annotated[int, msgspec.Meta(ge=1024)] = LINE_LIMIT
    max_queued_bytes: Count = 8 * 1024 * 1024
    max_queued_lines: Count = 100_000
    listen: Texts = ()
    streams: tuple[StreamDefinition, ...] = ()
    definitions: Texts = ()
    rooms: bool = attrs.field(default=False, metadata=_MASTER)
    connect: Texts = attrs.field(default=(), metadata=_WORKER)
    writes: Texts = attrs.field(default=(), metadata=_WORKER)
    catch_up: Texts = attrs.field(default=(), metadata=_WORKER)
    app: Text | None = attrs.field(default=None, metadata=_WORKER)
    copy: bool | None = attrs.field(default=None, metadata=_WORKER)
    writers: dict[Text, WriterPlace] = attrs.field(factory=dict, metadata=_WORKER)

    @property
    def keepalive(self) -> Keepalive:
        """The two times that a connection lives by."""
        return Keepalive(ping_after=self.ping_after, give_up_after=self.give_up_after)


attrs.resolve_types(Config)
_KEYS: Final = {field.name: field for field in attrs.fields(Config)}


def load(role: Role, path: str | None = None, options: Mapping[str, object] | None = None) -> Config:
    """Return what ``options`` say, then the TOML file at ``path``, then the defaults of ``role``."""
    given = {key: value for key, value in (options or {}).items() if value not in (None, [])}
    values = {
        **_DEFAULTS[role],
        **(_read_table(role, _parse(path), path) if path is not None else {}),
        **{key: _read_value(key, value, f"--{key.replace('_', '-')}") for key, value in given.items()},
    }
    try:
        grammar.instance_name(values["instance_name"])
    except RemoteProtocolError:
        where = "--instance-name" if "instance_name" in given else f"{path}: instance_name"
        raise ConfigError(f"{where}: a name has 1 to 255 characters, and no white space") from None
    if "secret_file" in values:
        values["secret"] = read_secret(values["secret_file"])
    if role == "worker":
        values.setdefault("database", f"sqlite:///replication-{values['instance_name']}.db")
        values.setdefault("connect", () if values.get("writers") else DEFAULT_CONNECT)
    if values.get("definitions"):
        imported = [each for name in values["definitions"] for each in import_streams(name, f"{path}: definitions")]
        values["streams"] = tuple({each.name: each for each in (*imported, *values.get("streams", ()))}.values())
    config = Config(role=role, **values)
    if role == "worker" and bool(config.listen) != bool(config.writes):
        here, there = ("listen", "writes") if config.listen else ("writes", "listen")
        raise ConfigError(f"{path or '--listen'}: {here} without {there}: a worker that writes streams has both keys")
    if config.give_up_after <= config.ping_after:
        raise ConfigError(f"{path}: give_up_after: must be more than ping_after, which is {config.ping_after:g}")
    return config


def read_secret(path: str) -> str:
    """Return the shared secret that a file holds, without the white space around it."""
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the secret file {path}: {_reason(error)}") from error
    if not secret:
        raise ConfigError(f"the secret file {path} is empty: put one line with the secret into it")
    return secret


def import_streams(name: str, where: str) -> list[StreamDefinition]:
    """Return the definitions in a module's ``STREAMS``, typed ones or plain; ConfigError names it and ``where``."""
    try:
        found = import_module(name).STREAMS
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: module {name!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"{where}: module {name!r} has no STREAMS, a list of stream definitions") from error
    streams = [each.definition if isinstance(each, TypedStream) else each for each in found]
    if wrong := [each for each in streams if not isinstance(each, StreamDefinition)]:
        raise ConfigError(f"{where}: STREAMS of module {name!r} has {wrong[0]!r}, which is no stream definition")
    return streams


def _parse(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {_reason(error)}") from error


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"


def _read_table(role: Role, table: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Check the file's keys, and convert their values."""
    known = [key for key, field in _KEYS.items() if field.metadata.get("role", role) == role]
    for key in table:
        owner = _KEYS[key].metadata.get("role", role) if key in _KEYS else "nobody"
        if owner not in (role, "nobody"):
            raise ConfigError(f"{path}: {key}: only a {owner} has this key, and this is a {role}'s configuration")
    _refuse_unknown(table, known, path)
    for key in table["rooms"] if isinstance(table.get("rooms"), dict) else ():
        raise ConfigError(f"{path}: rooms.{key}: unknown key; [rooms] takes none, that it is there is enough")
    streams = table.get("streams")
    if isinstance(streams, str) or (isinstance(streams, list) and any(isinstance(each, str) for each in streams)):
        raise ConfigError(f"{path}: streams: these are [[streams]] tables; did you mean stream, which takes names?")
    for number, stream in enumerate(_tables(streams)):
        if "retention" in stream:
            raise ConfigError(f"{path}: streams[{number}].retention: retention is not there yet; remove the key")
        _refuse_unknown(stream, [field.name for field in attrs.fields(StreamDefinition)], path, f"streams[{number}].")
        for index, source in enumerate(_tables(stream.get("tables"))):
            fields = [field.name for field in attrs.fields(SourceTable)]
            _refuse_unknown(source, fields, path, f"streams[{number}].tables[{index}].")
    writers = table.get("writers")
    for name, writer in writers.items() if isinstance(writers, dict) else ():
        for place in _tables([writer]):
            _refuse_unknown(place, [field.name for field in attrs.fields(WriterPlace)], path, f"writers.{name}.")
    given = {**table, "rooms": True} if table.get("rooms") == {} else table
    return {key: _read_value(key, value, f"{path}: {key}") for key, value in given.items()}


def _tables(value: object) -> Iterable[Mapping[str, Any]]:
    """Return the tables in ``value``; what is none is for the check of its type to refuse."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], path: str, prefix: str = "") -> None:
    for key in table:
        if key not in known:
            near = [f"; did you mean {prefix}{each}?" for each in get_close_matches(key, known, 1)]
            raise ConfigError(f"{path}: {prefix}{key}: unknown key{''.join(near)}")


def _read_value(key: str, value: object, where: str) -> Any:
    """Return ``value`` as the type of its field, or say what is wrong and where."""
    kind: Any = _KEYS[key].type
    if kind == Texts and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text, _, inner = str(error).partition(" - at `$")
        for ours, tomls in (("object", "table"), ("Object", "table"), (" | null", "")):
            text = text.replace(ours, tomls)
        raise ConfigError(f"{where}{inner.rstrip('`').replace('[...]', '.*')}: {text}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
