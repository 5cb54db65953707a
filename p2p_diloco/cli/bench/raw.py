"""`python -m p2p_diloco.cli.bench.raw OPTIONS`: one of a ring of processes that do nothing but move bytes.

Law: one libp2p stream to the next and one from the one before, as many bytes on each as a peer of a run sends in a
round: what the transport could do if nobody averaged, stepped, checked or waited for anything.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from p2p_diloco.cli.bench.parts import EXCHANGE
from p2p_diloco.cli.bench.side import SAID, Clock, options, say
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.pipe import Pipe

PROTOCOL = "/p2p-diloco/bench"


class Link:
    """One of the ring."""

    def __init__(self, asked: dict[str, Any], daemon: Daemon) -> None:
        self._asked, self._daemon = asked, daemon
        self._before: asyncio.Future[Pipe] = asyncio.get_running_loop().create_future()

    async def make(self, command: dict[str, Any]) -> dict[str, Any]:
        """Listen, with memory for the bytes of a round."""
        self._out, self._in = (memoryview(bytearray(command["nbytes"])) for _ in range(2))
        await self._daemon.serve_streams(PROTOCOL, self._opened)
        return {"peer_id": self._daemon.peer_id, "addresses": self._daemon.addresses}

    async def meet(self, command: dict[str, Any]) -> dict[str, Any]:
        """Open the stream to the next; the one before opens its own."""
        within_s = self._asked["round_s_max"]
        self._daemon.introduce(command["peer_id"], command["addresses"])
        self._next, _ = await self._daemon.open_stream(command["peer_id"], PROTOCOL, timeout_s=within_s)
        self._next.write(b"!")  # a stream is there for the other end once something is said on it
        await asyncio.wait_for(asyncio.shield(self._before), within_s)
        return {}

    async def train(self, _: dict[str, Any]) -> dict[str, Any]:
        """Nothing at all."""
        return {}

    async def round(self, _: dict[str, Any]) -> dict[str, Any]:
        """All bytes out, and all in."""
        clock, within_s = Clock(), self._asked["round_s_max"]
        with clock.part(EXCHANGE):
            before = self._before.result()
            sending = asyncio.wait_for(self._next.write_view(self._out), within_s)
            await asyncio.gather(sending, before.read_into(self._in, stall_s=within_s, total_s=within_s))
        return clock.round()

    async def _opened(self, _peer: str, pipe: Pipe, _seen_at: str) -> None:
        await pipe.read_into(memoryview(bytearray(1)), stall_s=30.0, total_s=30.0)
        if not self._before.done():
            self._before.set_result(pipe)
        await asyncio.Event().wait()  # the stream is closed when this returns


async def run(asked: dict[str, Any]) -> None:
    """Take part until told to end."""
    loop = asyncio.get_running_loop()
    dht = await DhtPeer.create(host_maddrs=asked["host_maddrs"])
    try:
        link = Link(asked, dht.daemon)
        answers = {"make": link.make, "meet": link.meet, "train": link.train, "round": link.round}
        say("idle")
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            if command["do"] == "end":
                return
            say(SAID[command["do"]], **await answers[command["do"]](command))
    finally:
        await dht.close()


if __name__ == "__main__":
    asyncio.run(run(options()))
