"""Links take another path while answers stay away, and come back to a direct one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from p2p_diloco.net import exchange as links
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.pipe import Pipe
from tests.net import direct_peers
from tests.net.direct_peers import HERE, LIMITS, Start
from tests.net.patience import plays, until

RELAYED = "/ip4/10.0.0.2/tcp/1/p2p/relay/p2p-circuit"


class Ways:
    """How a reaches b: directly, or through a relay. A way that `opens` lets streams through."""

    def __init__(self, start: Start) -> None:
        self.a = start("a", hosts=(), limits=replace(LIMITS, read_timeout_s=2.0))
        self.b = start("b", hosts=())
        self.opens = {"direct": True, "relayed": True}
        self.dialled, self.moved, self.pipes = list[str](), list[str](), list[Pipe]()
        self.links = self.a.exchange.links
        self.links._dial, self.links._moved = self.dial, self.moved.append

    async def dial(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        way = "relayed" if around or not self.opens["direct"] else "direct"
        self.dialled.append(way)
        if not self.opens[way]:
            raise Unreachable("no way")
        self.pipes.append((await self.a.dial(peer))[0])
        return self.pipes[-1], RELAYED if way == "relayed" else HERE

    async def send(self, header: bytes) -> None:
        await self.links.send("b", header)

    async def held_up(self, header: bytes) -> asyncio.Task[None]:
        """A message whose answer does not come, on a new direct link."""
        await self.send(b"first")
        self.pipes[0].transport.pause_reading()
        return asyncio.create_task(self.send(header))

    def answers(self) -> None:
        """The answer comes after all."""
        self.pipes[0].transport.resume_reading()


def run(test: Callable[[Ways], Awaitable[None]]) -> None:
    direct_peers.run(lambda start: test(Ways(start)))


@plays(run)
async def test_a_link_whose_answers_stay_away_takes_a_relay(ways: Ways) -> None:
    """What it had sent fails, so that the core sends it again; what comes next goes the other way. The peer is
    reported, so that payloads follow."""
    with pytest.raises(Unreachable, match="another path"):
        await (await ways.held_up(b"two"))
    await ways.send(b"three")
    assert (ways.dialled, ways.moved) == (["direct", "relayed"], ["b"])
    assert ways.b.box.headers[-1] == b"three"


@plays(run)
async def test_a_link_stays_if_no_relay_reaches_the_peer(ways: Ways) -> None:
    """A frozen peer's link lasts until its answers are late beyond all limits: this answer comes just in time."""
    ways.opens["relayed"] = False
    sending = await ways.held_up(b"two")
    await until(lambda: ways.dialled == ["direct", "relayed"])
    ways.answers()
    await sending
    assert (ways.b.box.headers, ways.moved) == ([b"first", b"two"], [])


@plays(run)
async def test_a_link_that_answers_while_a_relay_is_asked_stays(ways: Ways) -> None:
    """Then the relay's stream is ended, and nothing is lost."""
    dial, asked, may = ways.dial, asyncio.Event(), asyncio.Event()

    async def slowly(peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        asked.set()
        await may.wait()
        return await dial(peer, around=around)

    sending = await ways.held_up(b"two")
    ways.links._dial = slowly
    await asked.wait()
    ways.answers()
    await sending
    may.set()
    await until(lambda: len(ways.pipes) == 2 and ways.pipes[1].ended is not None)
    assert (ways.pipes[0].ended, ways.moved) == (None, [])


@plays(run)
async def test_a_relayed_link_comes_back_to_a_direct_path(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for one now and then, and stays on the relay until there is one."""
    monkeypatch.setattr(links, "RELAYED_S", 0.05)
    ways.opens["direct"] = False
    await ways.send(b"one")
    await until(lambda: ways.dialled.count("relayed") >= 3)
    assert ways.pipes[0].ended is None
    await ways.send(b"two")
    ways.opens["direct"] = True
    await until(lambda: "direct" in ways.dialled and ways.pipes[0].ended is not None)
    await ways.send(b"three")
    assert ways.b.box.headers == [b"one", b"two", b"three"]
    assert [pipe.ended is None for pipe in ways.pipes].count(True) == 1
    assert ways.moved == []


@plays(run)
async def test_a_dead_link_is_not_used_twice(ways: Ways) -> None:
    """A sender that tries again at once, and never lets other tasks run, gets a new link."""
    await ways.send(b"one")
    ways.pipes[0].abort()
    with pytest.raises(Unreachable):
        await ways.send(b"two")
    await ways.send(b"three")
    assert ways.b.box.headers == [b"one", b"three"]
