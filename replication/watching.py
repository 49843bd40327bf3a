"""Following what others write into the tables of mapped streams: by looking, often while something happens there.

The longer nothing has happened, the longer the pause until the next look: an eighth of the silence, so that whoever
writes every second is heard within an eighth of one.  A look is one question for all streams together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from replication.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twisted.internet.interfaces import IReactorTime

    from replication.streams.seams import IWatch, Reach
    from replication.wire.grammar import StreamName
    from replication.writer import StreamWriter

SHORTEST: Final = 0.002  # seconds between two looks
LONGEST: Final = 0.6  # so that a quiet database is asked less than twice a second
SHARE: Final = 8  # the pause is this part of the silence
RETRY_AFTER: Final = 1.0  # seconds, when the database does not answer
FIRST_LOOKS: Final = 3  # that a start waits for: enough where nothing is under way


class Watching:
    """Looks through ``watch``, and tells the ``writers`` of its streams how far others have come.

    ``reaches`` is what the last look saw, ``error`` why there was none since.
    """

    log = Logger()

    def __init__(self, clock: IReactorTime, watch: IWatch, writers: Mapping[StreamName, StreamWriter]) -> None:
        self.reaches: Mapping[StreamName, Reach] = {}
        self.error: str | None = None
        self._clock = clock
        self._watch = watch
        self._writers = writers
        self._moved_at = clock.seconds()
        self._woken = False
        self._ended = False
        self._pause: Deferred[None] | None = None
        self._loop: Deferred[None] | None = None

    def error_of(self, stream: StreamName) -> str | None:
        """Return why it cannot be seen how far a stream has come, if that is so and it is one of ours."""
        if stream not in self._writers or stream not in self.reaches:
            return None
        return self.error or self.reaches[stream].error

    async def begin(self) -> None:
        """Open the streams under whose IDs nothing is under way, and go on looking; StoreError if that cannot be."""
        for _ in range(FIRST_LOOKS):
            await self._look()
            if all(each.ids.are_known for each in self._writers.values()):
                break
        self._loop = Deferred.fromCoroutine(self._go_on())

    def wake(self, stream: StreamName) -> None:
        """Look as soon as possible: something was written to ``stream``, which need not be one of ours."""
        if stream in self._writers:
            self._woken, self._moved_at = True, self._clock.seconds()
            if self._pause is not None:
                self._pause.cancel()

    async def end(self) -> None:
        """Look no more, and return once no look is under way."""
        self._ended = True
        if self._pause is not None:
            self._pause.cancel()
        if self._loop is not None:
            await self._loop

    async def _go_on(self) -> None:
        while not self._ended:
            await self._nap(await self._look_and_tell_pause())

    async def _look_and_tell_pause(self) -> float:
        try:
            moved = await self._look()
        except StoreError as error:
            if self.error != str(error):
                self.error = str(error)
                self.log.error("mapped streams wait: {error}", error=self.error)
            return RETRY_AFTER
        if self.error is not None:
            self.error = None
            self.log.info("mapped streams go on")
        now = self._clock.seconds()
        if moved:
            self._moved_at = now
        return min(LONGEST, max(SHORTEST, (now - self._moved_at) / SHARE))

    async def _look(self) -> bool:
        """Look once; returns whether anything has moved since the last time."""
        self._woken = False
        before, self.reaches = self.reaches, await self._watch.look()
        moved = False
        for stream, reach in self.reaches.items():
            former = before.get(stream)
            if reach is former:
                continue
            if former is not None and (reach.complete, reach.drawn) != (former.complete, former.drawn):
                moved = True
            writer = self._writers.get(stream)
            if writer is None:
                continue
            if reach.error != (None if former is None else former.error):
                self._say(stream, reach.error)
            if reach.complete is not None:
                writer.reach(reach.complete)
        return moved

    def _say(self, stream: StreamName, error: str | None) -> None:
        if error is None:
            self.log.info("{stream} goes on", stream=stream)
        else:
            self.log.error("{stream} waits: {error}", stream=stream, error=error)

    async def _nap(self, seconds: float) -> None:
        if self._ended or self._woken:
            return
        pause: Deferred[Any] = deferLater(self._clock, seconds)
        self._pause = pause
        try:
            await pause
        except CancelledError:  # that is how it is ended
            pass
        finally:
            self._pause = None
