"""URLs hide their secrets: in every form in which they are given, and in every text made of them."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replication.urls import Url, hide_secret, hide_secrets, is_host
from tests.system.daemons import environment

SECRET = "hunter2secret"
SHOWN = {
    "sqlite:///replication.db": "sqlite:///replication.db",
    "sqlite:////srv/me@home/a.db": "sqlite:////srv/me@home/a.db",
    "sqlite://": "sqlite://",
    "http://127.0.0.1:9093": "http://127.0.0.1:9093",
    "https://[::1]:9093/below": "https://[::1]:9093/below",
    "tcp:127.0.0.1:9092": "tcp:127.0.0.1:9092",
    "unix:/run/me@home/wire": "unix:/run/me@home/wire",
    "tls:h:9092:privateKey=/etc/key.pem": "tls:h:9092:privateKey=/etc/key.pem",
    "segments/of/me@home": "segments/of/me@home",
    "s3://bucket/out": "s3://bucket/out",
    "postgresql://me@here:5/db": "postgresql://me@here:5/db",
    "postgresql://me@one:1,two:2/db": "postgresql://me@one:1,two:2/db",
    "postgresql:///db": "postgresql:///db",
    "postgresql://%2Frun%2Fpg/db": "postgresql://%2Frun%2Fpg/db",
    "abfs://container@account/out": "abfs://container@account/out",
    f"postgresql://me:{SECRET}@here:5/db": "postgresql://me@here:5/db",
    f"postgresql://me@here/db?password={SECRET}": "postgresql://me@here/db?…",
    f"postgresql://me:{SECRET}%zz@here/db": "postgresql://me@here/db",
    f"postgresql://me:x{SECRET}@@here@there/db": "postgresql://…@there/db",
    f"postgresql://me:{SECRET}/db": "postgresql://…",
    f"postgresql://me:x/{SECRET}@here/db": "postgresql://…@here/db",
    f"postgresql://me:x?{SECRET}@here/db": "postgresql://…",
    f"postgresql://here:5432/db?password=x@{SECRET}": "postgresql://…",
    f"postgresql://here/db&user=me&password={SECRET}": "postgresql://here/db&user=me&password=…",
    f"postgresql://here/db;password={SECRET};user=me": "postgresql://here/db;password=…",
    f"postgresql:/me:{SECRET}@here/db": "…@here/db",
    f"me:{SECRET}@here/db": "…@here/db",
    f"host=here password={SECRET} user=me": "host=here password=… user=me",
    f"host=here password = '{SECRET} x'": "host=here password = …",
    f"host=here password=x\\ {SECRET} user=me": "host=here password=… user=me",
    f"host=here password='x\\'{SECRET}' user=me": "host=here password=… user=me",
    f"host=here password='x {SECRET}": "host=here password=…",
    f"http://me:{SECRET}@here:9093": "http://…@here:9093",
    f"https://{SECRET}@here:9093": "https://…@here:9093",
    f"http://here:9093/?token={SECRET}": "http://here:9093/?…",
    f"s3://key:{SECRET}@bucket/out?region=x": "s3://…@bucket/out?…",
    f"redis://me:{SECRET}@here:6379": "redis://me@here:6379",
    f"redis://{SECRET}@here:6379": "redis://…@here:6379",
    f"rediss://{SECRET}@here:6379/0": "rediss://…@here:6379/0",
    f"tcp:me:{SECRET}@here:9092": "…@here:9092",
    f"--database=postgresql://me:{SECRET}@here/db": "--database=postgresql://…@here/db",
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_url_is_shown_without_its_secrets(text: str) -> None:
    url = Url(text)
    assert str(url) == f"{url}" == SHOWN[text]
    assert repr(url) == repr(SHOWN[text])
    assert SECRET not in f"{url!s} {url!r} {[url]} {url!r:.200}"


@given(
    scheme=st.sampled_from(["postgresql", "http", "https", "s3", "mysql"]),
    user=st.text("abc", max_size=3),
    around=st.tuples(st.text("a1:/?#%[].&=", max_size=4), st.text("a1:/?#%[].&=", max_size=4)),
    place=st.sampled_from(["@h", "@h:1", "@h/db", "@[::1]:5/db?x=y", "@h,g/db", "@h/db?password=x"]),
)
@example(scheme="http", user="", around=("", ""), place="@h")
def test_no_spelling_of_a_password_is_shown(scheme: str, user: str, around: tuple[str, str], place: str) -> None:
    """It may have any characters, escaped or not."""
    before, after = around
    for password in (f"{before}{SECRET}{after}", quote(f"{before}{SECRET}{after}", safe="")):
        assert SECRET not in str(Url(f"{scheme}://{user}:{password}{place}"))


def test_a_url_is_made_of_another_one_and_equals_those_of_the_same_text() -> None:
    url = Url(f"http://me:{SECRET}@h")
    assert Url(url) == url == pickle.loads(pickle.dumps(url))
    assert url != Url("http://…@h")
    assert url != url.reveal()
    assert {url: 1}[Url(url.reveal())] == 1
    assert url.reveal() == f"http://me:{SECRET}@h"


def test_secrets_are_left_out_of_a_drivers_message() -> None:
    url = Url(f"postgresql://me:{SECRET}@h/db?sslpassword=other{SECRET}")
    assert url.hide_in(f'invalid "{SECRET}", or "other{SECRET}"') == 'invalid "…", or "…"'
    assert Url("postgresql://h/db?sslkey=/etc/client.key").hide_in("in /etc/client.key") == "in /etc/client.key"
    assert Url("postgresql://h/db?sslkey=/etc/k").hide_in('cannot read "/etc/k"') == 'cannot read "/etc/k"'
    assert Url(f"postgresql://h/db?sslmode={SECRET}").hide_in(f'invalid sslmode value: "{SECRET}"').endswith(': "…"')
    url = Url(f"postgresql://h/db?options=-c%20statement_timeout%3D{SECRET}%20--x%3Da%5C%20b")
    assert (
        url.hide_in(f'invalid value for "statement_timeout": "{SECRET}"')
        == 'invalid value for "statement_timeout": "…"'
    )
    assert url.hide_in('invalid value for "x": "a b"') == 'invalid value for "x": "…"'
    for option in ("secret_key", "access_key_id", "session_token", "signature"):
        url = Url(f"s3://bucket/out?region=x&{option}={SECRET}&scheme=http")
        assert url.hide_in(f"x http {SECRET}") == "x http …"


def test_a_secret_with_a_colon_is_left_out_of_a_drivers_message() -> None:
    assert Url("postgresql://me:hunter:2secret@h/db").hide_in("no hunter:2secret") == "no …"


def test_a_secret_in_the_place_of_a_port_is_left_out_of_a_drivers_message() -> None:
    """A driver quotes it as a wrong port if the host was forgotten."""
    for url in ("postgresql://me:hunter%2Fsecret", "postgresql://me:hunter%2Fsecret/db?x=y"):
        assert Url(url).hide_in('invalid value "hunter/secret" for "port"') == 'invalid value "…" for "port"'
    assert Url("postgresql://h:5432,g:5433/db").hide_in("at h:5432,g:5433") == "at h:5432,g:5433"


def test_a_secret_is_hidden_also_where_only_its_beginning_is_quoted() -> None:
    secret = "hunter2" * 20
    for length in (len(secret), 128, 8):
        assert hide_secret(f"not 'Bearer {secret[:length]}'", secret) == "not 'Bearer …'"
    assert hide_secret("the hunter was shot, xx", "xx") == "the hunter was shot, …"
    assert hide_secret("nothing", "") == "nothing"


def test_a_message_that_quotes_arguments_is_shown_without_secrets() -> None:
    assert hide_secrets(f"no option '--x=http://me:{SECRET}@h' here") == "no option '--x=http://…@h' here"
    assert hide_secrets(f"no option '--x=http://me:a {SECRET}@h' here") == "no option '--x=http://…@h' here"
    assert hide_secrets(f"no a://me:x@h redis://:b'{SECRET}@h e") == "no a://…@h e"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process change what ps shows")
def test_the_arguments_that_ps_shows_have_no_secret() -> None:
    code = "from replication.urls import hide_arguments as h; h(); print(open('/proc/self/cmdline').read())"
    given = [f"--database=postgresql://me:{SECRET}@here/db", f"postgresql://me:{SECRET}@here/db", "plain", "a@b"]
    shown = subprocess.run(
        [sys.executable, "-c", code, *given], env=environment(), check=True, capture_output=True, text=True
    ).stdout
    assert SECRET not in shown
    assert [each.strip() for each in shown.split("\0")[3:7]] == [
        "--database=postgresql://…@here/db",
        "postgresql://me@here/db",
        "plain",
        "a@b",
    ]


@pytest.mark.parametrize("text", ["", "localhost", "here.", "127.0.0.1", "fe80::1%eth0", "a_b.example", "a" * 63])
def test_a_host_that_the_resolver_takes(text: str) -> None:
    assert is_host(text)


@pytest.mark.parametrize("text", ["a..b", ".a", "a" * 64, f"{'a' * 64}.example"])
def test_a_host_for_which_the_resolver_fails_with_a_unicode_error(text: str) -> None:
    assert not is_host(text)
    with pytest.raises(UnicodeError):
        socket.getaddrinfo(text, 1)
