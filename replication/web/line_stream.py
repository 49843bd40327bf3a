"""Appends whose lines arrive while the request runs: their IDs are sent as they become durable (docs/http.md).

The lines that have arrived are appended as a batch, and answered with one line, the list of their IDs.  Meanwhile
further lines wait for the next batch; while too many wait, the connection is not read.  So memory is bounded, and what
was answered is always the beginning of what was sent.

With an idempotency key each batch has a receipt under the key and the number of the facts before it.  A client that
has received n IDs sends the rest of its lines again, with ``after=n``.  Batches that were stored are found, and
answered with the same IDs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import RemoteProtocolError, ReplicationError, RowError, RowRefusedError, ValueRefusedError
from replication.web.pages import AddedLines
from replication.web.request import MEDIA_TYPE_OF_LINES, RequestError
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.web.request import ApiRequest
    from replication.wire.grammar import Token

BATCH_LINES: Final = 2_000
BATCH_BYTES: Final = 512 * 1024
MAX_WAITING: Final = 2 * 2**20  # bytes of lines that wait for the next batch
OBJECT_BYTES: Final = 48  # that a line takes beside its text


@attrs.define(eq=False, repr=False)
class LineStream:
    """Appends the lines of the body of ``request`` to ``stream``; ``count`` facts were answered to earlier requests."""

    _log = Logger()

    _request: ApiRequest
    _stream: str
    _key: str | None
    _count: int
    _number: int = attrs.field(init=False, default=0)  # of the last line that was answered
    _lines: list[bytes] = attrs.field(init=False, factory=list)  # those that wait, without blank ones
    _part: bytearray = attrs.field(init=False, factory=bytearray)  # of the line that is being received
    _taken: int = attrs.field(init=False, default=0)  # bytes of the batch that is being appended
    _size: int = attrs.field(init=False, default=0)  # of the lines that wait
    _needed: int = attrs.field(init=False, default=1)  # lines of the next batch, at least
    _known: Sequence[Token] = attrs.field(init=False, default=())  # the IDs of the next batch, if it was stored before
    _running: bool = attrs.field(init=False, default=False)
    _paused: bool = attrs.field(init=False, default=False)
    _failed: bool = attrs.field(init=False, default=False)
    _ended: Deferred[None] | None = attrs.field(init=False, default=None)

    def received(self, data: bytes) -> None:
        """Take a part of the body."""
        if self._failed:
            return
        if self._request.update_rights():
            try:
                self._request.api.check_again(self._request)
            except RequestError as error:
                self.fail(error)
                return
        first, *others = data.split(b"\n")
        self._part += first
        if others:
            *whole, rest = bytes(self._part), *others
            self._add(whole)
            self._part = bytearray(rest)
        if len(self._part) > self._request.api.max_body:
            self.fail(RequestError(413, f"line {self._number + len(self._lines) + 1}: more than the limit of a body"))
        self._go_on()

    async def end(self) -> None:
        """Return once all lines are answered: the body has ended."""
        self._add([bytes(self._part)])
        self._part, self._needed = bytearray(), self._all_that_come()
        self._ended = Deferred()
        self._go_on()
        await self._ended

    # ---- inside

    def _add(self, lines: Sequence[bytes]) -> None:
        found = [line for line in lines if line and not line.isspace()]
        self._lines += found
        self._size += sum(map(len, found))
        self._empty_known()

    def _all_that_come(self) -> int:
        """Return how many lines the next batch needs once the body has ended: what is missing does not come."""
        return max(1, min(len(self._known), len(self._lines)))

    def _empty_known(self) -> None:
        """Drop what the lines of a stored batch contain: only their number counts."""
        if self._known:
            count = min(len(self._known), len(self._lines))
            self._size -= sum(map(len, self._lines[:count]))
            self._lines[:count] = [b""] * count

    def _go_on(self) -> None:
        """Begin with the next batch, if there is one and none in progress; and read on, or not."""
        self._pause_or_resume()
        if not self._running:
            if len(self._lines) >= self._needed:
                self._running = True
                Deferred.fromCoroutine(self._run()).addErrback(self._crashed)
            elif self._ended is not None and not self._ended.called:
                self._ended.callback(None)

    def _pause_or_resume(self) -> None:
        if self._request.disconnected:
            self.drop()
            return
        self._note_kept()
        paused = self._size > MAX_WAITING and len(self._lines) >= self._needed
        if paused != self._paused:
            self._paused = paused
            channel: Any = self._request.channel
            channel.read_lines(wanted=not paused)

    async def _run(self) -> None:
        try:
            while len(self._lines) >= self._needed:
                await self._append(self._take())
                self._taken = 0
                self._pause_or_resume()
        except RequestError as error:
            self.fail(error)
        except ReplicationError as error:
            self.fail(self._request.api.refusal(error))
        self._running, self._taken = False, 0
        self._go_on()

    def _take(self) -> Sequence[bytes]:
        size = count = 0
        for line in self._lines[:BATCH_LINES]:
            size += len(line)
            if count >= self._needed and size > BATCH_BYTES:
                break
            count += 1
        taken = self._lines[: max(count, self._needed)]
        del self._lines[: len(taken)]
        self._taken = sum(map(len, taken))
        self._size -= self._taken
        return taken

    async def _append(self, lines: Sequence[bytes]) -> None:
        """Append a batch and answer it; of one with a wrong line, what is before that line.  The rest waits again.

        A batch that the table refuses is halved, until the line is found.
        """
        known, self._known = self._known, ()
        if known:
            self._answer_batch(known, lines)
            return
        added = AddedLines(lines, self._number)
        key = None if self._key is None else f"{self._key}\n{self._count}"
        try:
            tokens = await self._request.api.served.append_texts(self._stream, added, key)
        except (RowError, RemoteProtocolError) as error:
            good = added.number - self._number - 1
            if good < 1:
                text = str(error) if isinstance(error, RemoteProtocolError) else f"line {added.number}: {error}"
                raise RequestError(400, text) from error
            await self._append_part(lines, good)
            return
        except (RowRefusedError, ValueRefusedError) as error:  # by the table: it does not name the line
            if len(lines) == 1:
                raise type(error)(f"line {self._number + 1}: {error}") from error
            await self._append_part(lines, len(lines) // 2)
            return
        if len(tokens) > len(lines):  # a batch that was stored, of which more lines wait or are missing yet
            self._known = tokens
            self._wait_again(lines)
            self._empty_known()
            self._needed = len(tokens) if self._ended is None else self._all_that_come()
        else:
            self._answer_batch(tokens, lines)

    async def _append_part(self, lines: Sequence[bytes], count: int) -> None:
        """Append the first ``count`` lines of a batch that was refused; the rest waits again."""
        self._wait_again(lines[count:])
        await self._append(lines[:count])

    def _answer_batch(self, tokens: Sequence[Token], lines: Sequence[bytes]) -> None:
        """Answer those of ``lines`` that are stored; the rest waits again."""
        self._needed = 1
        self._answer(tokens[: len(lines)])
        self._wait_again(lines[len(tokens) :])

    def _wait_again(self, lines: Sequence[bytes]) -> None:
        if self._failed:
            return
        self._lines[:0] = lines
        self._size += sum(map(len, lines))

    def _answer(self, tokens: Sequence[Token]) -> None:
        self._count += len(tokens)
        self._number += len(tokens)
        if tokens and not (self._failed or self._request.disconnected):
            self._request.send_part(grammar.encode_json([*tokens]).encode() + b"\n", MEDIA_TYPE_OF_LINES)

    def _crashed(self, failure: Any) -> None:
        self._log.failure("the lines of {uri} could not be appended", failure, uri=self._request.uri)
        self.fail(RequestError(500, "an error on this side; the log has the traceback"))
        self._running, self._taken = False, 0
        self._go_on()

    def fail(self, error: RequestError) -> None:
        """Answer with an error, and discard all further lines."""
        if self._failed:
            return
        self._failed = True
        self.drop()
        self._request.refuse(error)

    def drop(self) -> None:
        """Discard the lines that wait."""
        self._lines.clear()
        self._part = bytearray()
        self._size = 0
        self._note_kept()

    def _note_kept(self) -> None:
        kept = self._taken + self._size + len(self._part) + OBJECT_BYTES * len(self._lines)
        self._request.api.bodies.keep(self._request, kept)
