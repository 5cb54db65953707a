"""One stream of bytes with a deadline on every wait.

Law: the only file that touches asyncio's transports. Payloads are received straight into the caller's memory
and sent straight from it; nothing here knows frames or peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import cast

from p2p_diloco.net.pacing import Paced
from p2p_diloco.net.tcp import TcpSocket

_SCRATCH_BYTES = 64 * 1024
_BACKLOG_BYTES_MAX = 256 * 1024
"""Unread bytes at which the other end is made to wait."""
CHUNK_BYTES = 256 * 1024
"""How much of a payload is handed to the transport at once. Towards the daemon the kernel is asked for a buffer of this
size; Linux usually has one of 208 KiB, and wakes the writer more than twice as often."""
CLOSE_S = 2.0
"""How long what was written may take to go out once the stream is closed."""


class PipeBroken(Exception):
    """The stream ended or was reset."""


class PipeStalled(Exception):
    """A deadline passed."""


class Pipe(asyncio.BufferedProtocol):
    """A stream over a transport that is already connected. One reader and one writer at a time."""

    def __init__(self, transport: asyncio.Transport, *, keep: object = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._keep = keep  # a StreamWriter closes its transport when it is collected
        self._encrypts = transport.get_extra_info("sslcontext") is not None
        sock = transport.get_extra_info("socket")
        self.paced: Paced | None = TcpSocket(sock) if self._encrypts else None
        """What holds the connection to a pace; None for a stream to the daemon."""
        if not self._encrypts:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._backlog = bytearray()
        self._target: memoryview | None = None
        self._filled = 0
        self._moved_at = self._loop.time()
        self._paused_reading = False
        self._paused_writing = False
        self._ended: str | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writers: list[asyncio.Future[None]] = []
        self._chunks: Iterator[memoryview] = iter(())
        self._sent: asyncio.Future[None] | None = None

    @classmethod
    async def adopt(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Pipe:
        """Take over the stream of a reader and a writer, with the bytes that the reader already holds."""
        transport = cast(asyncio.Transport, writer.transport)
        pipe = cls(transport, keep=writer)
        transport.set_protocol(pipe)
        ended = bool(getattr(reader, "_eof", False))  # the reader tells it no other way
        reader.feed_eof()
        pipe._backlog += await reader.read()  # doesn't wait: the end is already marked
        if ended or transport.is_closing():
            pipe._end("the stream was closed")
        elif not transport.is_reading():
            transport.resume_reading()
        return pipe

    # -- asyncio's side

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go: the caller's memory if it waits for a payload."""
        return self._scratch if self._target is None else self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._moved_at = self._loop.time()
        if self._target is not None:
            self._filled += nbytes
            if self._filled == len(self._target):
                self._target = None
                _wake(self._reader)
            return
        self._backlog += self._scratch[:nbytes]
        if len(self._backlog) >= _BACKLOG_BYTES_MAX and not self._paused_reading:
            self._paused_reading = True
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> None:
        """The other end is gone: nobody here closes one direction alone."""
        self._end("the stream was closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream is over, for whatever reason."""
        self._end(f"the stream broke ({exc})" if exc else "the stream was closed")

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self._paused_writing = True

    def resume_writing(self) -> None:
        """The socket's buffer has room."""
        self._paused_writing = False
        for writer in self._writers:
            _wake(writer)
        self._send_on()

    # -- reading

    async def read_some(self, timeout_s: float | None) -> bytes:
        """What has come, at least a byte; b"" at the end of the stream.

        Raises:
            PipeStalled: nothing came in time.
        """
        if not self._backlog and self._ended is None:
            self._reader = self._loop.create_future()
            try:
                await self._within(self._reader, timeout_s, "nothing came")
            finally:
                self._reader = None
        data = bytes(self._backlog)
        self._backlog.clear()
        self._resume_reading()
        return data

    async def read_into(self, target: memoryview, *, stall_s: float, total_s: float) -> None:
        """Fill the memory.

        Raises:
            PipeBroken: the stream ended before.
            PipeStalled: no byte came for `stall_s`, or not all within `total_s`.
        """
        ready = min(len(self._backlog), len(target))
        target[:ready] = self._backlog[:ready]
        del self._backlog[:ready]
        self._filled, self._moved_at = ready, self._loop.time()
        if ready == len(target):
            return
        if self._ended is not None:
            raise PipeBroken(f"{self._ended} after {ready} of {len(target)} bytes")
        done = self._reader = self._loop.create_future()
        self._target = target
        self._resume_reading()
        stop_watching = self._watch(done, stall_s=stall_s, total_s=total_s)
        try:
            await done
        finally:
            self._target = self._reader = None
            stop_watching()
        if self._filled < len(target):
            raise PipeBroken(f"{self._ended} after {self._filled} of {len(target)} bytes")

    @property
    def filled_bytes(self) -> int:
        """How much of the memory given to `read_into` is filled."""
        return self._filled

    # -- writing

    def write(self, data: bytes) -> None:
        """Queue bytes, in the order of the calls. A stream that has ended swallows them; its reader will
        notice.
        """
        if self._ended is None:
            self._transport.write(data)

    async def drain(self, timeout_s: float | None) -> None:
        """Wait until the socket takes more.

        Raises:
            PipeBroken: the stream has ended.
            PipeStalled: it took nothing in time.
        """
        if self._paused_writing and self._ended is None:
            writer: asyncio.Future[None] = self._loop.create_future()
            self._writers.append(writer)
            try:
                await self._within(writer, timeout_s, "the stream took nothing")
            finally:
                self._writers.remove(writer)
        if self._ended is not None:
            raise PipeBroken(self._ended)

    def write_view(self, view: memoryview) -> asyncio.Future[None]:
        """Send memory as it is, without a copy of the whole; done once the socket has taken it. Whoever calls this sets
        the deadline, by cancelling what it returns.

        Raises:
            PipeBroken: the stream has ended.
        """
        self._chunks = (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))
        self._sent = sent = self._loop.create_future()
        self._send_on()
        return sent

    def _send_on(self) -> None:
        """Hand on what the socket takes of the memory that is being sent."""
        if (sent := self._sent) is None:
            return
        while self._ended is None and not self._paused_writing and not sent.done():
            if (chunk := next(self._chunks, None)) is not None:
                self._transport.write(chunk if self._encrypts else bytes(chunk))  # others may keep what they are given
            else:
                sent.set_result(None)
        if self._ended is not None:
            _fail(sent, PipeBroken(self._ended))

    def forget_unsent(self) -> None:
        """Send no more of the memory that is being sent: it may change now. What comes is read on."""
        self._chunks = iter(())

    # -- ending

    @property
    def ended(self) -> str | None:
        """Why the stream is over, or None."""
        return self._ended

    @property
    def quiet(self) -> bool:
        """Whether it is open, and nothing has come that nobody has read."""
        return self._ended is None and not self._backlog

    def close(self) -> None:
        """Close once what was written has gone out, after `CLOSE_S` at the latest."""
        self._end("closed by this peer")
        self._transport.close()
        self._loop.call_later(CLOSE_S, self._transport.abort)

    def abort(self) -> None:
        """Close now, and forget what was written."""
        self._end("closed by this peer")
        self._transport.abort()

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended = why
        _wake(self._reader)
        for writer in self._writers:
            _wake(writer)
        self._send_on()

    def _resume_reading(self) -> None:
        if self._paused_reading and self._ended is None:
            self._paused_reading = False
            self._transport.resume_reading()

    async def _within(self, waiter: asyncio.Future[None], timeout_s: float | None, what: str) -> None:
        if timeout_s is None:
            return await waiter
        timer = self._loop.call_later(timeout_s, _fail, waiter, PipeStalled(f"{what} for {timeout_s:g} s"))
        try:
            await waiter
        finally:
            timer.cancel()

    def _watch(self, waiter: asyncio.Future[None], *, stall_s: float, total_s: float) -> Callable[[], None]:
        """Fail the waiter when bytes stop coming, or come too slowly. One timer, not one per piece."""
        give_up_at = self._loop.time() + total_s
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            now = self._loop.time()
            if now >= give_up_at:
                _fail(waiter, PipeStalled(f"the payload took longer than {total_s:g} s"))
            elif now >= self._moved_at + stall_s:
                _fail(waiter, PipeStalled(f"no byte came for {stall_s:g} s"))
            else:
                timer = self._loop.call_at(min(give_up_at, self._moved_at + stall_s), look)

        timer = self._loop.call_later(min(stall_s, total_s), look)
        return lambda: timer.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _fail(waiter: asyncio.Future[None], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
