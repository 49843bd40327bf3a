"""Tokens, names and rows: one text each; every other text is refused."""

from __future__ import annotations

import datetime as dt
import json
import json.encoder
import math
import re
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replication.errors import RemoteProtocolError, RowError
from replication.wire import grammar
from tests import strategies

TOKENS = ["0", "1", "-1", "42", str(2**63 - 1), str(-(2**63))]
NOT_TOKENS = [
    *("", " ", "-", "+1", " 1", "1 ", "1\r", "1\n", "01", "00", "-0", "-01", "1_000", "5.0", "1e3", "0x1", "\x00"),
    *("batch", "Batch", "None", "\u0661", "\uff11", "\u00b2"),
    *(str(2**63), str(-(2**63) - 1), "9" * 20, "9" * 5000),
]
NAMES = ["events", "get_user", "worker-1.example:80", "é", "日本", "%s", "batch", "n" * 255]
NOT_NAMES = [
    *("", " ", "a b", "a\tb", "a\rb", "a\nb", "a\n", "a\x00", "\x1b[31m", "\x7f", "\x85", "\x9b"),
    *("a\u00a0b", "\u2028", "n" * 256),
]
JSON_TEXTS = [
    *("null", "true", "0", "-0", "1.5", "1E5", "1e999", "-1e999", "9" * 30, "9" * 4300),
    *('""', '"\\ud800"', '"\\ud83d\\ude00"', '"\x7f"', '"é\u2028"', '"' + "x" * 9000 + '"'),
    *("[]", "{}", " [1, 2]\t", "[1,\r2]", '{"a":1,"a":2}', "[" * 128 + "]" * 128),
]
NOT_JSON_TEXTS = [
    *("", " ", "nul", "True", "NaN", "Infinity", "-Infinity", "[NaN]", "'a'", "\x00", "[1]\x00", "\u00a01", "\x0c1"),
    *("01", "1.", ".5", "+1", "1e", "-", "9" * 4301),
    *('"', '"\\x"', '"\\u12"', '"\x01"', '"a\tb"'),
    *("[1,]", "[1", "1]", '{"a":1,}', "{a:1}", "{1:2}", "1 2", "[] []", "[1],", "\ufeff[1]"),
    *("[" * 100_000, "[" * 100_000 + "]" * 100_000),
]


@pytest.mark.parametrize("text", TOKENS)
def test_a_plain_integer_of_64_bits_is_a_token(text: str) -> None:
    assert str(grammar.token(text)) == text


