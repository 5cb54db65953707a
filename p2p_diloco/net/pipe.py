"""A pipe: one stream of bytes, with a deadline on every wait.

Law: knows asyncio's transports, but no frames and no peers. Payloads are received into the caller's memory and sent
from it, without another copy of the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

from p2p_diloco.net.tcp import TcpSocket

_SCRATCH_BYTES = 64 * 1024
_UNREAD_BYTES_MAX = 256 * 1024
"""With this many unread bytes, reading from the connection pauses."""
CHUNK_BYTES = 256 * 1024
"""How much of a payload is handed to the transport at once. On streams to the daemon the socket's buffer is set to this
size; with Linux's default of 208 KiB the writer would be woken more than twice as often."""
TLS_CHUNK_BYTES = 64 * 1024
"""The same for connections that this process encrypts. It is smaller so that few encrypted bytes wait unsent, as with
`tcp.UNSENT_BYTES`."""
CLOSE_S = 2.0
"""Once the stream is closed, bytes that were written before may still be sent for this many seconds."""


class PipeBroken(Exception):
    """Raised when the stream has ended or was reset."""


class PipeStalled(Exception):
    """Raised when reading or writing has missed a deadline."""


class Pipe(asyncio.BufferedProtocol):
    """A stream over an asyncio transport that is already connected. One reader and one writer may use it at a time."""

    transport: asyncio.Transport

    def __init__(self, *, below: object = None) -> None:
        """`below`: what must live as long as this pipe."""
        self._loop = asyncio.get_running_loop()
        self._below, self._connected = below, False
        self._encrypts = False
        self.paced: TcpSocket | None = None
        """The socket of a direct connection, to limit the connection's rate and to tell the kernel how many bytes are
        missing; None for a stream to the daemon, even if encrypted."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.unread = bytearray()
        """Bytes that were received outside of `read_into`. The reader deletes the bytes that it has used."""
        self._target: memoryview | None = None
        self.filled_bytes = 0
        """How many bytes of the memory given to `read_into` are filled."""
        self._moved_at = self._loop.time()
        self._paused_reading = False
        self._writable = asyncio.Event()  # also set once the stream has ended
        self._writable.set()
        self.ended: str | None = None
        """Why the stream has ended; None while it is open."""
        self._reader: asyncio.Future[None] | None = None
        self._chunks: Iterator[memoryview] = iter(())
        self._sent: asyncio.Future[None] | None = None

    @classmethod
    async def adopt(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Pipe:
        """Make a pipe from asyncio's reader and writer of a stream. The bytes that the reader already holds are the
        first to be read."""
        transport = cast(asyncio.Transport, writer.transport)
        pipe = cls(below=writer)  # which closes its transport when it is garbage-collected
        pipe.connection_made(transport)
        transport.set_protocol(pipe)
        ended = bool(getattr(reader, "_eof", False))  # StreamReader has no public way to ask this
        reader.feed_eof()
        pipe.unread += await reader.read()  # doesn't wait, because feed_eof has marked the end
        if ended or transport.is_closing():
            pipe._end("the stream was closed")
        elif not transport.is_reading():
            transport.resume_reading()
        return pipe

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Use this transport from now on."""
        self.transport, self._connected = cast(asyncio.Transport, transport), True
        self._hold_up_sender()
        self._encrypts = transport.get_extra_info("sslcontext") is not None
        sock = transport.get_extra_info("socket")
        if self._encrypts:
            self.transport.set_write_buffer_limits(high=1)
            self.paced = TcpSocket(sock) if sock.family in (socket.AF_INET, socket.AF_INET6) else None
        else:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer into which asyncio writes the next bytes. While `read_into` waits, this is the memory that
        `read_into` fills."""
        return self._scratch if self._target is None else self._target[self.filled_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the `nbytes` bytes that asyncio has written into the buffer, and wake the reader."""
        self._moved_at = self._loop.time()
        if self._target is not None:
            self.filled_bytes += nbytes
            if self.paced is not None:
                self.paced.wake_for(len(self._target) - self.filled_bytes)
            if self.filled_bytes == len(self._target):
                self._target = None
                _wake(self._reader)
            return
        self.unread += self._scratch[:nbytes]
        self._hold_up_sender()
        _wake(self._reader)

    def _hold_up_sender(self) -> None:
        """Read no more while much is unread. The first bytes may come before the transport: with a handshake's end."""
        if len(self.unread) >= _UNREAD_BYTES_MAX and not self._paused_reading and self._connected:
            self._paused_reading = True
            self.transport.pause_reading()

    def eof_received(self) -> None:
        """End the stream, because the other end has closed it. This protocol never closes only one direction."""
        self._end("the stream was closed")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the stream broke ({exc})" if exc else "the stream was closed")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._send_on()

    # -- reading

    async def more(self, timeout_s: float | None) -> bool:
        """Wait until further bytes arrive in `unread`, even if it holds some already. Returns False if the stream has
        ended.

        Raises:
            PipeStalled: no bytes came in time.
        """
        before = len(self.unread)
        self._resume_reading()
        if self.ended is None:
            self._reader = self._loop.create_future()
            try:  # wait_for may swallow a cancellation before Python 3.12
                done, _ = await asyncio.wait({self._reader}, timeout=timeout_s)
            finally:
                self._reader = None
            if not done:
                raise PipeStalled(f"nothing came for {timeout_s:g} s")
        return len(self.unread) > before

    async def read_into(self, target: memoryview, *, stall_s: float, total_s: float) -> None:
        """Fill `target` with the next bytes of the stream.

        Raises:
            PipeBroken: the stream ended before `target` was full.
            PipeStalled: no byte came for `stall_s`, or not all within `total_s`.
        """
        ready = min(len(self.unread), len(target))
        target[:ready] = self.unread[:ready]
        del self.unread[:ready]
        self.filled_bytes, self._moved_at = ready, self._loop.time()
        if ready == len(target):
            return
        if self.ended is not None:
            raise PipeBroken(f"{self.ended} after {ready} of {len(target)} bytes")
        done = self._reader = self._loop.create_future()
        self._target = target
        if self.paced is not None:
            self.paced.wake_for(len(target) - ready)
        self._resume_reading()
        give_up_at = self._loop.time() + total_s
        try:
            while not done.done():
                left_s = min(give_up_at, self._moved_at + stall_s) - self._loop.time()
                if left_s <= 0:
                    late = self._loop.time() >= give_up_at
                    why = f"the payload took longer than {total_s:g} s" if late else f"no byte came for {stall_s:g} s"
                    raise PipeStalled(why)
                await asyncio.wait({done}, timeout=left_s)
        finally:
            self._target = self._reader = None
            if self.paced is not None:
                self.paced.wake_for(0)
        if self.filled_bytes < len(target):
            raise PipeBroken(f"{self.ended} after {self.filled_bytes} of {len(target)} bytes")

    # -- writing

    def write(self, data: bytes) -> None:
        """Queue bytes for sending, in the order of the calls. If the stream has ended, the bytes are dropped without an
        error; reading reports the end."""
        if self.ended is None:
            self.transport.write(data)

    async def drain(self, timeout_s: float | None) -> None:
        """Wait until the transport's buffer has room.

        Raises:
            PipeBroken: the stream has ended.
            PipeStalled: the buffer stayed full until the deadline.
        """
        if not self._writable.is_set():
            waiting = asyncio.ensure_future(self._writable.wait())
            try:
                done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
            finally:
                waiting.cancel()
            if not done:
                raise PipeStalled(f"the stream took nothing for {timeout_s:g} s")
        if self.ended is not None:
            raise PipeBroken(self.ended)

    def write_view(self, view: memoryview) -> asyncio.Future[None]:
        """Send memory in chunks, without a copy of the whole. The returned future is done once the transport has taken
        all of the memory, or fails with PipeBroken if the stream ends before. To give up, cancel the future."""
        size = TLS_CHUNK_BYTES if self._encrypts else CHUNK_BYTES
        self._chunks = (view[start : start + size] for start in range(0, len(view), size))
        self._sent = sent = self._loop.create_future()
        self._send_on()
        return sent

    def _send_on(self) -> None:
        """Pass further chunks of the memory to the transport until the transport's buffer is full."""
        if (sent := self._sent) is None:
            return
        while self.ended is None and self._writable.is_set() and not sent.done():
            if (chunk := next(self._chunks, None)) is not None:
                self.transport.write(chunk if self._encrypts else bytes(chunk))  # a plain transport may keep the chunk
            else:
                sent.set_result(None)
        if self.ended is not None and not sent.done():
            sent.set_exception(PipeBroken(self.ended))

    def forget_unsent(self) -> None:
        """Stop sending the memory that was given to `write_view`: it may change from now on. Reading goes on."""
        self._chunks = iter(())

    # -- ending

    @property
    def quiet(self) -> bool:
        """Whether the stream is open and has no unread bytes."""
        return self.ended is None and not self.unread

    def close(self) -> None:
        """Close the stream once the written bytes have left, after `CLOSE_S` at the latest."""
        self._end("closed by this peer")
        self.transport.close()
        self._loop.call_later(CLOSE_S, self.transport.abort)

    def abort(self) -> None:
        """Close the stream now, and drop the bytes that are not sent yet."""
        self._end("closed by this peer")
        self.transport.abort()

    def _end(self, why: str) -> None:
        if self.ended is None:
            self.ended = why
        _wake(self._reader)
        self._writable.set()
        self._send_on()

    def _resume_reading(self) -> None:
        if self._paused_reading and self.ended is None:
            self._paused_reading = False
            self.transport.resume_reading()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
