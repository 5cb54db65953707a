"""A TCP proxy that corrupts the bytes that pass through it: flipped bits, garbage, silence."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading


class Proxy:
    """Forwards 127.0.0.1:`port` to another port of this machine, in a thread of its own.

    `mode`: "clean"; "flip" turns a bit in one piece of 256 and more bytes in ten; "garbage" sends 64 KiB of noise
    instead of one such piece in ten; "silent" accepts and swallows everything.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.mode, self.spoilt = "clean", 0
        self._target, self._random = target, random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(5.0)

    def close(self) -> None:
        """Close the proxy and every connection through it."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(5.0)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._live())
        self._loop.close()

    async def _live(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        both = [asyncio.ensure_future(self._pump(*ends)) for ends in ((reader, there[1]), (there[0], writer))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in both:
                pump.cancel()
            for end in (writer, there[1]):
                end.close()
                with contextlib.suppress(Exception):
                    await end.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                if self.mode == "silent":
                    continue
                writer.write(self._spoil(piece))
                await writer.drain()

    def _spoil(self, piece: bytes) -> bytes:
        if self.mode == "clean" or len(piece) < 256 or self._random.random() > 0.1:
            return piece
        self.spoilt += 1
        if self.mode == "garbage":
            return self._random.randbytes(1 << 16)
        where = self._random.randrange(len(piece))
        return piece[:where] + bytes([piece[where] ^ (1 << self._random.randrange(8))]) + piece[where + 1 :]
