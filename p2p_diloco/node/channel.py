"""The channel between a trainer and its node: msgpack dictionaries, each after its length, over a socket pair.

Law: both ends are ours and of one version, so nothing is checked here; what comes from the swarm never passes
unread. The trainer's end blocks and bounds every wait, the node's end lives in its loop. The end of
the stream means that the other process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from typing import Any

import msgpack

Message = dict[str, Any]
"""``{"kind": ..., ...}``: what plain msgpack carries."""

_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The other process is gone."""


def frame(message: Message) -> bytes:
    """The bytes of one message."""
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def unframed(body: bytes) -> Message:
    """The message of what follows its length."""
    message: Message = msgpack.unpackb(body, strict_map_key=False)
    return message


class TrainerEnd:
    """The blocking end. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, message: Message, *, timeout_s: float = 60.0) -> None:
        """Send a message; the node reads at once unless it is in trouble, so `timeout_s` is for that.

        Raises:
            ChannelClosed: the node is gone, or doesn't read.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frame(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None if none comes in time.

        Raises:
            ChannelClosed: the node is gone.
        """
        give_up_at = time.monotonic() + timeout_s
        while (message := self._next()) is None:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return None
            try:
                self._socket.settimeout(left_s)
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not data:
                raise ChannelClosed("the stream ended")
            self._buffer += data
        return message

    def _next(self) -> Message | None:
        """The first message in the buffer, once it is whole."""
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return unframed(body)

    def close(self) -> None:
        """Close the channel: the node leaves the run if it hasn't yet."""
        self._socket.close()


class NodeEnd:
    """The end in the node's loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> NodeEnd:
        """Take over a connected socket."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, kind: str, **values: object) -> None:
        """Queue a message. A trainer that is gone swallows it; `receive` tells."""
        if not self._writer.is_closing():
            self._writer.write(frame({"kind": kind, **values}))

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ChannelClosed: the trainer is gone.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return unframed(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ChannelClosed(str(error)) from None

    async def flush(self) -> None:
        """Wait until what was sent has left this process, or the trainer is gone."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def close(self) -> None:
        """Close the channel."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
