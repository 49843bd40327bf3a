"""Pages and additions as text."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from replication.errors import CatchUpError, RemoteProtocolError, StoreError
from replication.streams.facts import BYTES_IN_PAGE, MAX_FACT_BYTES, Fact, check_size
from replication.streams.interfaces import Page
from replication.web import pages
from replication.web.pages import (
    BLANK,
    PAUSE,
    AddedLines,
    BackwardsPageError,
    added_fact,
    encode_page,
    read_addition,
    read_page,
)
from replication.wire.grammar import Token, encode_row
from tests.web.served import fact

DATA = Path(__file__).parent.parent / "data"


def page(*facts: Fact, upto: int | None = None, limited: bool = False) -> Page:
    return Page(list(facts), Token(upto if upto is not None else facts[-1].token), limited)


def read(body: bytes | str, after: int = 0, upto: int = 100, *, foreign: bool = False) -> Page:
    data = body.encode() if isinstance(body, str) else body
    return read_page(data, after=Token(after), upto=Token(upto), foreign=foreign)


class TestSpelling:
    def test_a_page_has_the_shape_of_the_contract(self) -> None:
        body = encode_page(page(fact(2, ["a", None], "b"), fact(4, {"c": 1.5}), upto=7, limited=True))
        assert body == b'{"updates":[[2,["a",null]],[2,"b"],[4,{"c":1.5}]],"upto_token":7,"limited":true}'

    def test_an_empty_page_has_its_upto_token(self) -> None:
        assert json.loads(encode_page(page(upto=9))) == {"updates": [], "upto_token": 9, "limited": False}

    def test_stored_texts_go_out_as_they_are(self) -> None:
        """Also where its JSON is not canonical: stored rows are not decoded."""
        assert b"[3,[ 1,  2 ]]" in encode_page(page(Fact(Token(3), ("[ 1,  2 ]",))))

    def test_a_page_that_grows_too_large_is_cut_after_a_whole_fact(self) -> None:
        facts = [fact(token, "x" * 50, "y" * 50) for token in range(2, 12)]
        body = encode_page(page(*facts, upto=20), max_bytes=400)
        assert len(body) < 460
        assert read(body) == page(*facts[:3], limited=True)

    @pytest.mark.parametrize("max_bytes", [0, 1, 59, 60, 118, 119, 120, 121, 500])
    def test_a_cut_page_has_one_fact_at_least_and_asking_on_finds_all(self, max_bytes: int) -> None:
        facts = [fact(token, "x" * 50) for token in range(2, 12)]
        found: list[Fact] = []
        after = 0
        while after < 20:
            rest = page(*[each for each in facts if each.token > after], upto=20)
            answer = read(encode_page(rest, max_bytes), after)
            assert answer.upto > after
            assert answer.limited is (answer.upto < 20)
            found += answer.facts
            after = answer.upto
        assert found == facts

    def test_a_single_fact_is_never_cut(self) -> None:
        large = page(fact(2, "x" * 500, "y" * 500))
        assert read(encode_page(large, max_bytes=10)) == large


class TestReadingPages:
    def test_reading_undoes_spelling(self) -> None:
        random = Random(7)
        rows: list[Any] = [None, True, -1.5e300, 2**70, 'a b\t"\\/é\U0001f600\x7f\ud800', [], {"": [1, {"k": "v"}]}]
        for _ in range(200):
            tokens = sorted(random.sample(range(2, 99), random.randint(0, 20)))
            facts = [fact(token, *random.choices(rows, k=random.randint(1, 4))) for token in tokens]
            original = page(*facts, upto=random.randint(max(tokens, default=1), 100), limited=random.random() < 0.5)
            assert read(encode_page(original)) == original

    def test_row_text_is_taken_as_it_lies(self) -> None:
        body = '{"updates":[[5,[ "a b",  1.0E2 ]]],"upto_token":5,"limited":false}'
        assert read(body).facts == [Fact(Token(5), ('[ "a b",  1.0E2 ]',))]

    @pytest.mark.parametrize("foreign", [False, True])
    @pytest.mark.parametrize(
        "row", ['["é"]', '["\x7f"]', '["\U0001f600 x"]', pytest.param('"\u2028"', id="line separator")]
    )
    def test_rows_that_are_not_plain_ascii_are_spelt_anew(self, row: str, *, foreign: bool) -> None:
        body = f'{{"updates":[[5,{row}]],"upto_token":5,"limited":false}}'
        assert read(body, foreign=foreign).facts == [Fact(Token(5), (encode_row(json.loads(row)),))]

    @pytest.mark.parametrize("row", ["[1, 2]", '{"a" :1}', "[\n]", '"\\u00E9"', '"\\/"', '["a b"]', '"\\ud83d\\ude00"'])
    def test_a_foreign_row_gets_the_one_spelling(self, row: str) -> None:
        body = f'{{"updates":[[5,{row}]],"upto_token":5,"limited":false}}'
        assert read(body, foreign=True).facts == [Fact(Token(5), (encode_row(json.loads(row)),))]

    @pytest.mark.parametrize("recorded", ["synapse-sqlite", "synapse-postgres"])
    def test_rows_of_a_synapse_have_the_bytes_of_its_wire(self, recorded: str) -> None:
        """Its HTTP leaves non-ASCII text as it is, its wire does not."""
        lines = gzip.decompress((DATA / recorded / "recording.txt.gz").read_bytes()).decode().splitlines()
        texts = [line.split(" ", 4)[4] for line in lines if line.startswith("RDATA ")]
        assert len(texts) > 5_000
        updates = [[token, json.loads(text)] for token, text in enumerate(texts, 1)]
        answer = {"updates": updates, "upto_token": len(texts), "limited": False}
        body = json.dumps(answer, separators=(",", ":"), ensure_ascii=False)
        assert not body.isascii()
        assert [text for each in read(body, upto=len(texts), foreign=True).facts for text in each.texts] == texts

    def test_any_bytes_are_a_page_or_a_catch_up_error(self) -> None:
        random = Random(8)
        body = encode_page(page(fact(2, ["a", {"b": "\u00e9"}], 1.5), fact(3, None), upto=7, limited=True))
        for _ in range(2_000):
            damaged = bytearray(body)
            for _ in range(random.randint(1, 3)):
                place = random.randrange(len(damaged))
                damaged[place : place + random.randint(0, 2)] = random.randbytes(random.randint(0, 2))
            for foreign in (False, True):
                with contextlib.suppress(CatchUpError):
                    read(bytes(damaged), foreign=foreign)

    def test_fields_that_we_do_not_know_are_left_alone(self) -> None:
        assert read('{"limited":false,"more":[1],"upto_token":5,"updates":[]}') == page(upto=5)

    @pytest.mark.parametrize(
        "body",
        [
            "",
            "null",
            "[]",
            "{}",
            '{"updates":[],"upto_token":5}',
            '{"updates":[],"upto_token":"5","limited":false}',
            '{"updates":[],"upto_token":5,"limited":1}',
            '{"updates":{},"upto_token":5,"limited":false}',
            '{"updates":[5],"upto_token":5,"limited":false}',
            '{"updates":[[5]],"upto_token":5,"limited":false}',
            '{"updates":[[5,1,1]],"upto_token":5,"limited":false}',
            '{"updates":[["5",1]],"upto_token":5,"limited":false}',
            '{"updates":[[true,1]],"upto_token":5,"limited":false}',
            '{"updates":[[5.5,1]],"upto_token":5,"limited":false}',
            '{"updates":[[5,NaN]],"upto_token":5,"limited":false}',
            '{"updates":[[5,1]],"upto_token":5,"limited":false}x',
            '{"updates":[[5,' + "[" * 100_000 + "]" * 100_000 + ']],"upto_token":5,"limited":false}',
            b'{"updates":[[5,"\xff"]],"upto_token":5,"limited":false}',
            b"\xff\xfe",
            b"<html>",
        ],
    )
    @pytest.mark.parametrize("foreign", [False, True])
    def test_bytes_that_are_no_page_are_an_error(self, body: bytes | str, *, foreign: bool) -> None:
        with pytest.raises(CatchUpError, match="not a page of updates"):
            read(body, foreign=foreign)

    def test_a_page_cut_at_any_byte_is_an_error(self) -> None:
        body = encode_page(page(fact(2, ["a", 1]), fact(3, "b"), upto=7))
        for length in range(len(body)):
            with pytest.raises(CatchUpError):
                read(body[:length])

    @pytest.mark.parametrize(
        ("tokens", "upto", "complaint"),
        [
            ([10], 20, "token 10 comes after 10"),
            ([9], 20, "token 9 comes after 10"),
            ([11, 13, 12], 20, "token 12 comes after 13: out of order"),
            ([11, 12, 11], 20, "one fact in two parts"),
            ([11, 21], 20, "token 21 is beyond 20"),
            ([11, 15], 14, "the page ends at 14, but has token 15"),
            ([], 9, r"\(10, 20\] was requested, the page ends at 9"),
            ([], 21, "the page ends at 21"),
            ([2**63], 20, "beyond 20"),
        ],
    )
    def test_a_page_that_breaks_the_rules_is_an_error(self, tokens: list[int], upto: int, complaint: str) -> None:
        body = json.dumps({"updates": [[token, "row"] for token in tokens], "upto_token": upto, "limited": False})
        with pytest.raises(CatchUpError, match=complaint):
            read(body, after=10, upto=20)

    def test_a_page_that_reaches_less_far_is_fine(self) -> None:
        """The source may have settled fewer IDs than the follower has received, or the page is limited."""
        assert read('{"updates":[],"upto_token":10,"limited":true}', after=10, upto=20) == page(upto=10, limited=True)

    def test_trap_12_a_foreign_page_in_descending_order_is_turned_round(self) -> None:
        """Rows of one token keep their order."""
        body = '{"updates":[[5,"c"],[5,"d"],[3,"b"],[2,"a"]],"upto_token":9,"limited":false}'
        assert read(body, foreign=True) == page(fact(2, "a"), fact(3, "b"), fact(5, "c", "d"), upto=9)

    def test_trap_12_a_limited_page_in_descending_order_is_of_no_use(self) -> None:
        """It is the end of the range, with ``upto_token`` 3: a client that continues there never receives token 2."""
        body = '{"updates":[[5,"c"],[3,"b"]],"upto_token":3,"limited":true}'
        with pytest.raises(BackwardsPageError):
            read(body, foreign=True)

    @pytest.mark.parametrize(
        ("tokens", "reach", "limited", "kept", "more"),
        [
            ([11, 20, 21], 20, False, [11, 20], False),  # none left out: the page has all that was requested
            ([11, 21, 22], 22, True, [11], False),  # the rows left out are beyond it
            ([21, 22], 22, True, [], False),
            ([11, 20], 20, True, [11, 20], True),
        ],
    )
    def test_rows_of_a_foreign_page_beyond_the_requested_range_are_left_for_later(
        self, tokens: list[int], reach: int, limited: bool, kept: list[int], more: bool
    ) -> None:
        """A Synapse answers for its stream ``caches`` without an upper bound (docs/protocol/streams.md C4)."""
        body = json.dumps({"updates": [[token, "row"] for token in tokens], "upto_token": reach, "limited": limited})
        expected = page(*[fact(token, "row") for token in kept], upto=20, limited=more)
        assert read(body, after=10, upto=20, foreign=True) == expected
        with pytest.raises(CatchUpError, match="beyond 20") if max(tokens) > 20 else contextlib.nullcontext():
            read(body, after=10, upto=20)


class TestAdditions:
    def test_an_append_is_its_rows(self) -> None:
        assert read_addition(b' {"rows": [["a", 1], null, {"b": [1e2]}]} ') == [["a", 1], None, {"b": [100.0]}]
        assert read_addition(b'{"rows":[]}') == []

    def test_it_takes_what_the_standard_library_takes(self) -> None:
        assert read_addition(b'{"rows":["\\ud800", 123456789012345678901234567890]}') == [
            "\ud800",
            123456789012345678901234567890,
        ]

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            (b"", "not JSON"),
            (b"rows", "not JSON"),
            (b'{"rows":[1]', "not JSON"),
            (b'{"rows":[1]}{"rows":[2]}', "not JSON"),
            (b'{"rows":[NaN]}', "NaN is not JSON"),
            (b'{"rows":["\x01"]}', "not JSON"),
            (b'{"rows":' + b"[" * 100_000, "not JSON"),
            (b'\xef\xbb\xbf{"rows":[1]}', "not JSON"),
            (b'{"rows":["\xff"]}', "not UTF-8: byte 11 is 0xff"),
            (b"[[1]]", "not an object"),
            (b"null", "not an object"),
            (b"{}", '"rows" is missing'),
            (b'{"row":[1]}', '"rows" is missing'),
            (b'{"rows":{}}', '"rows" must be a list'),
            (b'{"rows":null}', '"rows" must be a list'),
            (b'{"rows":[1],"token":5}', "unknown key 'token'"),
        ],
    )
    def test_a_wrong_addition_is_named(self, text: bytes, complaint: str) -> None:
        with pytest.raises(RemoteProtocolError, match=complaint):
            read_addition(text)

    def test_a_line_is_a_fact_and_blank_lines_are_none(self) -> None:
        lines = AddedLines([b'{"rows":[1]}\n', b"\n", b'  {"rows":[]} \r\n', b" \t\r\n", b'{"rows":[2,3]}'])
        assert [(lines.number, rows) for rows in lines] == [(1, [1]), (2, BLANK), (3, []), (4, BLANK), (5, [2, 3])]

    def test_the_reactor_gets_a_turn_between_decoding_and_encoding_a_large_fact(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pages, "PAUSE_BYTES", len('{"rows":[1]}\n'))
        lines = AddedLines([b'{"rows":[1]}\n', b'{"rows":[12]}\n', b'{"rows":[3]}\n'])
        assert [(lines.number, rows) for rows in lines] == [(1, [1]), (2, PAUSE), (2, [12]), (3, [3])]
        assert added_fact(b'{"rows":[123]}') == [PAUSE, [123]]
        assert added_fact(b'{"rows":[12]}') == [[12]]

    def test_a_wrong_line_is_named_by_its_number(self) -> None:
        with pytest.raises(RemoteProtocolError, match=r'^line 3: the list "rows" is missing$'):
            list(AddedLines([b'{"rows":[1]}\n', b"\n", b"{}\n"]))


@pytest.mark.parametrize("surrogate", ["\\udfff", "\\ud83d\\ude00\\ud83d", "\\\\ud800\\ud800", "\\ud800\\ueaaa"])
def test_a_lone_surrogate_leaves_the_texts_of_a_page_as_they_are(surrogate: str) -> None:
    """Rows of the page were decoded and encoded again: those with one key twice differed from the master's."""
    texts = ('{"1":"a","1":"b"}', f'"{surrogate}"', "1E5")
    page = Page([Fact(Token(2), texts)], Token(2), limited=False)
    assert read_page(encode_page(page), after=Token(0), upto=Token(2)) == page


def test_a_fact_that_no_client_reads_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can only be older than the limit of a fact (docs/configuration.md, Fixed limits)."""
    page = Page([fact(7, *["x" * 50] * 20)], Token(9), limited=False)
    assert encode_page(page, 10)
    monkeypatch.setattr(pages, "MAX_ANSWER", 1_000)
    with pytest.raises(StoreError, match=r"fact 7 takes 1\d\d\d bytes in a page, and a page has 1000 at most: let the"):
        encode_page(page, 10)


def test_the_largest_fact_fits_into_a_page() -> None:
    assert MAX_FACT_BYTES + 1_000 < pages.MAX_ANSWER
    token = Token(2**63 - 1)
    texts = ["1"] * 1_000
    check_size(texts)
    body = encode_page(Page([Fact(token, tuple(texts))], token, limited=False))
    assert len(body) <= sum(map(len, texts)) + BYTES_IN_PAGE * len(texts) + 100
