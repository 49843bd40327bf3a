"""Tests of the blocking client: what it asks, and how long it waits for whom."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from replication.errors import CatchUpError, ConfigError
from replication.replay.api import Api, AwayError, StreamInfo
from replication.wire.grammar import Token
from tests.replay.histories import MASTER, OTHER, fact
from tests.replay.served import FakeMaster, served

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTS = [fact(token, *[["é", token, index] for index in range(token % 3 + 1)]) for token in range(2, 40, 2)]


@pytest.fixture
def master() -> Iterator[FakeMaster]:
    with served(FakeMaster(("a", "b", "c"))) as fake:
        fake.histories = {MASTER: FACTS, OTHER: []}
        yield fake


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patient(url: str, patience: float) -> tuple[Api, Time]:
    time = Time()
    return Api(url, patience=patience, now=time, sleep=time.sleep), time


def test_a_streams_fields_and_positions(master: FakeMaster) -> None:
    with closing(Api(master.url)) as api:
        assert api.stream("orders") == StreamInfo(("a", "b", "c"), {MASTER: Token(38), OTHER: Token(1)})
        master.row = None
        assert api.stream("orders").fields is None


def test_pages_put_together_are_the_history(master: FakeMaster) -> None:
    with closing(Api(master.url)) as api:
        pages = list(api.pages("orders", MASTER, after=6, upto=30))
        assert [each for page in pages for each in page.facts] == FACTS[3:15]
        assert api.page("orders", MASTER, after=0, upto=38, limit=5).facts == FACTS[:2]
        assert list(api.pages("orders", MASTER, after=30, upto=30)) == []


def test_the_secret_is_shown_and_a_wrong_one_is_not_tried_again(master: FakeMaster) -> None:
    master.secret = "abc"
    with closing(Api(master.url, "abc", patience=60)) as api:
        assert api.stream("orders").positions
    for secret, said in (("abd", "the secret is wrong"), (None, "it wants a secret: give the option secretFile")):
        with (
            closing(Api(master.url, secret, patience=60)) as api,
            pytest.raises(CatchUpError, match=f"says 401: {said}"),
        ):
            api.stream("orders")
    assert len(master.asked) == 3


def test_what_is_not_there_is_named_and_not_tried_again(master: FakeMaster) -> None:
    with closing(Api(master.url, patience=60)) as api, pytest.raises(CatchUpError, match="says 404: no such stream"):
        api.stream("odrers")
    assert len(master.asked) == 1


def test_one_that_is_away_is_asked_again_ever_more_slowly(master: FakeMaster) -> None:
    master.away = 7
    api, time = patient(master.url, 60.0)
    with closing(api):
        assert api.stream("orders").positions[MASTER] == 38
    assert len(master.asked) == 8
    assert time.now == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 2.0 + 2.0)


def test_one_that_stays_away_is_given_up(master: FakeMaster) -> None:
    master.away = 1_000
    api, time = patient(master.url, 5.0)
    with closing(api), pytest.raises(AwayError, match="says 503: the database is restarting"):
        api.page("orders", MASTER, after=0, upto=9)
    assert time.now <= 5.0
    with closing(Api(master.url)) as impatient, pytest.raises(AwayError):
        impatient.stream("orders")


def test_one_whose_port_is_closed_is_away() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with (
        closing(Api(url)) as api,
        pytest.raises(AwayError, match=f"cannot reach {url}: Connection refused; is"),
    ):
        api.stream("orders")


def test_facts_that_are_not_there_yet_are_waited_for(master: FakeMaster) -> None:
    """A master that was killed may announce again a little later what it had announced."""
    master.reached[MASTER] = 10
    api, time = patient(master.url, 60.0)
    sleep = time.sleep

    def come_back(seconds: float) -> None:
        sleep(seconds)
        if time.now > 3:
            master.reached.clear()

    api._sleep = come_back
    with closing(api):
        found = [each for page in api.pages("orders", MASTER, after=0, upto=38) for each in page.facts]
    assert found == FACTS


def test_a_position_that_went_back_for_good_is_an_error(master: FakeMaster) -> None:
    master.reached[MASTER] = 10
    api, _ = patient(master.url, 60.0)
    with closing(api), pytest.raises(AwayError, match="has nothing of master after 10 yet"):
        list(api.pages("orders", MASTER, after=0, upto=38))


@pytest.mark.parametrize(
    "url", ["ftp://here", "here:9093", "http://", "", "http://[here", "http://here:x", "http://me@here"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="it looks like http://"):
        Api(url)


def test_an_answer_that_is_none_of_ours_is_an_error() -> None:
    with served(FakeMaster()) as fake:
        fake.answer = lambda *_: (404, b"<html>")  # type: ignore[method-assign]
        with closing(Api(fake.url)) as api, pytest.raises(CatchUpError, match="says 404: Not Found"):
            api.stream("orders")
