"""Payloads that wait in an inbox until a test lets them go."""

from __future__ import annotations

import asyncio

from p2p_diloco.net.framing import Frame, FrameStream
from p2p_diloco.net.interface import Limits, Refusal, Traffic
from p2p_diloco.net.pipe import Pipe
from tests.net.direct_peers import Peer

LONG = 4 << 20
"""Longer than what the system takes of a payload before anybody reads it."""


class Gate:
    """Holds what an inbox takes, until it is opened; refuses what is named."""

    def __init__(self, peer: Peer, refused: bytes = b"") -> None:
        self.open, self.come = asyncio.Event(), list[bytes]()
        self._box, self._refused, self._deliver = peer.box, refused, peer.box.deliver
        peer.box.deliver = self.deliver  # type: ignore[method-assign]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        self.come.append(header)
        await self.open.wait()
        if header == self._refused:
            raise Refusal(f"no {header.decode()}")
        await self._deliver(sender, header, payload)


def sent(peer: Peer, *headers: bytes, nbytes: int = 1000) -> list[asyncio.Task[None]]:
    """Payloads to b, of their header's bytes, all at once."""
    return [asyncio.create_task(peer.send("b", header * nbytes, header)) for header in headers]


async def answers(pipe: Pipe, count: int) -> list[Frame | None]:
    """The next frames on a connection of a test's own."""
    frames = FrameStream(pipe, "", Limits(), Traffic())
    return [await frames.read(idle_s=30.0, frame_s=30.0) for _ in range(count)]


def serving(peer: Peer) -> int:
    """How much of the payload that is coming is here."""
    return max((pipe.filled_bytes for pipe in peer.direct.listener._serving), default=0)


async def all_that_comes(pipe: Pipe) -> bytes:
    """The bytes of a payload that have arrived once no more arrive."""
    come = -1
    while come < pipe.filled_bytes:
        come = pipe.filled_bytes
        await asyncio.sleep(0.1)
    assert pipe.ended is None
    assert pipe._target is not None
    return bytes(pipe._target[:come])
