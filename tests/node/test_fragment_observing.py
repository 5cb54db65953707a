"""An observer of a run on the log of fragments."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from p2p_diloco.fragments import messages as m
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.node import Node
from p2p_diloco.node.which_core import FRAGMENTS, VARIABLE
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited
from tests.node.conftest import QUICK, MemoryPeer
from tests.node.test_observing import MemoryObserver, digest_of, founded


@pytest.fixture(autouse=True)
def on_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, FRAGMENTS)


def node_of(peer: MemoryPeer) -> Node:
    node: Node = peer.inbox.handler._node  # type: ignore[attr-defined]
    return node


@awaited
async def test_an_observer_reads_fragments_and_is_no_peer() -> None:
    """Two fragments of several slices; after another round, only what has changed comes."""
    network = MemoryNetwork()
    config = {**QUICK, "num_fragments": 2, "sync_every": 2, "shard_elements": 1}
    a, b = (MemoryPeer(network, name, config, sizes=(3, 2)) for name in "ab")
    for peer in (a, b):
        await peer.enter(theta=5.0)
    await asyncio.gather(a.exchange(1.0), b.exchange(3.0))
    observer = MemoryObserver(network, sizes=(3, 2))
    first = await observer.look()
    assert (first["epoch"], first["digest"]) == (0, await digest_of(a))
    assert observer.memory.theta.tolist() == a.memory.theta.tolist()
    await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    again = await observer.refresh()
    assert (again["came"], again["epoch"], again["digest"]) == (True, 1, await digest_of(a))
    assert observer.memory.theta.tolist() == a.memory.theta.tolist()
    assert "o" not in node_of(a).replica.roster.peers
    for peer in (observer, a, b):
        await peer.stop()


@awaited
async def test_slices_without_the_digests_of_their_head_are_not_taken() -> None:
    """They come from another donor then. What nobody asked for is refused."""
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network)
    await observer.look()
    await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    while len(donors := await observer.inbox.handler._donors()) < 2:  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
    liar = node_of({"a": a, "b": b}[donors[0]])
    part = liar.work.part
    liar.work.part = lambda *of: replace(made := part(*of), payload=memoryview(bytes(4) + bytes(made.payload)[4:]))  # type: ignore[method-assign]
    answer = await observer.refresh()
    assert (answer["epoch"], answer["digest"]) == (2, await digest_of(a))
    assert observer.memory.theta.tolist() == a.memory.theta.tolist()
    held = node_of(a).replica.logs[0].held
    for message, why in ((m.Head(0, held), "did not ask"), (m.Held(0, held.version), "only observes")):
        with pytest.raises(Refusal, match=why):
            await network.peers["a"].send("o", node_of(a)._packed(message)[0])
    for peer in (observer, a, b):
        await peer.stop()
