"""An observer reads the run's parameters, and no peer notices more of it than its questions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import messages as m
from p2p_diloco.errors import GaveUpWaiting, Refused
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import observing
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, exchange, stop


class MemoryObserver(MemoryPeer):
    """A node with the role observer."""

    work = staticmethod(observing.follow)

    def __init__(self, network: MemoryNetwork, name: str = "o", **options: Any) -> None:
        super().__init__(network, name, role="observer", **options)

    async def look(self) -> dict[str, Any]:
        """Enter, and what the first state is."""
        await self.start()
        await self.hear("run")
        return await self.hear("ready")

    async def refresh(self) -> dict[str, Any]:
        return await self.ask("refresh", "refreshed")


async def founded(network: MemoryNetwork, **more: Any) -> list[MemoryPeer]:
    """Two peers that have made one round."""
    a, b = (MemoryPeer(network, name, {**QUICK, **more}) for name in "ab")
    await a.enter(theta=5.0)
    await b.enter()
    await asyncio.gather(a.exchange(1.0), b.exchange(3.0))
    return [a, b]


async def digest_of(peer: MemoryPeer) -> str:
    return str((await peer.ask("ask", "told"))["digest"])


@awaited
async def test_an_observer_reads_what_the_peers_hold_and_is_no_member() -> None:
    """Its parameters, epoch and digest are a peer's, also after a further round; without news it says so. It is in no
    roster, no record names it, nothing is sent to it that it did not ask for, and rounds go on after it has gone
    without a word."""
    network = MemoryNetwork()
    a, b = await founded(network)
    observer, refused = MemoryObserver(network), list[str]()
    observer.inbox.refusals.count = lambda peer, why: refused.append(why)  # type: ignore[method-assign]
    first = await observer.look()
    assert (first["epoch"], first["digest"]) == (1, await digest_of(a))
    assert observer.memory.theta.tolist() == a.memory.theta.tolist() != [0.0] * 4
    assert not (await observer.refresh())["came"]
    await exchange(a, b)
    second = await observer.refresh()
    assert second["came"]
    assert (second["epoch"], second["digest"]) == (2, await digest_of(b))
    assert observer.memory.theta.tolist() == b.memory.theta.tolist()
    await asyncio.sleep(4 * QUICK["heartbeat_interval"])
    assert not any("o" in peer.node.replica.roster.peers for peer in (a, b))
    assert not refused
    assert not any("o" in subkey.split("/") for records in network.records.values() for subkey, _ in records)
    observer.task.cancel()
    await observer.transport.close()
    await exchange(a, b)
    assert a.memory.epoch == 3


@awaited
async def test_an_ended_run_is_read_from_a_peer_that_is_still_there() -> None:
    """The observer knows that this state is the last one, and needs no peer any more to say that nothing is newer."""
    network = MemoryNetwork()
    a, b = await founded(network, stop_after_epochs=1)
    observer = MemoryObserver(network)
    assert (await observer.look())["finished"]
    await stop(a, b)
    assert not (await observer.refresh())["came"]


@awaited
async def test_an_end_that_no_peer_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all peers of an ended run are gone, the error names its last epoch and the way over a checkpoint."""
    monkeypatch.setattr(observing, "END_S", 0.1)
    network = MemoryNetwork()
    a, b = await founded(network, stop_after_epochs=1)
    await until(lambda: network.records.get("r/end"))
    await stop(a, b)
    observer = MemoryObserver(network, wait_timeout=20.0, sizes=(4,))
    await observer.start()
    with pytest.raises(Refused, match=r"has ended at epoch 1 .*--checkpoint"):
        await observer.hear("ready")


@awaited
async def test_a_run_that_no_peer_holds_is_waited_for_no_longer_than_allowed() -> None:
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network, wait_timeout=0.5)
    await observer.look()
    before = observer.memory.theta.tolist()
    await stop(a, b)
    answer = await observer.refresh()
    assert answer["error"]["error"] == GaveUpWaiting.__name__
    assert "no complete state of the run r came" in answer["error"]["wrong"]
    assert observer.memory.theta.tolist() == before  # what it has read stays


async def behind(network: MemoryNetwork) -> tuple[MemoryPeer, MemoryPeer, MemoryObserver, list[str]]:
    """Two peers that have made a round more than an observer has seen, which asks them in this order."""
    a, b = await founded(network)
    observer = MemoryObserver(network)
    await observer.look()
    await exchange(a, b)
    while len(donors := await observer.inbox.handler._donors()) < 2:  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
    return a, b, observer, donors


@awaited
async def test_slices_without_the_digests_of_their_head_are_not_taken() -> None:
    """They come from another donor then. What nobody asked for is refused."""
    a, b, observer, donors = await behind(network := MemoryNetwork())
    liar = {"a": a, "b": b}[donors[0]].node
    await until(lambda: bool(liar.work.known_digests(0)))  # a thread computes them
    part = liar.work.part
    liar.work.part = lambda *of: replace(made := part(*of), payload=memoryview(bytes(4) + bytes(made.payload)[4:]))  # type: ignore[method-assign]
    answer = await observer.refresh()
    assert (answer["epoch"], answer["digest"]) == (2, await digest_of(a))
    assert observer.memory.theta.tolist() == a.memory.theta.tolist()
    held = a.node.replica.logs[0].held
    for message, why in ((m.Head(0, held), "did not ask"), (m.Held(0, held.version), "only observes")):
        with pytest.raises(Refusal, match=why):
            await network.peers["a"].send("o", a.node._packed(message)[0])


@awaited
async def test_another_peer_is_asked_when_one_is_gone() -> None:
    a, _, observer, donors = await behind(network := MemoryNetwork())
    digest, theta = await digest_of(a), a.memory.theta.tolist()
    network.kill(donors[0])
    answer = await observer.refresh()
    assert (answer["epoch"], answer["digest"], observer.memory.theta.tolist()) == (2, digest, theta)
