"""``replication append``: batches, acknowledgements, and idempotency keys."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from replication.cli import append
from replication.cli.append import Appender, AppendError, Batch, read_batches
from replication.cli.parser import Parser
from replication.web.blocking_client import HttpClient, HttpError, UnavailableError
from tests.web.line_server import LineServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

AWAY = UnavailableError("cannot reach it")


class FakeApi(HttpClient):
    """Returns IDs as a master does, the same ones for a key that it has received before; fails with ``failures``."""

    def __init__(self, *failures: HttpError | None, patience: float = 60.0) -> None:
        self.now = 0.0
        super().__init__("http://h:1", patience=patience, clock=lambda: self.now, sleep=self.pass_time)
        self.failures = list(failures)
        self.calls: list[tuple[str, bytes, str]] = []
        self.facts: list[bytes] = []
        self.known: dict[str, list[int]] = {}

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        if method == "GET":  # a server of an earlier version
            raise HttpError("there is no path", status=404)
        assert method == "POST"
        assert body is not None
        assert headers is not None
        assert headers["Content-Type"] == "application/x-ndjson"
        key = headers["Idempotency-Key"]
        self.calls.append((path, body, key))
        self.posts += 1
        failure = self.failures.pop(0) if self.failures else None
        if key not in self.known and (failure is None or failure is AWAY):  # only the answer was lost
            lines = body.split(b"\n")
            self.known[key] = [*range(len(self.facts) + 2, len(self.facts) + len(lines) + 2)]
            self.facts += lines
        if failure is not None:
            raise failure
        return json.dumps({"ids": self.known[key]}).encode()


def run(api: HttpClient, *batches: Batch) -> list[tuple[int, int]]:
    """Append ``batches`` and return the steps of the progress bar."""
    steps: list[tuple[int, int]] = []
    Appender(api, "orders/x", b'{"rows":[%b]}').run(batches, lambda facts, size: steps.append((facts, size)))
    return steps


def batch(*rows: bytes, first: int = 1) -> Batch:
    return Batch(range(first, first + len(rows)), rows, sum(map(len, rows)))


@contextmanager
def piped(text: bytes) -> Iterator[int]:
    """Yield the reading end of a pipe that holds ``text`` and is closed behind it."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    yield reader
    os.close(reader)


def lines_of(batches: Sequence[Batch]) -> list[tuple[int, bytes]]:
    return [pair for each in batches for pair in zip(each.numbers, each.lines, strict=True)]


def test_lines_keep_their_numbers_and_blank_ones_are_left_out() -> None:
    with piped(b"1\n\n  \r\n2\r\n3") as source:
        assert lines_of([*read_batches(source)]) == [(1, b"1"), (4, b"2\r"), (5, b"3")]


def test_lines_that_can_be_read_do_not_wait_for_more() -> None:
    reader, writer = os.pipe()
    batches = read_batches(reader)
    os.write(writer, b"1\n2\nhal")
    assert next(batches).lines == [b"1", b"2"]
    os.write(writer, b"f\n")
    assert next(batches).lines == [b"half"]
    os.close(writer)
    assert [*batches] == []
    os.close(reader)


def test_a_batch_is_bounded_in_lines_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"1\n" * 2500 + b'"%b"\n' % (b"x" * 400_000) * 3)
    with path.open("rb") as source:
        batches = [*read_batches(source.fileno())]
    assert all(len(each.lines) <= append.BATCH_LINES for each in batches)
    assert all(sum(map(len, each.lines)) <= append.BATCH_BYTES for each in batches)
    assert [len(each.lines) for each in batches][:2] == [1000, 1000]
    assert len(lines_of(batches)) == 2503
    assert sum(each.size for each in batches) == path.stat().st_size


def test_a_line_without_an_end_is_refused_and_those_before_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "MAX_FACT_BYTES", 20_000)
    with open("/dev/zero", "rb", buffering=0) as endless:  # noqa: PTH123
        batches = [*read_batches(endless.fileno())]
    assert [len(line) > 20_000 for _, line in lines_of(batches)] == [True]
    with piped(b"[1]\n" + b"[" + b" " * 25_000) as source, pytest.raises(AppendError, match="line 2: more than 20000"):
        run(api := FakeApi(), *read_batches(source))
    assert api.facts == []


