"""The configuration: a wrong key, type or value is named in one line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from replication import config, synapse
from replication.errors import ConfigError
from replication.net.access import Access, Grant, Rights
from replication.streams.definitions import StreamDefinition
from replication.urls import Url
from replication.wire.grammar import StreamName

CONF = Path(__file__).parent.parent / "conf"


def refusal(tmp_path: Path, text: str, role: config.Role = "master") -> str:
    """Return the error of load(), and check that it is one line with the name of the file."""
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(role, str(path))
    output = str(caught.value)
    assert "\n" not in output
    assert str(path) in output
    return output.replace(str(path), "FILE")


def test_a_master_without_options_has_the_documented_defaults() -> None:
    found = config.load("master")
    assert found.server_name == "localhost"
    assert found.instance_name == "master"
    assert found.database == Url("sqlite:///replication.db")
    assert found.listen == ("tcp:9092:interface=127.0.0.1",)
    assert found.http == "tcp:9093:interface=127.0.0.1"
    assert found.stream == ()
    assert found.secret is None


def test_a_worker_without_options_has_the_documented_defaults() -> None:
    found = config.load("worker")
    assert found.instance_name == "worker1"
    assert found.database == Url("sqlite:///replication-worker1.db")
    assert found.connect == (Url("tcp:127.0.0.1:9092"),)
    assert found.listen == ()
    assert found.http is None
    assert found.catch_up == ()


def test_a_worker_database_is_named_after_its_instance() -> None:
    assert config.load("worker", options={"instance_name": "w7"}).database == Url("sqlite:///replication-w7.db")


def test_an_option_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('server_name = "file"\ninstance_name = "m2"\nlisten = ["unix:a", "unix:b"]\n')
    found = config.load("master", str(path), {"server_name": "option", "listen": [], "http": None})
    assert (found.server_name, found.instance_name) == ("option", "m2")
    assert found.listen == ("unix:a", "unix:b")
    assert found.http == "tcp:9093:interface=127.0.0.1"


def test_one_value_stands_for_a_list_of_one(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('listen = "unix:a"\n')
    assert config.load("master", str(path)).listen == ("unix:a",)


def test_an_unknown_key_is_named_with_its_file_and_its_neighbour(tmp_path: Path) -> None:
    assert refusal(tmp_path, 'server-name = "x"') == "FILE: server-name: unknown key; did you mean server_name?"


@pytest.mark.parametrize("role", ["master", "worker"])
@pytest.mark.parametrize("key", ["zzz", "config"])
def test_an_unknown_key_that_is_like_no_other_gets_no_suggestion(tmp_path: Path, key: str, role: config.Role) -> None:
    assert refusal(tmp_path, f"{key} = 1", role) == f"FILE: {key}: unknown key"


@pytest.mark.parametrize("value", ['"orders"', '["orders"]'])
def test_names_in_streams_are_refused_with_the_key_for_names(tmp_path: Path, value: str) -> None:
    assert refusal(tmp_path, f"streams = {value}") == (
        "FILE: streams: these are [[streams]] tables; did you mean stream, which takes names?"
    )


def test_an_unknown_key_inside_a_table_is_named_with_its_place(tmp_path: Path) -> None:
    assert refusal(tmp_path, '[[streams]]\nname = "a"\n[[streams]]\nname = "b"\ntabel = "t"') == (
        "FILE: streams[1].tabel: unknown key; did you mean table?"
    )
    assert refusal(tmp_path, '[[streams]]\nname = "a"\n[[streams.tables]]\ntable = "b"\njoin = "c"') == (
        "FILE: streams[0].tables[0].join: unknown key; did you mean joins?"
    )
    assert refusal(tmp_path, '[writers.w2]\nconect = "tcp:a:1"', "worker") == (
        "FILE: writers.w2.conect: unknown key; did you mean connect?"
    )


def test_a_name_that_is_no_key_is_unknown(tmp_path: Path) -> None:
    assert "FILE: secret: unknown key" in refusal(tmp_path, 'secret = "x"')
    assert "FILE: role: unknown key" in refusal(tmp_path, 'role = "master"')
    assert "FILE: rooms.size: unknown key; the table [rooms] has no keys" in refusal(tmp_path, "[rooms]\nsize = 1")


def test_the_other_roles_key_is_refused_as_such(tmp_path: Path) -> None:
    assert refusal(tmp_path, 'connect = ["tcp:a:1"]') == (
        "FILE: connect: only a worker has this key, and this is a master's configuration"
    )
    assert "only a master has this key" in refusal(tmp_path, "[rooms]", "worker")


def test_a_worker_that_writes_is_followed_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    for text, why in (
        ('listen = ["tcp:0"]', "FILE: a worker that relays what it follows needs http, too"),
        ("relay = true", "FILE: a worker that relays what it follows needs listen, too"),
        (
            'listen = ["tcp:0"]\nrelay = false',
            "FILE: listen without writes, and relay = false: remove one of these keys",
        ),
        ('writes = ["a"]', "FILE: writes without listen: a worker that writes streams needs both keys"),
    ):
        assert refusal(tmp_path, text, "worker") == why


def test_keys_of_tls_that_would_have_no_effect_are_refused(tmp_path: Path) -> None:
    ssl = 'listen = ["ssl:9092"]\nhttp = "tcp:1"\n'
    no_ssl = "FILE: tls.client_ca has no effect: no endpoint of listen or http is ssl:"
    for text, why in (
        ('[tls]\nallow = ["a"]', "FILE: tls.allow without tls.client_ca: name the file with the clients' authority"),
        ('[tls]\nclient_ca = "ca.pem"', no_ssl),
        ('[tls]\ncertificate = "c.pem"', "FILE: tls.certificate and tls.private_key belong together: give both"),
        (ssl + '[tls]\nclientca = "x"', "FILE: tls.clientca: unknown key; did you mean client_ca?"),
        (ssl + '[tls]\nclient_ca = "ca.pem"\nallow = 1', "FILE: tls.allow: Expected `array`, got `int`"),
    ):
        assert refusal(tmp_path, text, "worker").startswith(why)
    shown = '[tls]\ncertificate = "c.pem"\nprivate_key = "k.pem"'
    assert "tls.certificate is for a worker" in refusal(tmp_path, shown)


def test_the_certificate_that_a_worker_shows_is_a_pair_of_files(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text('[tls]\ncertificate = "c.pem"\nprivate_key = "k.pem"')
    assert config.load("worker", str(tmp_path / "worker.toml")).tls.shown == ("c.pem", "k.pem")
    assert config.load("worker").tls.shown is None


def test_the_default_writer_is_not_connected_to_beside_others_that_are_named(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text('[writers.w2]\nconnect = "tcp:10.0.0.2:9092"\n')
    assert config.load("worker", str(path)).connect == ()


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("server_name = 1", "FILE: server_name: Expected `str`, got `int`"),
        ('server_name = ""', "FILE: server_name: Expected `str` of length >= 1"),
        ("listen = 9092", "FILE: listen: Expected `array`, got `int`"),
        ("listen = ['a', 1]", "FILE: listen[1]: Expected `str`, got `int`"),
        ('ping_after = "5"', "FILE: ping_after: Expected `float`, got `str`"),
        ("ping_after = 0", "FILE: ping_after: Expected `float` > 0.0"),
        ("ping_after = true", "FILE: ping_after: Expected `float`, got `bool`"),
        ("max_queued_lines = 1.5", "FILE: max_queued_lines: Expected `int`, got `float`"),
        ("line_limit = 3", "FILE: line_limit: Expected `int` >= 1024"),
        ("streams = 1", "FILE: streams: Expected `array`, got `int`"),
        ("streams = [1]", "FILE: streams[0]: Expected `table`, got `int`"),
        ("[[streams]]\nrow = []", "FILE: streams[0]: table missing required field `name`"),
        ('[[streams]]\nname = "a"\nrow = [1]', "FILE: streams[0].row[0]: Expected `str`, got `int`"),
        ('instance_name = "a b"', "FILE: instance_name: a name has 1 to 255 characters"),
        ("ping_after = 20", "FILE: give_up_after: must be more than ping_after, which is 20"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path: Path, text: str, output: str) -> None:
    assert refusal(tmp_path, text).startswith(output)


def test_a_definition_that_cannot_work_is_named_with_its_key(tmp_path: Path) -> None:
    output = refusal(tmp_path, '[[streams]]\nname = "a"\ntable = "t"')
    assert output == "FILE: streams: stream 'a' is mapped onto table 't': row must list its columns"


def test_a_writers_table_is_checked(tmp_path: Path) -> None:
    output = refusal(tmp_path, "[writers.w2]\nconnect = 1", "worker")
    assert output == "FILE: writers.*.connect: Expected `str`, got `int`"
    assert refusal(tmp_path, "writers = 1", "worker") == "FILE: writers: Expected `table`, got `int`"
    path = tmp_path / "worker.toml"
    path.write_text('[writers.w2]\nhttp = "http://a"')
    found = config.load("worker", str(path))
    assert (found.writers["w2"].connect, found.connect) == (None, config.DEFAULT_CONNECT)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('retention = "30 years"', "FILE: retention '30 years': write 30d, 12h, 1000000 rows or 10 GiB"),
        ('[[streams]]\nname = "a"\nretention = "1d, 2d"', "stream 'a': retention '1d, 2d': write 30d"),
        ('[[streams]]\nname = "a"\nretention = 30', "FILE: streams[0].retention: Expected `str"),
        (
            '[[streams]]\nname = "a"\ntable = "t"\nrow = ["b"]\nretention = "1d"',
            "stream 'a': only facts of a generic table have a retention",
        ),
    ],
)
def test_a_wrong_retention_is_refused(tmp_path: Path, text: str, error: str) -> None:
    assert error in refusal(tmp_path, text)


@pytest.mark.parametrize("text", ['retention = "1d"', 'retention_segments = "/archive"', "retention_force = true"])
def test_a_worker_that_only_follows_deletes_nothing(tmp_path: Path, text: str) -> None:
    relay = f'{text}\nlisten = "tcp:1:interface=127.0.0.1"\nhttp = "tcp:2:interface=127.0.0.1"'
    for each in (text, relay):
        assert "retention without writes" in refusal(tmp_path, each, "worker")


def test_a_worker_deletes_only_facts_of_streams_that_it_writes(tmp_path: Path) -> None:
    streams = '[[streams]]\nname = "a"\nretention = "1d"'
    place = 'listen = "tcp:1:interface=127.0.0.1"\nhttp = "tcp:2:interface=127.0.0.1"'
    assert refusal(tmp_path, f"{place}\n{streams}", "worker") == (
        "FILE: stream 'a': retention has no effect: a worker deletes only facts of streams in writes; "
        "give retention at the writer of this stream"
    )
    path = tmp_path / "writing.toml"
    path.write_text(f'writes = ["a"]\nrelay = true\n{place}\n{streams}')
    assert config.load("worker", str(path)).streams[0].retention == "1d"


def test_a_file_that_is_not_toml_is_named_with_the_line(tmp_path: Path) -> None:
    output = refusal(tmp_path, "a = 1\nb c")
    assert output.startswith("FILE: not TOML: ")
    assert "line 2" in output


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file or directory"):
        config.load("master", str(tmp_path / "absent.toml"))
    (tmp_path / "latin.toml").write_bytes(b'server_name = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml: it is not UTF-8"):
        config.load("master", str(tmp_path / "latin.toml"))


def test_a_wrong_option_is_named_as_it_was_typed() -> None:
    with pytest.raises(ConfigError, match=r"^--server-name: Expected `str` of length >= 1$"):
        config.load("master", options={"server_name": ""})
    with pytest.raises(ConfigError, match=r"^--instance-name: a name has 1 to 255 characters"):
        config.load("master", options={"instance_name": "a b"})


def test_the_secret_is_read_stripped_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("  hush hush\n")
    found = config.load("master", options={"secret_file": str(path)})
    assert found.secret == "hush hush"
    assert "hush" not in repr(found)


def test_an_empty_or_absent_secret_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(" \n")
    with pytest.raises(ConfigError, match=r"the secret file .*secret is empty"):
        config.load("master", options={"secret_file": str(path)})
    with pytest.raises(ConfigError, match=r"cannot read the secret file .*absent: No such file"):
        config.load("master", options={"secret_file": str(tmp_path / "absent")})


def test_the_sample_for_a_synapse_declares_its_streams() -> None:
    found = config.load("master", str(CONF / "synapse.toml"))
    assert [each.name for each in found.streams] == [each.name for each in synapse.STREAMS]
    assert found.instance_name == "master"


def test_streams_come_from_modules_too_and_those_in_the_file_win(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('definitions = "replication.synapse"\n[[streams]]\nname = "events"\n[[streams]]\nname = "orders"')
    found = {each.name: each for each in config.load("master", str(path)).streams}
    assert set(found) == {each.name for each in synapse.STREAMS} | {"orders"}
    assert found[StreamName("events")] == StreamDefinition("events")


@pytest.mark.parametrize(
    ("module", "output"),
    [
        ("no.such.module", "module 'no.such.module' cannot be imported: No module named 'no'"),
        ("..", "module '..' cannot be imported"),
        ("replication.errors", "module 'replication.errors' has no STREAMS, a list of stream definitions"),
    ],
)
def test_a_module_without_streams_is_named(tmp_path: Path, module: str, output: str) -> None:
    assert output in refusal(tmp_path, f'definitions = ["{module}"]')


def test_a_value_among_streams_that_is_no_definition_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synapse, "STREAMS", [StreamDefinition("orders"), "payments"])
    output = refusal(tmp_path, 'definitions = ["replication.synapse"]')
    assert "STREAMS of module 'replication.synapse' has 'payments', which is no stream definition" in output


def test_the_samples_in_conf_load() -> None:
    master = config.load("master", str(CONF / "master.toml"))
    assert all(isinstance(each, StreamDefinition) for each in master.streams)
    worker = config.load("worker", str(CONF / "worker.toml"))
    assert worker.connect == (Url("tcp:127.0.0.1:9092"),)


@pytest.mark.parametrize("role", ["master", "worker"])
def test_the_samples_show_every_key_and_what_they_comment_out_loads_too(tmp_path: Path, role: config.Role) -> None:
    """A user finds a key only in the samples."""
    text = (CONF / f"{role}.toml").read_text()
    uncommented = re.sub(r"(?m)^# (?=\[|\w+ = )", "", text).replace("/etc/replication/", f"{tmp_path}/")
    uncommented = uncommented.replace('"tcp:90', '"ssl:90')  # which [tls] needs
    (tmp_path / "secret").write_text("hush")
    (tmp_path / "redis-password").write_text("psst")
    (tmp_path / "all.toml").write_text(uncommented)
    found = config.load(role, str(tmp_path / "all.toml"))
    assert found.secret == "hush"
    assert found.redis_password == ("psst" if role == "worker" else None)
    shown = tomllib.loads(uncommented)
    assert set(shown) == {key for key, field in config._KEYS.items() if field.metadata.get("role", role) == role}


def test_tables_of_access_that_would_not_do_what_they_seem_to_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush")
    secret = f'secret_file = "{tmp_path}/secret"\n'
    for text, why in (
        ("[access.a]\nread = ['orders']", "FILE: access.a: give secret_file or certificates"),
        ("[access.a]\ncertificates = ['w']", "FILE: access.a.certificates without tls.client_ca: name the file"),
        (f"{secret}[access.a]\n{secret}", "FILE: access.a.secret_file: secret_file has the same secret"),
        (f"[access.a]\n{secret}[access.b]\n{secret}", "FILE: access.b.secret_file: access.a has the same secret"),
        (f"[access.a]\n{secret}read = ['no stream']", "FILE: access.a.read: "),
        (f"[access.a]\n{secret}reads = ['*']", "FILE: access.a.reads: unknown key; did you mean read?"),
        (f"[access.a]\n{secret}read = '*'", "FILE: access.*.read: Expected `array`, got `str`"),
    ):
        assert refusal(tmp_path, text).startswith(why), text
    assert "access.a.secret_file without http" in refusal(tmp_path, f"[access.a]\n{secret}", "worker")


def test_without_a_table_for_certificates_the_rights_stay_as_they_were(tmp_path: Path) -> None:
    """A file that was empty for a moment, at SIGHUP, gave every right to every certificate."""
    path = tmp_path / "master.toml"
    tls = "listen = 'ssl:0'\n[tls]\nclient_ca = 'ca.pem'\n"
    path.write_text(f"{tls}[access.shop]\ncertificates = ['shop']\nread = ['orders']")
    first = config.load("master", str(path))
    access = Access(first.grants)

    def replace() -> None:
        config.replace_access(access, first, lambda: config.load("master", str(path)))

    for text in ("", tls, f"{tls}[access.shop]\nsecret_file = '{tmp_path}/secret'\n"):
        (tmp_path / "secret").write_text("hush")
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"no table of \[access\] names certificates any more"):
            replace()
        assert access.grants == first.grants
    path.write_text(f"{tls}[access.other]\ncertificates = ['other']")
    replace()
    assert [each.name for each in access.grants] == ["other"]


def test_the_rights_of_a_table_are_those_of_its_keys(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    path = tmp_path / "master.toml"
    path.write_text(
        f"[access.shop]\nsecret_file = '{tmp_path}/secret'\nread = ['*']\nappend = ['orders']\nadmin = true"
    )
    found = config.load("master", str(path))
    rights = Rights(("shop",), {"*"}, {"orders"}, commands=False, admin=True)
    assert found.grants == (Grant(rights, "hush"),)
    assert "hush" not in repr(found)
    (_, http) = config.sockets_of(found, object, object)
    assert "without TLS, and the secret can be read on the way" in http.open_risk, "a secret of a table is a secret"
