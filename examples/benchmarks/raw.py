"""The contender `raw`: one of several processes in a ring, which only transfer bytes.

Law: each process has one libp2p stream to the next process and one from the previous process. In a round it sends as
many bytes as a peer of a run does. So it shows the transport's speed without averages, outer steps, checks and waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from examples.benchmarks.member import EXCHANGE, Clock, Line, Member
from examples.benchmarks.plan import Plan
from p2p_diloco.config import PeerConfig
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.pipe import Pipe

PROTOCOL = "/p2p-diloco/bench"
GREETING_S = 30.0
T = TypeVar("T")


class Contender(Member):
    """One process of the ring."""

    def __init__(self, plan: Plan, asked: Line, leaving: ExitStack) -> None:
        super().__init__(plan, asked, leaving)
        self._loop = asyncio.new_event_loop()
        self._before: asyncio.Future[Pipe] = self._loop.create_future()
        # the loop has a thread of its own, so that the last bytes of a round can still be sent between two commands
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def open(self, first: Line) -> Line:
        dht = self._done(DhtPeer.create(PeerConfig(host_maddrs=self.asked["host_maddrs"])))
        self.leaving.callback(lambda: self._done(dht.close()))
        self._daemon = dht.daemon
        self._done(self._daemon.serve_streams(PROTOCOL, self._opened))
        return {"peer_id": self._daemon.peer_id, "addresses": self._daemon.addresses}

    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        self._out, self._in = (memoryview(bytearray(sent_bytes)) for _ in range(2))
        last = self.asked["rank"] == len(everyone) - 1
        self._done(self._meet(everyone[(self.asked["rank"] + 1) % len(everyone)], last))
        return {}

    def round(self) -> Line:
        clock = Clock()
        with clock.part(EXCHANGE):
            self._done(self._exchange())
        return clock.round()

    def _done(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine `work` in this process's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _meet(self, after: Line, last: bool) -> None:
        within_s = self.plan.round_s_max
        if last:  # of two peers that dial each other at once, over a long way, libp2p connects neither
            await asyncio.wait_for(asyncio.shield(self._before), within_s)
        self._daemon.introduce(after["peer_id"], after["addresses"])
        self._next, _ = await self._daemon.open_stream(after["peer_id"], PROTOCOL, timeout_s=within_s)
        self._next.write(b"!")  # the other end only sees the stream once a byte arrives
        await asyncio.wait_for(asyncio.shield(self._before), within_s)

    async def _exchange(self) -> None:
        within_s = self.plan.round_s_max
        sending = asyncio.wait_for(self._next.write_view(self._out), within_s)
        receiving = self._before.result().read_into(self._in, stall_s=within_s, total_s=within_s)
        await asyncio.gather(sending, receiving)

    async def _opened(self, _peer: str, pipe: Pipe, _seen_at: str) -> None:
        await pipe.read_into(memoryview(bytearray(1)), stall_s=GREETING_S, total_s=GREETING_S)
        if not self._before.done():
            self._before.set_result(pipe)
        await asyncio.Event().wait()  # the stream is closed when this returns
