"""A stranger who knows a run's name and the address of one of its peers, and has libp2p like any other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.framing import Frame, FrameStream, encode
from p2p_diloco.net.interface import Limits, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe
from tests.net.swarm import LISTEN

ANSWER_S = 20.0


class Attacker:
    """Opens streams of any protocol to a victim, and says anything on them."""

    def __init__(self, daemon: Daemon, victim: str) -> None:
        self.daemon, self.victim = daemon, victim

    async def stream(self, protocol: str, *said: Frame) -> tuple[Pipe, FrameStream]:
        """A stream on which these frames were written."""
        pipe, _ = await self.daemon.open_stream(self.victim, protocol, timeout_s=ANSWER_S)
        for frame in said:
            pipe.write(encode(frame))
        return pipe, FrameStream(pipe, self.victim, Limits(), Traffic())

    async def told(self, protocol: str, *said: Frame) -> list[Frame]:
        """All frames that come back until the stream ends."""
        pipe, frames = await self.stream(protocol, *said)
        try:
            return [frame async for frame in _all(frames)]
        finally:
            pipe.abort()

    async def flood(self, protocol: str, *said: Frame) -> int:
        """Open stream after stream until cancelled; returns how many."""
        opened = 0
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                with contextlib.suppress(Unreachable):
                    pipe, _ = await self.stream(protocol, *said)
                    opened += 1
                    asyncio.get_running_loop().call_later(1.0, pipe.abort)
        return opened


async def _all(frames: FrameStream) -> AsyncIterator[Frame]:
    while (frame := await frames.read(idle_s=ANSWER_S, frame_s=ANSWER_S)) is not None:
        yield frame


@contextlib.asynccontextmanager
async def attacker(victim: Any, *, addresses: list[str] | None = None) -> AsyncIterator[Attacker]:
    """A stranger that is connected to the victim, a transport."""
    daemon = await Daemon.start(
        identity_path=None, host_maddrs=LISTEN, announce_maddrs=(), client_mode=False, timeout_s=30.0, on_death=None,
    )  # fmt: skip
    try:
        daemon.introduce(victim.peer_id, addresses or victim.addresses())
        yield Attacker(daemon, victim.peer_id)
    finally:
        await daemon.close()
