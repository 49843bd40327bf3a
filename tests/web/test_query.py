"""What a request asks for, read strictly: through a site, because that is where requests are."""

from __future__ import annotations

import pytest

from tests.web.served import Client, fact, served_site

UPDATES = "/v1/streams/orders/updates"


def test_what_is_asked_is_what_is_looked_up() -> None:
    served, site, _ = served_site()
    served.keep("orders", "a b/\u00e9", [fact(5, ["x", "y"])])
    query = "instance=a%20b/%C3%A9&from=2&upto=9&limit=10000"
    refused = Client(site).ask("GET", f"{UPDATES}?{query}")
    assert (refused.code, refused.detail) == (400, "not an instance name: 'a b/\u00e9'")
    served.keep("orders", "a/\u00e9+", [fact(5, ["x", "y"])])
    assert Client(site).ask("GET", f"{UPDATES}?instance=a/%C3%A9%2B&from=2&upto=9&limit=10000").code == 200
    assert served.asked == [("orders", "a/\u00e9+", 2, 9, 10_000)]


def test_without_a_limit_a_page_has_about_a_thousand_rows() -> None:
    served, site, _ = served_site()
    Client(site).ask("GET", f"{UPDATES}?instance=master&from=0&upto=9")
    assert served.asked == [("orders", "master", 0, 9, 1_000)]


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("", "'instance' is missing"),
        ("instance=master&from=1", "'upto' is missing"),
        ("instance=master&upto=1", "'from' is missing"),
        ("from=1&upto=2", "'instance' is missing"),
        ("instance=master&from=1&upto=2&form=3", "unknown parameter 'form'; known here: instance, from, upto, limit"),
        ("instance=master&from=1&upto=2&%ff=3", r"unknown parameter '\\xff'"),
        ("instance=master&from=1&upto=2&from=1", "'from' is given 2 times"),
        ("instance=master&from=x&upto=2", "'x'"),
        ("instance=master&from=&upto=2", "from: "),
        ("instance=master&from=1&upto=2.0", "'2.0'"),
        ("instance=master&from=1&upto=1_0", "upto: "),
        ("instance=master&from=1&upto=%2B5", "upto: "),
        ("instance=master&from=1&upto=05", "upto: "),
        ("instance=master&from=1&upto=%D9%A3", "upto: "),
        ("instance=master&from=1&upto=9223372036854775808", "upto: "),
        ("instance=master&from=-1&upto=2", "from: -1 is negative"),
        ("instance=master&from=3&upto=2", "upto (2) is less than from (3)"),
        ("instance=master&from=1&upto=2&limit=0", "limit: 0 is not between 1 and 10000"),
        ("instance=master&from=1&upto=2&limit=10001", "limit: 10001 is not"),
        ("instance=master&from=1&upto=2&limit=ten", "limit: "),
        ("instance=&from=1&upto=2", "not an instance name: ''"),
        ("instance=a%0Ab&from=1&upto=2", r"not an instance name: 'a\nb'"),
    ],
)
def test_a_wrong_parameter_is_named(query: str, complaint: str) -> None:
    served, site, _ = served_site()
    refused = Client(site).ask("GET", f"{UPDATES}?{query}")
    assert refused.code == 400
    assert complaint in refused.detail
    assert served.asked == []


def test_an_empty_range_is_an_empty_page() -> None:
    served, site, _ = served_site()
    served.keep("orders", "master", [fact(5, ["x", "y"])])
    answer = Client(site).ask("GET", f"{UPDATES}?instance=master&from=5&upto=5")
    assert (answer.code, answer.json) == (200, {"updates": [], "upto_token": 5, "limited": False})


def test_a_key_may_be_any_printable_text_of_200_characters() -> None:
    served, site, _ = served_site()
    headers = [("Content-Type", "application/json"), ("Idempotency-Key", "k y" + "x" * 197)]
    assert Client(site).ask("POST", "/v1/streams/orders/facts", b'{"rows":[]}', headers).code == 200
    assert served.appended == [("orders", [[]], "k y" + "x" * 197)]


@pytest.mark.parametrize("keys", [[""], ["x" * 201], ["a", "a"], [b"\xc3\xa9"], [b"\xff"], [b"a\x01"]])
def test_any_other_key_is_refused(keys: list[str | bytes]) -> None:
    served, site, _ = served_site()
    headers: list[tuple[str, str | bytes]] = [("Content-Type", "application/json")]
    headers += [("Idempotency-Key", key) for key in keys]
    refused = Client(site).ask("POST", "/v1/streams/orders/facts", b'{"rows":[]}', headers)
    assert (refused.code, refused.detail[:16]) == (400, "Idempotency-Key:")
    assert served.appended == []
