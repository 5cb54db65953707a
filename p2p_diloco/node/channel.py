"""The channel between a trainer and its node: msgpack dictionaries, one after another, over a socket pair; and the door
of the node, at which the trainer's processes ask for slices of data sets.

Law: both ends run the same version of this package, so messages are not validated here; data from other peers is
validated before it gets here. The trainer's end blocks and bounds every wait; the node's end is asynchronous. The end
of the stream means that the other process has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import msgspec

from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.net.stale_sockets import FOLDER, is_stale

if TYPE_CHECKING:
    from p2p_diloco.node.fetching import Fetching

Message = dict[str, Any]
"""A message ``{"kind": ..., ...}`` with values that msgspec can encode; a dataclass arrives as a map of its fields."""

_READ_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The process at the other end of the channel has ended."""


def _unpacker() -> msgpack.Unpacker:
    """Make a decoder for messages that arrive in pieces. Its length limit is higher than the length of any message."""
    return msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)


def _next(unpacker: msgpack.Unpacker) -> Message | None:
    """Take the next message out of the decoder; None while no complete message is there."""
    message: Message | None = next(unpacker, None)
    return message


class TrainerEnd:
    """The trainer's end of the channel. Its calls block, and only one thread at a time may use it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._unpacker = sock, _unpacker()

    def send(self, message: Message, *, timeout_s: float = 60.0) -> None:
        """Send a message to the node. The node normally reads at once, so the deadline `timeout_s` passes only if the
        node hangs.

        Raises:
            ChannelClosed: the node has ended, or doesn't read.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(msgspec.msgpack.encode(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float) -> Message | None:
        """Wait for the node's next message; None if no message comes within `timeout_s`.

        Raises:
            ChannelClosed: the node has ended.
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
        """Close the channel. The node then leaves the run, unless it has left already."""
        self._socket.close()


class NodeEnd:
    """The node's end of the channel, for use in the node's event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._unpacker = reader, writer, _unpacker()
        self.left_alone = False
        """Whether the trainer has ended without leaving the run: it was killed, or has crashed."""

    @classmethod
    async def over(cls, sock: socket.socket) -> NodeEnd:
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, kind: str, **values: object) -> None:
        """Queue a message to the trainer. If the trainer has ended, the message is dropped without an error; `receive`
        then reports the end."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.msgpack.encode({"kind": kind, **values}))

    def progress(self, text: str) -> None:
        """Tell the trainer which step of its start this node has reached, or what it waits for."""
        self.send("waiting", text=text)

    async def receive(self) -> Message:
        """Wait for the trainer's next message.

        Raises:
            ChannelClosed: the trainer has ended.
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
        """Wait until all sent messages have left this process, or the trainer has ended."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


# -- the door of the trainer's processes

_FOLDERS = "p2p-diloco-door-"


class Door:
    """A Unix socket at which processes of this machine's user, such as the workers of a DataLoader, ask for the slices
    of `fetching`. Only the node uses the network; the trainer only reads the files whose paths it is told. Each thread
    has a connection of its own, and gets an answer to each request except `soon`. The socket is in a folder that only
    this user can enter.

        open (name, identity)      waiting (text) ... manifest (packed)
        get (data_set, index)      waiting (text) ... slice (path)
        soon (data_set, indices)   nothing
        any                        error
    """

    def __init__(self, fetching: Fetching) -> None:
        self._fetching = fetching
        self._folder: Path | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> str:
        """Listen from now on; returns the socket's path."""
        if self._folder is None:
            for left in FOLDER.glob(f"{_FOLDERS}*/door"):
                if is_stale(left):  # its node was killed
                    shutil.rmtree(left.parent, ignore_errors=True)
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDERS, dir=FOLDER))
            self._server = await asyncio.start_unix_server(self._begin, self._folder / "door")
        return str(self._folder / "door")

    def close(self) -> None:
        """Stop listening and fetching, and end all connections."""
        if self._server is not None and self._folder is not None:
            self._server.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        for task in self._serving:
            task.cancel()
        self._fetching.close()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(NodeEnd(reader, writer)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, end: NodeEnd) -> None:
        try:
            while True:
                message = await end.receive()
                try:
                    await self._answer(end, message, end.progress)
                except P2PDilocoError as error:
                    end.send("error", error=error.to_wire())
        except ChannelClosed:
            pass
        finally:
            await end.close()

    async def _answer(self, end: NodeEnd, message: Message, waits: Callable[[str], None]) -> None:
        match message:
            case {"kind": "open", "n": n, "name": name, "identity": identity}:
                end.send("manifest", n=n, packed=(await self._fetching.open(name, identity, waits)).packed)
            case {"kind": "get", "n": n, "data_set": identity, "index": index}:
                end.send("slice", n=n, path=str(await self._fetching.get(identity, index, waits)))
            case {"kind": "soon", "data_set": identity, "indices": indices}:
                self._fetching.soon(identity, indices)
