"""The door: a Unix socket at which the trainer's processes ask the node for slices of data sets.

Law: only the node uses the network; the trainer only reads the files whose paths it is told. Each process of the
trainer, such as a worker of a DataLoader, has a connection of its own, and gets an answer to each request except
`soon`. The socket is in a folder that only this user can enter.

    open (name, identity)      waits (text) ... manifest (packed)
    get (data_set, index)      waits (text) ... slice (path)
    soon (data_set, indices)   nothing
    any                        error
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.net.stale_sockets import FOLDER, is_stale
from p2p_diloco.node.channel import ChannelClosed, Message, NodeEnd
from p2p_diloco.node.fetching import Fetching

_FOLDERS = "p2p-diloco-door-"


class Door:
    """Serves the slices of `fetching` to processes of this machine's user."""

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
                    await self._answer(end, message, lambda text: end.send("waits", text=text))
                except P2PDilocoError as error:
                    end.send("error", error=error.to_wire())
        except ChannelClosed:
            pass
        finally:
            await end.close()

    async def _answer(self, end: NodeEnd, message: Message, waits: Callable[[str], None]) -> None:
        match message:
            case {"kind": "open", "name": name, "identity": identity}:
                end.send("manifest", packed=(await self._fetching.open(name, identity, waits)).packed)
            case {"kind": "get", "data_set": identity, "index": index}:
                end.send("slice", path=str(await self._fetching.get(identity, index, waits)))
            case {"kind": "soon", "data_set": identity, "indices": indices}:
                self._fetching.soon(identity, indices)
