"""A proxy of TCP between real processes: slow, late, silent, wrong or cut; a test changes it while it runs."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Final, Self

import attrs

from replication.bench.cluster import free_ports

if TYPE_CHECKING:
    from collections.abc import Coroutine

_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


@attrs.frozen
class Toxin:
    """What a proxy does to the bytes that it passes.

    Attributes:
        delay: the seconds before each piece.
        piece: the most bytes that are passed at once.
        silent: whether nothing is passed, while all connections stay.
        wrong: the probability that a byte of a piece is changed.

    """

    delay: float = 0.0
    piece: int = 2**16
    silent: bool = False
    wrong: float = 0.0


HARMLESS: Final = Toxin()


class Proxy:
    """Passes the connections of its port to another port."""

    def __init__(self, proxies: Proxies, target: int) -> None:
        self._proxies, self._target = proxies, target
        self.toxin = HARMLESS
        self._open: set[asyncio.StreamWriter] = set()
        self._chance = random.Random(target)
        (self.port,) = free_ports(1)
        proxies.run(self._listen())

    async def _listen(self) -> None:
        self._proxies.servers.append(await asyncio.start_server(self._serve, "127.0.0.1", self.port))

    def cut(self) -> None:
        """Reset all connections."""
        self._proxies.run(self._cut())

    async def _cut(self) -> None:
        for each in self._open:
            with suppress(OSError, AttributeError):
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            each.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            ends.add(back)
            self._open |= ends
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))
        except OSError:
            writer.transport.abort()  # the target is away
        finally:
            self._open -= ends
            for each in ends:
                each.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                while data:
                    while self.toxin.silent:  # noqa: ASYNC110 (another thread changes it)
                        await asyncio.sleep(0.05)
                    toxin = self.toxin
                    piece, data = bytearray(data[: toxin.piece]), data[toxin.piece :]
                    if toxin.delay:
                        await asyncio.sleep(toxin.delay)
                    if self._chance.random() < toxin.wrong:
                        piece[self._chance.randrange(len(piece))] ^= 1 << self._chance.randrange(8)
                    writer.write(bytes(piece))
                    await writer.drain()
        writer.close()


class Proxies:
    """The proxies of a scene, which one thread serves."""

    def __init__(self) -> None:
        self.servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def run(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the thread, and wait for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for each in self.servers:
            each.close()
        rest = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)  # transports close
