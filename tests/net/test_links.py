"""Links take another path while answers stay away, and come back to a direct one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2p_diloco.net import exchange as links
from p2p_diloco.net.exchange import Links
from p2p_diloco.net.framing import Accepted, FrameStream, Message
from p2p_diloco.net.interface import Limits, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.streams import Streams
from tests.net.inboxes import Quiet
from tests.net.patience import plays

LIMITS = Limits(read_timeout_s=2.0, write_timeout_s=2.0)
SOON_S = 20.0
DIRECT, RELAYED = "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1/p2p/relay/p2p-circuit"


class Rig:
    """Links of one peer, and the far ends of their streams. A path that `opens` lets streams through; the far end
    answers on a path that `answers`."""

    def __init__(self) -> None:
        self.opens = {"direct": True, "relayed": True}
        self.answers = {"direct": True, "relayed": True}
        self.arrived: list[tuple[str, bytes]] = []
        self.dialled: list[str] = []
        self.moved: list[str] = []
        self.pipes: list[Pipe] = []
        self.streams = Streams(Quiet(), LIMITS, Traffic())
        self.links = Links(self.streams, self.dial, self.moved.append)
        self.serving: list[asyncio.Task[None]] = []

    async def dial(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        way = "relayed" if around or not self.opens["direct"] else "direct"
        self.dialled.append(way)
        if not self.opens[way]:
            raise Unreachable("no way")
        near, far = socket.socketpair()
        there = await Pipe.adopt(*await asyncio.open_connection(sock=far))
        self.serving.append(asyncio.create_task(self.serve(way, there)))
        self.pipes.append(await Pipe.adopt(*await asyncio.open_connection(sock=near)))
        return self.pipes[-1], RELAYED if way == "relayed" else DIRECT

    async def serve(self, way: str, pipe: Pipe) -> None:
        frames = FrameStream(pipe, "a", LIMITS, Traffic())
        while isinstance(frame := await frames.read(idle_s=None, frame_s=1.0), Message):
            while not self.answers[way]:
                await asyncio.sleep(0.01)
            self.arrived.append((way, frame.header))
            frames.write(Accepted())

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.links.end()
        await self.streams.close()
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)


def run(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        rig = Rig()
        try:
            await asyncio.wait_for(test(rig), SOON_S)
        finally:
            await rig.close()

    asyncio.run(bounded())


@plays(run)
async def test_a_link_whose_answers_stay_away_takes_a_relay(rig: Rig) -> None:
    """What it had sent fails, so that the core sends it again; what comes next goes the other way. The peer is
    reported, so that payloads follow."""
    await rig.links.send("b", b"one")
    rig.answers["direct"] = False
    with pytest.raises(Unreachable, match="another path"):
        await rig.links.send("b", b"two")
    await rig.links.send("b", b"three")
    assert rig.arrived == [("direct", b"one"), ("relayed", b"three")]
    assert rig.moved == ["b"]


@plays(run)
async def test_a_link_stays_if_no_relay_reaches_the_peer(rig: Rig) -> None:
    """A frozen peer's link lasts until its answers are late beyond all limits: this answer comes just in time."""
    rig.opens["relayed"] = rig.answers["direct"] = False
    sending = asyncio.create_task(rig.links.send("b", b"one"))
    await rig.until(lambda: rig.dialled == ["direct", "relayed"])
    rig.answers["direct"] = True
    await sending
    assert rig.arrived == [("direct", b"one")]
    assert rig.moved == []


@plays(run)
async def test_a_link_that_answers_while_a_relay_is_asked_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the relay's stream is ended, and nothing is lost."""
    dial, asked = rig.dial, asyncio.Event()

    async def slowly(peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        if around:
            asked.set()
            await rig.until(lambda: rig.arrived != [])
            await asyncio.sleep(0.05)
        return await dial(peer, around=around)

    monkeypatch.setattr(rig.links, "_dial", slowly)
    rig.answers["direct"] = False
    sending = asyncio.create_task(rig.links.send("b", b"one"))
    await asked.wait()
    rig.answers["direct"] = True
    await sending
    await rig.until(lambda: len(rig.pipes) == 2 and rig.pipes[1].ended is not None)
    assert rig.pipes[0].ended is None
    assert rig.moved == []


@plays(run)
async def test_a_relayed_link_comes_back_to_a_direct_path(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for one now and then, and stays on the relay until there is one."""
    monkeypatch.setattr(links, "RELAYED_S", 0.05)
    rig.opens["direct"] = False
    await rig.links.send("b", b"one")
    await rig.until(lambda: rig.dialled.count("relayed") >= 3)
    assert rig.pipes[0].ended is None
    await rig.links.send("b", b"two")
    rig.opens["direct"] = True
    await rig.until(lambda: "direct" in rig.dialled)
    await rig.until(lambda: rig.pipes[0].ended is not None)
    await rig.links.send("b", b"three")
    assert rig.arrived == [("relayed", b"one"), ("relayed", b"two"), ("direct", b"three")]
    assert [pipe.ended is None for pipe in rig.pipes].count(True) == 1
    assert rig.moved == []


@plays(run)
async def test_a_dead_link_is_not_used_twice(rig: Rig) -> None:
    """A sender that tries again at once, and never lets other tasks run, gets a new link."""
    await rig.links.send("b", b"one")
    rig.pipes[0].abort()
    with pytest.raises(Unreachable):
        await rig.links.send("b", b"two")
    await rig.links.send("b", b"three")
    assert rig.arrived == [("direct", b"one"), ("direct", b"three")]