def test_a_blank_line_that_is_too_long_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was left out, and with it the lines after it."""
    monkeypatch.setattr(append, "MAX_FACT_BYTES", 20_000)
    monkeypatch.setattr(append, "READ_BYTES", 15_000)
    blank = piped(b"[1]\n" + b" " * 31_000 + b"\n[2]\n")
    with blank as source, pytest.raises(AppendError, match="line 2: more than 20000"):
        run(FakeApi(), *read_batches(source))


def test_one_line_larger_than_a_batch_goes_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b'1\n"%b"\n2\n' % (b"x" * append.BATCH_BYTES))
    with path.open("rb") as source:
        assert [len(each.lines) for each in read_batches(source.fileno())] == [1, 1, 1]


def test_a_row_becomes_a_fact_and_its_id_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi()
    assert run(api, batch(b'["o1","placed"]', b"2"), batch(b"3", first=3)) == [(2, 16), (1, 1)]
    assert api.facts == [b'{"rows":[["o1","placed"]]}', b'{"rows":[2]}', b'{"rows":[3]}']
    assert capsys.readouterr().out == "2\n3\n4\n"
    assert api.calls[0][0] == "/v1/streams/orders%2Fx/facts"


@pytest.mark.parametrize("ids", [[], [2, 3]])
def test_another_number_of_ids_is_not_the_answer_of_a_daemon(
    ids: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi()
    monkeypatch.setattr(api, "request", lambda *_: json.dumps({"ids": ids}).encode())
    with pytest.raises(AppendError, match=f"answers {len(ids)} IDs for 1 lines; is that a replication daemon"):
        run(api, batch(b"[1]"))
    assert capsys.readouterr().out == ""


def test_every_batch_has_its_own_key() -> None:
    api = FakeApi()
    run(api, batch(b"1"), batch(b"1", first=2))
    assert len({key for _, _, key in api.calls}) == 2
    assert len(api.facts) == 2


def test_a_batch_whose_answer_was_lost_is_appended_once(capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi(AWAY, AWAY, None)
    run(api, batch(b"1", b"2"))
    assert len(api.calls) == 3
    assert len({key for _, _, key in api.calls}) == 1
    assert len(api.facts) == 2
    assert capsys.readouterr().out == "2\n3\n"


def test_giving_up_states_what_was_acknowledged(capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi(None, *[AWAY] * 100, patience=10)
    with pytest.raises(AppendError) as caught:
        run(api, batch(b"1", b"2"), batch(b"3", b"4", first=3))
    assert str(caught.value) == (
        "cannot reach it; gave up after 10 s (--retry); appended: 2, up to line 2 with ID 3; "
        "it is not known whether line 3 and what follows were appended"
    )
    assert capsys.readouterr().out == "2\n3\n"
    with pytest.raises(AppendError) as caught:
        run(FakeApi(*[AWAY] * 100, patience=10), batch(b"1", first=0))
    assert str(caught.value).endswith("; nothing is acknowledged; it is not known whether ROW was appended")


def test_giving_up_states_that_nothing_was_appended_if_no_request_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with closing(HttpClient(url)) as client, pytest.raises(AppendError) as caught:
        run(client, batch(b"1", first=0))
    assert str(caught.value).endswith("; nothing is acknowledged; ROW was neither sent nor appended")


@pytest.mark.parametrize(("terminal", "lines"), [(False, 2), (True, 3)])
def test_a_log_has_each_reason_of_retries_once_and_a_terminal_each_retry(
    terminal: bool, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    report_retry = append.retry_reporter()
    for error in (AWAY, AWAY, UnavailableError("busy")):
        report_retry(error)
    found = capsys.readouterr().err.splitlines()
    assert (found[0], len(found)) == ("replication append: cannot reach it; retrying", lines)


@pytest.mark.parametrize("seconds", ["-1", "nan", "-inf", "soon"])
def test_a_retry_that_is_no_number_of_seconds_is_wrong_usage(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        append.main(["orders", "1", f"--retry={seconds}"])
    assert stopped.value.code == 2
    assert "--retry" in capsys.readouterr().err


def test_a_refusal_is_not_retried_and_names_the_line_of_the_input() -> None:
    api = FakeApi(None, HttpError("h answers 400: line 2: a row of 'orders' is [id]"))
    numbered = Batch([4, 7, 9], [b"1", b"2", b"3"], 3)
    with pytest.raises(AppendError) as caught:
        run(api, batch(b"1"), numbered)
    assert str(caught.value) == "h answers 400: line 7: a row of 'orders' is [id]; appended: 1, up to line 1 with ID 2"
    assert len(api.calls) == 2


def test_a_line_that_is_not_json_is_named_before_anything_of_its_batch_is_sent() -> None:
    api = FakeApi()
    for bad in (b"{", b"1],[2", b"\xff", b"1 2"):
        with pytest.raises(AppendError, match=r"^line 2: not .*; nothing is acknowledged$"):
            run(api, batch(b"1", bad))
    assert api.facts == []


def test_a_batch_of_blank_lines_is_not_sent() -> None:
    api = FakeApi()
    assert run(api, Batch([], [], 5)) == [(0, 5)]
    assert api.calls == []


def test_an_interruption_states_what_was_acknowledged() -> None:
    api = FakeApi()

    def interrupted() -> Iterator[Batch]:
        yield batch(b"1")
        raise KeyboardInterrupt

    with pytest.raises(AppendError, match=r"^interrupted; appended: 1, up to line 1 with ID 2$"):
        Appender(api, "s", b"%b").run(interrupted(), lambda *_: None)


def test_a_closed_output_is_a_failure_because_rows_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(AppendError, match="standard output is closed"):
        run(FakeApi(), batch(b"1"), batch(b"2"))


def test_a_full_output_is_a_failure_that_states_what_was_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    with pytest.raises(AppendError, match=r"^cannot write to standard output: No space left on device; appended: 1, "):
        run(FakeApi(), batch(b"1"), batch(b"2"))


def main(monkeypatch: pytest.MonkeyPatch, api: FakeApi, *arguments: str, stdin: Path | None = None) -> int:
    monkeypatch.setattr(Parser, "open_client", lambda *_, **__: api)
    if stdin is None:
        return append.main(arguments)
    with stdin.open("rb") as source:
        monkeypatch.setattr("sys.stdin", source)
        return append.main(arguments)


def test_a_row_may_be_an_argument(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi()
    assert main(monkeypatch, api, "orders", '["ö"]') == 0
    assert api.facts == ['{"rows":[["ö"]]}'.encode()]
    assert capsys.readouterr().out == "2\n"


@pytest.mark.parametrize(
    "arguments",
    [["orders", "--retry", "1", "1"], ["--retry", "1", "orders", "1"], ["orders", "1", "--retry", "1"]],
)
def test_options_may_stand_between_the_stream_and_the_row(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeApi()
    assert main(monkeypatch, api, *arguments) == 0
    assert api.facts == [b'{"rows":[1]}']


def test_a_wrong_option_between_the_stream_and_the_row_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, FakeApi(), "orders", "--fact", "--retri", "1", "1")
    assert stopped.value.code == 2
    assert "unrecognized arguments: --retri" in capsys.readouterr().err


def test_sigterm_states_what_was_appended_as_an_interruption_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows").write_text("1\n")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("builtins.print", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(AppendError, match=r"^interrupted; appended: 1, up to line 1 with ID 2$"):
        main(monkeypatch, FakeApi(), "orders", stdin=tmp_path / "rows")
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_argument_that_is_not_json_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, FakeApi(), "orders", "[o1,placed]")
    assert stopped.value.code == 2
    assert "quote JSON for the shell" in capsys.readouterr().err


def test_a_refused_argument_is_called_row(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi(HttpError("h answers 400: line 1: a row of 'orders' is [id]"))
    with pytest.raises(AppendError, match=r"^h answers 400: ROW: a row of 'orders' is .*; nothing is acknowledged$"):
        main(monkeypatch, api, "orders", "1")


def test_standard_input_is_read_without_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows").write_text("1\n2\n")
    api = FakeApi()
    assert main(monkeypatch, api, "orders", stdin=tmp_path / "rows") == 0
    assert capsys.readouterr() == ("2\n3\n", "")
    assert api.facts == [b'{"rows":[1]}', b'{"rows":[2]}']


def test_facts_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "facts").write_text('{"rows": [1, 2]}\n{"rows": []}\n')
    api = FakeApi()
    assert main(monkeypatch, api, "orders", "-", "--facts", stdin=tmp_path / "facts") == 0
    assert api.facts == [b'{"rows": [1, 2]}', b'{"rows": []}']


def test_a_terminal_shows_that_rows_are_read_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"1\n\x04")
    with os.fdopen(terminal) as source:
        monkeypatch.setattr("sys.stdin", source)
        assert main(monkeypatch, FakeApi(), "orders") == 0
    os.close(keyboard)
    assert capsys.readouterr() == ("2\n", "replication append: reading rows, one a line, until Ctrl-D\n")


def test_a_terminal_gets_a_bar_and_the_ids_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows").write_text("1\n2\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(monkeypatch, FakeApi(), "orders", stdin=tmp_path / "rows") == 0
    captured = capsys.readouterr()
    assert captured.out == "2\n3\n"
    assert "2 facts" in captured.err


# ---- with a server that has the call for lines


def append_lines(server: LineServer, text: bytes, patience: float = 0.0) -> list[tuple[int, int]]:
    """Append what a pipe holds, and return the steps of the progress bar."""
    steps: list[tuple[int, int]] = []
    with closing(HttpClient(server.url, patience=patience, sleep=lambda _: None)) as client, piped(text) as source:
        append.append_lines(client, "orders", b"[%b]", source, lambda facts, size: steps.append((facts, size)))
    return steps


def test_lines_are_sent_in_one_request_and_their_ids_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with LineServer() as server:
        steps = append_lines(server, b"1\n\n22\n3")
        assert server.requests == ["GET /v1/streams/orders/append", "POST /v1/streams/orders/append?after=0"]
        assert server.stored == ["[1]", "[22]", "[3]"]
    assert capsys.readouterr().out == "2\n3\n4\n"
    assert (sum(facts for facts, _ in steps), sum(size for _, size in steps)) == (3, 7)


def test_the_ids_of_first_lines_are_printed_while_the_input_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    printed: list[str] = []

    def go_on(_facts: int, _size: int) -> None:
        printed.append(capsys.readouterr().out)
        if len(printed) == 1:
            os.write(writer, b"3\n")
        else:
            os.close(writer)

    os.write(writer, b"1\n2\n")
    with LineServer() as server, closing(HttpClient(server.url)) as client:
        append.append_lines(client, "orders", b"[%b]", reader, go_on)
    assert printed == ["2\n3\n", "4\n"]
    os.close(reader)


def test_lines_without_an_answer_are_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    with LineServer("after", None, "before") as server:
        append_lines(server, b"1\n2\n3\n", patience=60.0)
        assert server.stored == ["[1]", "[2]", "[3]"]
    assert capsys.readouterr().out == "2\n3\n4\n"


def test_giving_up_names_the_first_line_without_an_answer() -> None:
    with LineServer("before") as server, pytest.raises(AppendError) as caught:
        append_lines(server, b"\n1\n2\n")
    assert str(caught.value).endswith(
        "; gave up after 0 s (--retry); nothing is acknowledged; "
        "it is not known whether line 2 and what follows were appended"
    )


def test_giving_up_names_the_first_line_that_was_never_sent() -> None:
    with LineServer() as server:
        client = HttpClient(server.url)
        appender = append.LineAppender(client, "orders", b"[%b]")
        assert appender.is_offered()
    with closing(client), pytest.raises(AppendError) as caught:
        appender.run([batch(b"1", b"2")], lambda *_: None)
    assert str(caught.value).endswith("; line 1 and what follows were neither sent nor appended")


def test_the_number_of_a_line_that_was_not_sent_stays_as_it_is() -> None:
    refused = b'{"error": "Bad Request", "detail": "line 99: no", "status": 400}\n'
    with LineServer(refused) as server, pytest.raises(AppendError, match="line 99: no; nothing is acknowledged"):
        append_lines(server, b'["a"]\n')


def test_a_line_that_is_refused_is_named_by_its_place_in_the_input() -> None:
    refused = b'{"error": "Bad Request", "detail": "line 2: no", "status": 400}\n'
    with LineServer(refused) as server, pytest.raises(AppendError, match=r"line 4: no; nothing is acknowledged"):
        append_lines(server, b"\n1\n\n2\n")


def test_lines_before_one_that_is_not_json_are_appended() -> None:
    with LineServer() as server, pytest.raises(AppendError, match=r"line 3: .*; appended: 2, up to line 2 with ID 3"):
        append_lines(server, b"1\n2\nx\n4\n")


def test_a_server_that_refuses_the_question_is_named() -> None:
    with LineServer() as server:
        pass
    with pytest.raises(AppendError, match=r"cannot reach .*; gave up after 0 s \(--retry\); nothing is acknowledged$"):
        append_lines(server, b"1\n")
