"""What an answer of HTTP means to a worker."""

from __future__ import annotations

import pytest

from replication.errors import CatchUpError
from replication.web.response import NotAllowedError, Response

URL = "http://h:9093/v1/streams"


def answer(code: int, body: bytes = b"", location: str = "") -> Response:
    return Response(URL, code, location, body, lambda text: text.replace("s3cret", "…"))


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        (answer(401), "the secret is missing or wrong; both sides must be given the same --secret-file"),
        (
            answer(302, location="http://s3cret@x/"),
            "redirects to 'http://…@x/'; give the address that answers directly",
        ),
        (
            answer(500, b'{"errcode":"M_UNKNOWN"}'),
            "an error in that Synapse, or a missing or wrong secret: Synapse answers both alike",
        ),
        (answer(503, b'{"detail":"busy with s3cret"}'), "busy with …"),
        (answer(404, b'{"error":"no such thing"}'), "no such thing"),
        (answer(502, b"<html>s3cret"), "not an answer of this API: b'<html>…'"),
    ],
)
def test_an_error_has_the_url_the_status_and_the_reason(given: Response, meaning: str) -> None:
    assert str(given.error()) == f"{URL}: HTTP {given.code}: {meaning}"


@pytest.mark.parametrize(("code", "refused"), [(401, True), (403, True), (404, False), (503, False)])
def test_an_answer_that_refuses_access_has_an_error_of_its_own(code: int, refused: bool) -> None:
    assert isinstance(answer(code).error(), NotAllowedError) is refused


def test_a_body_of_another_form_is_an_error_that_names_the_url() -> None:
    assert answer(200, b"[1,2]").read(list[int], "numbers") == [1, 2]
    with pytest.raises(CatchUpError, match=f"^{URL}: "):
        answer(200, b"{}").read(list[int], "numbers")


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        (answer(404, b"<html>"), True),
        (answer(405, b"{}"), True),
        (answer(404, b'{"detail":"no stream"}'), False),
        (answer(400, b'{"errcode":"M_UNRECOGNIZED"}'), True),
        (answer(400, b'{"errcode":"M_FORBIDDEN"}'), False),
        (answer(200, b"{}"), False),
    ],
)
def test_a_server_without_the_path_is_recognized(given: Response, unknown: bool) -> None:
    assert given.is_unknown_path() is unknown
