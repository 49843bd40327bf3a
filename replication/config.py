"""The configuration of a daemon: command-line options and a TOML file, checked (docs/configuration.md).

Each key is a field of ``Config`` with the same name: ``server_name`` in the file is ``--server-name`` on the command
line.  The field's annotation is its check.  A ConfigError is one line: the file, the key, and the nearest known key.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import attrs
import msgspec

from replication.errors import ConfigError, RemoteProtocolError, did_you_mean
from replication.net.access import ALL, Access, Grant, Rights
from replication.net.admission import Bounds
from replication.net.endpoints import has_tls
from replication.net.listening import Socket, http_risk, wire_risk
from replication.session.connection import Keepalive
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.retention import KEEP_ALL, Retention
from replication.streams.typed_rows import TypedStream
from replication.urls import Url, hide_secrets
from replication.web.address import read_secret, read_text
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

Role = Literal["master", "worker"]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = tuple[Text, ...]
Urls = tuple[Url, ...]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Interval = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Limit = Annotated[int, msgspec.Meta(ge=0)]  # 0: none

_DEFAULTS: Final[Mapping[Role, Mapping[str, Any]]] = {
    "master": {
        "instance_name": "master",
        "database": Url("sqlite:///replication.db"),
        "listen": ("tcp:9092:interface=127.0.0.1",),
        "http": "tcp:9093:interface=127.0.0.1",
    },
    "worker": {"instance_name": "worker1"},
}
DEFAULT_CONNECT: Final = (Url("tcp:127.0.0.1:9092"),)
_MASTER: Final = {"role": "master"}
_WORKER: Final = {"role": "worker"}
_NO_KEY: Final = {"role": "none"}


class WriterPlace(msgspec.Struct, frozen=True):
    """``[writers.NAME]``: the wire of a writer, a client endpoint, and its HTTP, a URL.

    A writer without ``connect`` is followed over an endpoint of ``connect`` that several writers share.
    """

    connect: Url | None = None
    http: Url | None = None

    def texts(self) -> dict[str, str]:
        """Return both, as far as they are given, as ``Worker`` takes them."""
        return {key: url.reveal() for key, url in (("connect", self.connect), ("http", self.http)) if url is not None}


class Tls(msgspec.Struct, frozen=True):
    """``[tls]``: which certificates the clients of ``ssl:`` endpoints must show, and which one this process shows.

    ``client_ca`` is a file with the authority of the clients, and ``allow`` has the names that are accepted; none: all.
    A worker shows ``certificate``, with ``private_key``, to its writers, and to a Redis.
    """

    client_ca: Text | None = None
    allow: Texts = ()
    certificate: Text | None = None
    private_key: Text | None = None

    @property
    def shown(self) -> tuple[str, str] | None:
        """The files with the certificate that is shown, and with its key."""
        return None if self.certificate is None or self.private_key is None else (self.certificate, self.private_key)


class AccessTable(msgspec.Struct, frozen=True):
    """``[access.NAME]``: what a peer may do that sends a secret, or shows a certificate with one of these names.

    ``read`` and ``append`` are names of streams; ``*`` stands for all.
    """

    secret_file: Text | None = None
    certificates: Texts = ()
    read: Texts = ()
    append: Texts = ()
    commands: bool = False
    admin: bool = False

    def grant(self, name: str) -> Grant:
        """Return the rights, with the secret of the file."""
        rights = Rights((name,), self.read, self.append, commands=self.commands, admin=self.admin)
        secret = None if self.secret_file is None else read_secret(self.secret_file)
        return Grant(rights, secret, self.certificates)


@attrs.frozen(kw_only=True)
class Config:
    """The options of a master or a worker; docs/configuration.md describes each.

    Times are in seconds, ``line_limit`` and ``max_queued_bytes`` in bytes.  ``streams`` has the ``[[streams]]`` tables
    and the ``STREAMS`` of the modules in ``definitions``; of two with one name the table counts.  ``secret`` is the
    content of the file ``secret_file``, and ``redis_password`` that of ``redis_password_file``.  ``grants`` are the
    tables of ``access``, with their secrets.
    """

    role: Role = attrs.field(metadata=_NO_KEY)
    server_name: Text = "localhost"
    instance_name: Text
    database: Url
    http: Text | None = None
    stream: Texts = ()
    secret_file: Text | None = None
    redis_password_file: Text | None = attrs.field(default=None, metadata=_WORKER)
    redis_password: str | None = attrs.field(default=None, repr=False, metadata=_NO_KEY)
    secret: str | None = attrs.field(default=None, repr=False, metadata=_NO_KEY)
    grants: tuple[Grant, ...] = attrs.field(default=(), repr=False, metadata=_NO_KEY)
    ping_after: Seconds = Keepalive().ping_after
    give_up_after: Seconds = Keepalive().give_up_after
    line_limit: Annotated[int, msgspec.Meta(ge=1024)] = LINE_LIMIT
    max_queued_bytes: Count = 8 * 1024 * 1024
    max_queued_lines: Count = 100_000
    max_connections: Limit = Bounds().max_connections
    max_connections_per_address: Limit = Bounds().max_connections_per_address
    max_connects_per_minute: Limit = Bounds().max_connects_per_minute
    max_faults_per_minute: Limit = Bounds().max_faults_per_minute
    handshake_timeout: Interval = Bounds().handshake_timeout
    max_silent_connections: Limit = Bounds().max_silent_connections
    header_timeout: Interval = Bounds().header_timeout
    body_timeout: Interval = Bounds().body_timeout
    listen: Texts = ()
    insecure: bool = False
    live_page: bool = True
    traces: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    tls: Tls = attrs.field(factory=Tls)
    access: dict[Text, AccessTable] = attrs.field(factory=dict)
    streams: tuple[StreamDefinition, ...] = ()
    definitions: Texts = ()
    rooms: bool = attrs.field(default=False, metadata=_MASTER)
    retention: Text = KEEP_ALL
    retention_segments: Url | None = None
    retention_force: bool = False
    connect: Urls = attrs.field(default=(), metadata=_WORKER)
    writes: Texts = attrs.field(default=(), metadata=_WORKER)
    catch_up: Urls = attrs.field(default=(), metadata=_WORKER)
    app: Text | None = attrs.field(default=None, metadata=_WORKER)
    relay: bool | None = attrs.field(default=None, metadata=_WORKER)
    copy: bool | None = attrs.field(default=None, metadata=_WORKER)
    accept_new_history: bool = attrs.field(default=False, metadata=_WORKER)
    skip_gone: bool = attrs.field(default=False, metadata=_WORKER)
    access_tokens: bool = attrs.field(default=False, metadata=_WORKER)
    audit_interval: Interval = attrs.field(default=10.0, metadata=_WORKER)
    writers: dict[Text, WriterPlace] = attrs.field(factory=dict, metadata=_WORKER)

    @property
    def bounds(self) -> Bounds:
        """The limits of the connections that are accepted."""
        return Bounds(**{name: getattr(self, name) for name in Bounds.__struct_fields__})

    @property
    def relays(self) -> bool:
        """Whether a worker publishes what it follows: by default if it listens and writes no stream."""
        if self.relay is None:
            return self.role == "worker" and bool(self.listen) and not self.writes
        return self.relay

    @property
    def has_secret(self) -> bool:
        """Whether requests of HTTP need a secret."""
        return self.secret is not None or any(each.secret is not None for each in self.grants)


attrs.resolve_types(Config)
_KEYS: Final = attrs.fields_dict(Config)


def load(role: Role | None, path: str | None = None, options: Mapping[str, object] | None = None) -> Config:
    """Return the configuration: ``options`` first, then the TOML file at ``path``, then the defaults of ``role``.

    Without a ``role`` it is that of the file: a worker's if it has a key that only a worker has, else a master's.
    """
    given = {key: value for key, value in (options or {}).items() if value not in (None, [])}
    table = {} if path is None else _parse(path)  # once: it may be a pipe
    if role is None:
        role = "worker" if any(_KEYS[key].metadata == _WORKER for key in table if key in _KEYS) else "master"
    values = {
        **_DEFAULTS[role],
        **(_read_table(role, table, path) if path is not None else {}),
        **{key: _read_value(key, value, f"--{key.replace('_', '-')}") for key, value in given.items()},
    }
    try:
        grammar.instance_name(values["instance_name"])
    except RemoteProtocolError:
        where = "--instance-name" if "instance_name" in given else f"{path}: instance_name"
        raise ConfigError(f"{where}: a name has 1 to 255 characters and no white space") from None
    if "secret_file" in values:
        values["secret"] = read_secret(values["secret_file"])
    values["grants"] = tuple(table.grant(name) for name, table in values.get("access", {}).items())
    if "redis_password_file" in values:
        values["redis_password"] = read_secret(values["redis_password_file"])
    if role == "worker":
        values.setdefault("database", Url(f"sqlite:///replication-{values['instance_name']}.db"))
        has_endpoint = any(each.connect is not None for each in values.get("writers", {}).values())
        values.setdefault("connect", () if has_endpoint else DEFAULT_CONNECT)
    described = values.get("streams", ())
    if values.get("definitions"):
        imported = [each for name in values["definitions"] for each in import_streams(name, f"{path}: definitions")]
        values["streams"] = tuple({each.name: each for each in (*imported, *values.get("streams", ()))}.values())
    config = Config(role=role, **values)
    _check_retention(config, path, described)
    _check_tls(config, path)
    _check_access(config, path)
    _check_names(config, path)
    if role == "worker":
        _check_listen(config, path)
    if config.give_up_after <= config.ping_after:
        raise ConfigError(f"{path}: give_up_after: must be more than ping_after, which is {config.ping_after:g}")
    return config


def _check_retention(config: Config, path: str | None, described: Sequence[StreamDefinition]) -> None:
    """Raise ConfigError if this process cannot delete what the keys name; ``described`` are the streams of the file."""
    try:
        Retention.parse(config.retention)
    except ConfigError as error:
        raise ConfigError(f"{path or '--retention'}: {error}") from None
    if config.role == "master":
        return
    limits = config.retention != KEEP_ALL or config.retention_segments or config.retention_force
    if limits and not config.writes:
        raise ConfigError(f"{path}: retention without writes: a worker deletes only facts of streams that it writes")
    for each in described:
        if each.retention is not None and each.name not in config.writes:
            why = "a worker deletes only facts of streams in writes; give retention at the writer of this stream"
            raise ConfigError(f"{path}: stream {each.name!r}: retention has no effect: {why}")


def _check_tls(config: Config, path: str | None) -> None:
    """Raise ConfigError if a key of ``[tls]`` would have no effect."""
    tls = config.tls
    if tls.allow and tls.client_ca is None:
        raise ConfigError(f"{path}: tls.allow without tls.client_ca: name the file with the clients' authority")
    if tls.client_ca is not None and not any(map(has_tls, (*config.listen, config.http or ""))):
        raise ConfigError(f"{path}: tls.client_ca has no effect: no endpoint of listen or http is ssl:")
    if (tls.certificate is None) != (tls.private_key is None):
        raise ConfigError(f"{path}: tls.certificate and tls.private_key belong together: give both")
    if tls.certificate is not None and config.role == "master":
        raise ConfigError(f"{path}: tls.certificate is for a worker; the ssl: endpoints of a master name their own")


def _check_access(config: Config, path: str | None) -> None:
    """Raise ConfigError if a table of ``[access]`` would have no effect, or not the effect that it seems to have."""
    owners: dict[str | None, str] = {} if config.secret is None else {config.secret: "secret_file"}
    for grant in config.grants:
        where = f"{path}: access.{grant.name}"
        if grant.secret is None and not grant.certificates:
            raise ConfigError(f"{where}: give secret_file or certificates, or no peer has these rights")
        if grant.certificates and config.tls.client_ca is None:
            raise ConfigError(f"{where}.certificates without tls.client_ca: name the file with the clients' authority")
        if grant.secret is not None:
            if config.http is None:
                raise ConfigError(f"{where}.secret_file without http: only requests of HTTP send a secret")
            if grant.secret in owners:
                raise ConfigError(f"{where}.secret_file: {owners[grant.secret]} has the same secret: give each its own")
            owners[grant.secret] = f"access.{grant.name}"
        for key in ("read", "append"):
            for name in getattr(config.access[grant.name], key):
                _check_stream_name(name, f"{where}.{key}")


def _check_names(config: Config, path: str | None) -> None:
    """Raise ConfigError if ``stream`` or ``writes`` has a name that no stream can have."""
    for key, names in (("stream", config.stream), ("writes", config.writes)):
        for name in names:
            try:
                StreamDefinition(name)
            except ConfigError as error:
                raise ConfigError(f"{'' if path is None else f'{path}: '}{error}; correct {key}") from None


def _check_stream_name(name: str, where: str) -> None:
    try:
        if name != ALL:
            grammar.stream_name(name)
    except RemoteProtocolError as error:
        raise ConfigError(f"{where}: {error}; give names of streams, or * for all") from None


def _check_listen(config: Config, path: str | None) -> None:
    """Raise ConfigError if a worker has nothing to serve, or nowhere to serve it."""
    if config.writes and not config.listen:
        raise ConfigError(f"{path}: writes without listen: a worker that writes streams needs both keys")
    if config.listen and not config.writes and not config.relays:
        raise ConfigError(f"{path}: listen without writes, and relay = false: remove one of these keys")
    if config.relays and not (config.listen and config.http):
        missing = "http" if config.listen else "listen"
        raise ConfigError(f"{path or '--listen'}: a worker that relays what it follows needs {missing}, too")


def sockets_of(
    found: Config,
    make_wire: Callable[[], Any],
    make_http: Callable[..., Any],
    expires: dict[str, datetime] | None = None,
) -> list[Socket]:
    """Return the sockets of a daemon: those of ``listen``, then that of ``http``.

    ``make_wire`` makes the factory of the wire, and ``make_http`` that of HTTP, with ``certified``.  ``expires``
    is that of each ``Socket``.
    """
    expires = {} if expires is None else expires
    demands = found.tls.client_ca is not None
    make_socket = partial(Socket, client_ca=found.tls.client_ca, allow=found.tls.allow, expires=expires)
    sockets = [
        make_socket("listen", "the wire", each, make_wire, wire_risk(each, demands_certificates=demands))
        for each in found.listen
    ]
    if found.http is not None:
        risk = http_risk(found.http, has_secret=found.has_secret, demands_certificates=demands)
        make_site = partial(make_http, certified=demands and has_tls(found.http))
        sockets.append(make_socket("http", "HTTP", found.http, make_site, risk))
    return sockets


def replace_access(access: Access, first: Config, read: Callable[[], Config]) -> None:
    """Read secrets and rights again; ConfigError changes nothing.

    ``first`` is the configuration of the start.  What is open to other hosts was decided by its secrets.
    """
    found = read()
    if first.has_secret and not found.has_secret:
        raise ConfigError("no secret is configured any more, and that needs a restart")
    if _names_certificates(access.grants) and not _names_certificates(found.grants):
        why = "each certificate would have every right, and that needs a restart"
        raise ConfigError(f"no table of [access] names certificates any more: {why}")
    access.replace(found.grants, found.secret)


def _names_certificates(grants: Sequence[Grant]) -> bool:
    return any(each.certificates for each in grants)


def import_streams(name: str, where: str) -> list[StreamDefinition]:
    """Return the definitions in a module's ``STREAMS``, typed or plain; ConfigError has the module and ``where``."""
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
        import tomllib  # noqa: PLC0415 (only where there is a file)

        return tomllib.loads(read_text(path, "configuration"))
    except (ValueError, RecursionError) as error:  # a number with too many digits, too many brackets
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _read_table(role: Role, table: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Check the file's keys, and convert their values."""
    owners = {key: field.metadata.get("role", role) for key, field in _KEYS.items()}
    for key in table:
        if (owner := owners.get(key, "none")) not in (role, "none"):
            raise ConfigError(f"{path}: {key}: only a {owner} has this key, and this is a {role}'s configuration")
    _refuse_unknown(table, [key for key, owner in owners.items() if owner == role], path)
    for key in table["rooms"] if isinstance(table.get("rooms"), dict) else ():
        raise ConfigError(f"{path}: rooms.{key}: unknown key; the table [rooms] has no keys")
    streams = table.get("streams")
    if isinstance(streams, str) or (isinstance(streams, list) and any(isinstance(each, str) for each in streams)):
        raise ConfigError(f"{path}: streams: these are [[streams]] tables; did you mean stream, which takes names?")
    for number, stream in enumerate(_tables(streams)):
        _refuse_unknown(stream, attrs.fields_dict(StreamDefinition), path, f"streams[{number}].")
        for index, source in enumerate(_tables(stream.get("tables"))):
            _refuse_unknown(source, attrs.fields_dict(SourceTable), path, f"streams[{number}].tables[{index}].")
    writers = table.get("writers")
    for name, writer in writers.items() if isinstance(writers, dict) else ():
        for place in _tables([writer]):
            _refuse_unknown(place, WriterPlace.__struct_fields__, path, f"writers.{name}.")
    access = table.get("access")
    for name, entry in access.items() if isinstance(access, dict) else ():
        for each in _tables([entry]):
            _refuse_unknown(each, AccessTable.__struct_fields__, path, f"access.{name}.")
    if isinstance(tls := table.get("tls"), dict):
        _refuse_unknown(tls, Tls.__struct_fields__, path, "tls.")
    given = {**table, "rooms": True} if table.get("rooms") == {} else table
    return {key: _read_value(key, value, f"{path}: {key}") for key, value in given.items()}


def _tables(value: object) -> Iterable[Mapping[str, Any]]:
    """Return the tables in ``value``; the check of the type refuses other values."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], path: str, prefix: str = "") -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {hide_secrets(prefix + key)}: unknown key{did_you_mean(key, known)}")


def _read_value(key: str, value: object, where: str) -> Any:
    """Return ``value`` as the type of its field; ConfigError has ``where`` and the reason."""
    kind: Any = _KEYS[key].type
    if kind in (Texts, Urls) and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, kind, dec_hook=_read_url)
    except msgspec.ValidationError as error:
        text, _, inner = str(error).partition(" - at `$")
        for ours, tomls in (("object", "table"), ("Object", "table"), (" | null", "")):
            text = text.replace(ours, tomls)
        raise ConfigError(f"{where}{inner.rstrip('`').replace('[...]', '.*')}: {text}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_url(_: type, value: object) -> Url:
    """Return the value of a field of type Url, the only type that msgspec does not know."""
    try:
        return Url(msgspec.convert(value, Text))
    except msgspec.ValidationError as error:
        raise ValueError(error) from None  # to this error msgspec adds where the field is
