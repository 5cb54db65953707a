"""The channel between a trainer and its node: msgpack dictionaries, one after another, over a socket pair.

Law: both ends are ours and of one version, so nothing is checked here; what comes from the swarm never passes
unread. The trainer's end blocks and bounds every wait, the node's end lives in its loop. The end of
the stream means that the other process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import msgpack

Message = dict[str, Any]
"""``{"kind": ..., ...}``: what plain msgpack carries."""

_READ_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other process is gone."""


def _unpacker() -> msgpack.Unpacker:
    """Takes a stream in pieces, and gives the messages in it; up to a length that none has."""
    return msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)


def _next(unpacker: msgpack.Unpacker) -> Message | None:
    """The next message, if all of it has come."""
    message: Message | None = next(unpacker, None)
    return message


class TrainerEnd:
    """The blocking end. One thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._unpacker = sock, _unpacker()

    def send(self, message: Message, *, timeout_s: float = 60.0) -> None:
        """Send a message; the node reads at once unless it is in trouble, so `timeout_s` is for that.

        Raises:
            ChannelClosed: the node is gone, or doesn't read.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(msgpack.packb(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None if none comes in time.

        Raises:
            ChannelClosed: the node is gone.
        """
        give_up_at = time.monotonic() + timeout_s
        while (message := _next(self._unpacker)) is None:
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
            self._unpacker.feed(data)
        return message

    def close(self) -> None:
        """Close the channel: the node leaves the run if it hasn't yet."""
        self._socket.close()


class NodeEnd:
    """The end in the node's loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._unpacker = reader, writer, _unpacker()

    @classmethod
    async def over(cls, sock: socket.socket) -> NodeEnd:
        """Take over a connected socket."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, kind: str, **values: object) -> None:
        """Queue a message. A trainer that is gone swallows it; `receive` tells."""
        if not self._writer.is_closing():
            self._writer.write(msgpack.packb({"kind": kind, **values}))

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ChannelClosed: the trainer is gone.
        """
        while (message := _next(self._unpacker)) is None:
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not data:
                raise ChannelClosed("the stream ended")
            self._unpacker.feed(data)
        return message

    async def flush(self) -> None:
        """Wait until what was sent has left this process, or the trainer is gone."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def close(self) -> None:
        """Close the channel."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