@pytest.mark.parametrize("text", NOT_TOKENS)
def test_a_token_is_a_plain_integer_of_64_bits_only(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a plain integer of 64 bits: "):
        grammar.token(text)


def test_40_characters_of_a_wrong_token_or_name_are_quoted() -> None:
    for read, what in (
        (grammar.token, "a plain integer of 64 bits"),
        (grammar.stream_name, "a stream name"),
        (grammar.instance_name, "an instance name"),
    ):
        with pytest.raises(RemoteProtocolError) as raised:
            read(" " * 41)
        assert str(raised.value) == f"not {what}: '{' ' * 40}'"


@given(st.integers() | strategies.tokens)
def test_a_token_has_the_form_that_str_writes(number: int) -> None:
    if -(2**63) <= number < 2**63:
        assert grammar.token(str(number)) == number
    else:
        with pytest.raises(RemoteProtocolError):
            grammar.token(str(number))


def test_batch_is_the_place_of_a_row_that_is_not_the_last() -> None:
    assert grammar.place("batch") is None
    assert grammar.place("7") == 7


def _answer(read: Any, *texts: Any) -> Any:
    """Return the result of ``read``, or the message of its error."""
    try:
        return read(*texts)
    except RemoteProtocolError as error:
        return str(error)


@given(st.lists(st.sampled_from([*TOKENS, *NOT_TOKENS]) | strategies.tokens.map(str) | st.text(max_size=3)))
@example(["1", "batch", "2"])
@example([str(2**63 - 1), "5"])
@example([str(2**63)])
@example([])
def test_many_places_are_read_as_one_by_one(texts: list[str]) -> None:
    assert _answer(grammar.places, texts) == _answer(lambda: [grammar.place(text) for text in texts])


@pytest.mark.parametrize("texts", [["5"], ["1", "20"], ["batch"], ["batch", "7"], ["1", "batch", "2"]])
def test_places_without_a_sign_are_read_at_once(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    expected = [grammar.place(text) for text in texts]
    monkeypatch.delattr(grammar, "place")
    assert grammar.places(texts) == expected


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_anything_without_white_space_and_control_characters(text: str) -> None:
    assert grammar.stream_name(text) == text
    assert grammar.instance_name(text) == text


@pytest.mark.parametrize("text", NOT_NAMES)
def test_white_space_control_characters_and_excess_length_are_refused_in_names(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a stream name: "):
        grammar.stream_name(text)
    with pytest.raises(RemoteProtocolError, match="not an instance name: "):
        grammar.instance_name(text)


@given(strategies.stream_names)
def test_every_generated_name_is_accepted(name: str) -> None:
    assert grammar.stream_name(name) == name


@pytest.mark.parametrize("text", JSON_TEXTS)
def test_one_json_value_is_a_row(text: str) -> None:
    assert grammar.row_text(text) == text
    assert grammar.read_json(text) == json.loads(text)


@given(st.lists(st.sampled_from([*JSON_TEXTS, *NOT_JSON_TEXTS])))
@example([])
def test_many_rows_are_decoded_as_one_by_one(texts: list[str]) -> None:
    assert _answer(grammar.read_rows, texts) == _answer(lambda: [grammar.read_json(text) for text in texts])


DEEP = ["[" * 129 + "]" * 129, '{"a":' * 128 + "[]" + "}" * 128, '["' + "x" * 9000 + '",' + "[" * 128 + "]" * 129]
SHALLOW = ["[" * 128 + "]" * 128, '"' + "[" * 9000 + '"', '["\\"[[",' + "[]," * 9000 + "0]"]


@pytest.mark.parametrize("text", DEEP)
def test_a_row_that_is_too_deep_is_refused_and_can_still_be_decoded(text: str) -> None:
    """Facts of older versions may be deeper: docs/configuration.md, Fixed limits."""
    with pytest.raises(RemoteProtocolError, match="may be 128 levels deep"):
        grammar.row_text(text)
    with pytest.raises(RowError, match="may be 128 levels deep"):
        grammar.encode_row(json.loads(text))
    with pytest.raises(RowError, match="may be 128 levels deep"):
        grammar.encode_rows([[], json.loads(text)])
    grammar.json_texts([text])
    assert grammar.encode_json(grammar.read_json(text)) == text


def test_a_row_may_have_exactly_the_greatest_depth() -> None:
    def row(depth: int) -> str:
        return f"[[],{'[' * (depth - 1)}{'1' * 100}{']' * depth}"

    assert grammar.row_text(row(grammar.MAX_NESTING)) == row(grammar.MAX_NESTING)
    with pytest.raises(RemoteProtocolError, match="128 levels deep, but this one has 129 levels"):
        grammar.row_text(row(grammar.MAX_NESTING + 1))
    grammar.check_nesting([])


@pytest.mark.parametrize("text", SHALLOW)
def test_brackets_beside_each_other_and_in_texts_are_not_deep(text: str) -> None:
    assert grammar.row_text(text) == text
    assert grammar.encode_row(json.loads(text)) == text


@pytest.mark.parametrize("value", [math.inf, [-math.inf, "Infinity", {'"Infinity': math.inf}], ["\\", math.inf]])
def test_a_number_that_was_too_large_for_a_float_is_encoded_again(value: object) -> None:
    assert repr(grammar.read_json(grammar.encode_again(value))) == repr(value)


def test_an_infinity_is_encoded_again_as_a_number_that_reads_as_one() -> None:
    value = ["Infinity", {"a": math.inf}, -math.inf]
    assert grammar.encode_again(value) == '["Infinity",{"a":1e999},-1e999]'


@pytest.mark.parametrize("text", NOT_JSON_TEXTS)
def test_text_that_is_not_one_json_value_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not JSON: "):
        grammar.row_text(text)
    with pytest.raises(RemoteProtocolError, match="not JSON: "):
        grammar.read_json(text)


def test_the_error_for_a_row_has_the_offset() -> None:
    with pytest.raises(RemoteProtocolError, match=r"not JSON: Expecting value at character 5 of 7"):
        grammar.read_json("[1, oh]")


_slips = st.sampled_from([*'[]{}",:019-.eE\\u \t\x00ab', ""])
_mutilated = st.builds(
    lambda text, at, slip: text[:at] + slip + text[at + 1 :], strategies.row_texts, st.integers(0, 99), _slips
)


@given(
    st.lists(st.text(st.sampled_from('"\\[]{},0a'), max_size=8) | st.lists(st.integers(0, 9), max_size=2), max_size=4)
)
def test_what_is_inside_texts_counts_neither_as_values_nor_as_levels(values: list[object]) -> None:
    text = json.dumps(values)
    assert grammar._without_texts(text.encode()) == re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"', "", text).encode()


@given(strategies.row_texts | _mutilated | st.text(max_size=8))
def test_a_row_is_accepted_exactly_if_the_standard_library_accepts_it(text: str) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        expected = json.loads(text, parse_constant=refuse)
    except ValueError:
        with pytest.raises(RemoteProtocolError):
            grammar.row_text(text)
        with pytest.raises(RemoteProtocolError):
            grammar.read_json(text)
    else:
        assert grammar.row_text(text) == text
        assert repr(grammar.read_json(text)) == repr(expected)


@given(st.lists(st.sampled_from([*JSON_TEXTS, *NOT_JSON_TEXTS]) | strategies.row_texts, max_size=6))
@example(["[1,", "2]", "3 4"])
@example(['"\\ud800"', "[1"])
@example(["[1]", "9" * 4301])
def test_many_rows_are_checked_one_by_one(texts: list[str]) -> None:
    """Texts that are JSON only when joined are refused."""
    assert _answer(grammar.row_texts, texts) in (None, _answer(lambda: [grammar.row_text(text) for text in texts]))
    assert (_answer(grammar.row_texts, texts) is None) == all(_answer(grammar.row_text, text) == text for text in texts)


@given(strategies.rows)
def test_a_row_is_encoded_as_the_standard_library_does_and_decoded_again(row: object) -> None:
    text = grammar.encode_row(row)
    assert text == json.dumps(row, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    assert text.isascii()
    assert "\n" not in text
    assert repr(grammar.read_json(text)) == repr(json.loads(text))


def test_key_order_and_tuples_are_encoded_as_the_standard_library_does() -> None:
    assert (
        grammar.encode_row(({"b": 1, "a": (None, True)}, "é\U0001f600"))
        == '[{"b":1,"a":[null,true]},"\\u00e9\\ud83d\\ude00"]'
    )
    assert grammar.encode_row({1: 2, None: 3, False: 4}) == '{"1":2,"null":3,"false":4}'


_CYCLE: list[object] = []
_CYCLE.append(_CYCLE)


@pytest.mark.parametrize(
    "row",
    [math.nan, [math.inf], -math.inf, {1, 2}, b"bytes", dt.date(2024, 1, 1), {(1, 2): 3}, _CYCLE, [10**5000]],
)
def test_a_row_that_json_cannot_hold_is_refused(row: object) -> None:
    with pytest.raises(RowError, match="a row must be JSON: "):
        grammar.encode_row(row)


def test_the_error_for_a_row_that_json_cannot_hold_names_the_type() -> None:
    for encode in (grammar.encode_row, grammar.encode_json, lambda row: grammar.encode_rows([row])):
        with pytest.raises(RowError, match=r"^a row must be JSON: JSON has no set$"):
            encode([1, set()])


def test_the_encoder_makes_the_text_of_the_standard_library_in_one_piece() -> None:
    encode = grammar._make_encoder()
    value = {"b": [1, 2.5, None, True, "é"], "a": {}, 5: {"x": ()}}
    (text,) = encode(value, 0)
    assert text == '{"b":[1,2.5,null,true,"\\u00e9"],"a":{},"5":{"x":[]}}'
    for wrong, error in ((math.nan, ValueError), ({(1, 2): 3}, TypeError), ({1, 2}, TypeError)):
        with pytest.raises(error):
            encode(wrong, 0)
    with pytest.raises(TypeError, match=r"^JSON has no complex$"):
        encode(1j, 0)


def test_values_are_counted_without_those_inside_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grammar.count_values(b'{"a":[1,2],"b":"[,{"}') == 7
    monkeypatch.setattr(grammar, "MAX_VALUES", 4)
    assert grammar.count_values(b'{"a":[1,2],"b":"[,{"}') == 4
    assert grammar.count_values(b'["a","[,{"]') == 2


def test_a_number_with_an_exponent_counts_as_four_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them took six seconds of CPU, and no other request was answered meanwhile."""
    monkeypatch.setattr(grammar, "MAX_VALUES", 12)
    assert grammar.count_values(b"[1e5,true,false,2]") == 4
    assert grammar.count_values(b"[1e5,true,false,2E-300]", grammar.EXPONENT_VALUES) == 10
    assert grammar.count_values(b'["eeeeeeee",1e5]', grammar.EXPONENT_VALUES) == 5
    grammar.check_values(b"[1e5,1e5,1e5]")
    with pytest.raises(RemoteProtocolError, match="more than 12 values"):
        grammar.check_values(b"[1e5,1e5,1E-300,0]")


def test_more_values_than_the_limit_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_VALUES", 4)
    grammar.check_values(b"[1,2,3,4]")
    grammar.check_values(b"[\xff,2,3,4]")
    with pytest.raises(RemoteProtocolError, match=r"^JSON with more than 4 values; send it in parts$"):
        grammar.check_values(b"[1,2,3,4,5]")
    grammar.check_values(b",,,,")  # too short to have more


def test_a_large_text_with_a_long_number_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "9" * 400
    grammar.check_values(f'[{longest}0,"{longest}0"]'.encode())  # a small text
    monkeypatch.setattr(grammar, "MAX_VALUES", 400)
    grammar.check_values(f'[{longest},"{longest}0",-{longest}.5]'.encode())
    with pytest.raises(RemoteProtocolError, match=r"^JSON of 405 bytes with a number of more than 400 digits$"):
        grammar.check_values(f"[1,{longest}0]".encode())


def test_a_long_number_is_found_wherever_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_VALUES", 0)
    for before in range(60):
        grammar.check_values(b" " * before + b"9" * 400 + b" " * 60)
        with pytest.raises(RemoteProtocolError, match="more than 400 digits"):
            grammar.check_values(b" " * before + b"9" * 401)


def test_a_long_text_is_checked_fast() -> None:
    """One of 64 MiB took more than three seconds, and no other request was answered meanwhile."""
    body = b'"%b"' % (b"x" * 2**23)
    took = []
    for check in (grammar.check_values, lambda text: text.translate(bytes(range(256)))):
        began = time.process_time()
        for _ in range(3):
            check(body)
        took.append(time.process_time() - began)
    assert took[0] < 15 * took[1]


def test_without_the_c_encoder_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ["é", {"k": [1.5, None, "\ud800"]}]
    expected = grammar.encode_row(row)
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    monkeypatch.setattr(grammar, "_encode_json", grammar._make_encoder())
    assert grammar.encode_row(row) == expected
    with pytest.raises(RowError):
        grammar.encode_row([math.nan])
