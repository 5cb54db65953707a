"""An observer reads the run's parameters, and no peer notices more of it than its questions."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

import pytest

from p2p_diloco.core.messages import Fetch, State, Versions
from p2p_diloco.errors import GaveUpWaiting, ModelMismatch, Refused
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node import observing, wire
from p2p_diloco.node.channel import NodeEnd, TrainerEnd
from p2p_diloco.node.entry import follow
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited
from tests.node.conftest import QUICK, MemoryPeer


class MemoryObserver(MemoryPeer):
    """A node with the role observer. `loses_the_first`: its first request for states does not arrive."""

    loses_the_first = False

    def __init__(self, network: MemoryNetwork, name: str = "o", **options: Any) -> None:
        super().__init__(network, name, role="observer", **options)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        self.trainer, self._channel = TrainerEnd(ours), await NodeEnd.over(theirs)
        work = follow(self.setup, self._channel, self.messages, self.memory, self.transport, self.inbox)
        self.task = asyncio.create_task(work)

    async def look(self) -> dict[str, Any]:
        """Enter, and what the first state is."""
        await self.start()
        await self.hear("run")
        return await self.hear("ready")

    async def refresh(self) -> dict[str, Any]:
        return await self.ask("refresh", "refreshed")


async def founded(network: MemoryNetwork, **more: Any) -> tuple[MemoryPeer, MemoryPeer]:
    """Two peers that have made one round."""
    a, b = (MemoryPeer(network, name, {**QUICK, **more}) for name in "ab")
    await a.enter(theta=5.0)
    await b.enter()
    await asyncio.gather(a.exchange(1.0), b.exchange(3.0))
    return a, b


async def digest_of(peer: MemoryPeer) -> str:
    return str((await peer.ask("ask", "told"))["digest"])


def roster_of(peer: MemoryPeer) -> Any:
    return peer.inbox.handler._replica.roster


@awaited
async def test_an_observer_reads_what_the_peers_hold() -> None:
    """Its parameters, epoch and digest are a peer's, also after a further round; without news it says so."""
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network)
    first = await observer.look()
    assert (first["epoch"], first["digest"]) == (1, await digest_of(a))
    assert observer.memory.theta.tolist() == a.memory.theta.tolist() != [0.0] * 4
    assert not (await observer.refresh())["came"]
    await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    second = await observer.refresh()
    assert second["came"]
    assert (second["epoch"], second["digest"]) == (2, await digest_of(b))
    assert observer.memory.theta.tolist() == b.memory.theta.tolist()
    for peer in (observer, a, b):
        await peer.stop()


@awaited
async def test_an_observer_is_no_member() -> None:
    """It is in no roster, no record names it, nothing is sent to it that it did not ask for, and rounds go on after it
    has gone without a word."""
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network)
    refused: list[str] = []
    observer.inbox.refusals.count = lambda peer, why: refused.append(why)  # type: ignore[method-assign]
    await observer.look()
    await asyncio.sleep(4 * QUICK["heartbeat_interval"])
    assert [roster_of(peer).known("o") for peer in (a, b)] == [False, False]
    assert not refused
    assert not any("o" in subkey.split("/") for records in network.records.values() for subkey, _ in records)
    observer.task.cancel()
    await observer.transport.close()
    await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    assert a.memory.epoch == 2
    for peer in (a, b):
        await peer.stop()


@awaited
async def test_an_ended_run_is_read_from_a_peer_that_is_still_there() -> None:
    """The observer knows that this state is the last one, and needs no peer any more to say that nothing is newer."""
    network = MemoryNetwork()
    a, b = await founded(network, stop_after_epochs=1)
    observer = MemoryObserver(network)
    assert (await observer.look())["finished"]
    await a.stop()
    await b.stop()
    assert not (await observer.refresh())["came"]
    await observer.stop()


@awaited
async def test_an_end_that_no_peer_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all peers of an ended run are gone, the error names its last epoch and the way over a checkpoint."""
    monkeypatch.setattr(observing, "END_S", 0.1)
    network = MemoryNetwork()
    a, b = await founded(network, stop_after_epochs=1)
    while not network.records.get("r/end"):
        await asyncio.sleep(0.01)
    await a.stop()
    await b.stop()
    observer = MemoryObserver(network, wait_timeout=20.0, sizes=(4,))
    await observer.start()
    with pytest.raises(Refused, match=r"has ended at epoch 1 .*--checkpoint"):
        await observer.hear("ready")
    await observer.stop()


@awaited
async def test_a_run_that_no_peer_holds_is_waited_for_no_longer_than_allowed() -> None:
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network, wait_timeout=0.5)
    await observer.look()
    before = observer.memory.theta.tolist()
    await a.stop()
    await b.stop()
    answer = await observer.refresh()
    assert answer["error"]["error"] == GaveUpWaiting.__name__
    assert "no complete state of the run r came" in answer["error"]["wrong"]
    assert observer.memory.theta.tolist() == before  # what it has read stays
    await observer.stop()


@awaited
async def test_another_model_is_refused() -> None:
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network, sizes=(5,))
    await observer.start()
    with pytest.raises(ModelMismatch, match="p0: 4 in the run, 5 here"):
        await observer.hear("ready")
    for peer in (observer, a, b):
        await peer.stop()


@awaited
async def test_a_state_is_complete_only_when_a_fragments_shards_are_at_one_epoch() -> None:
    """While commits are on their way, the observer asks again instead of reading half of a round."""
    network = MemoryNetwork()
    a, b = await founded(network, shard_elements=2)
    observer = MemoryObserver(network)
    await observer.look()
    await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    reader = observer.inbox.handler
    assert isinstance(reader, observing.Observer)
    asked: list[Fetch] = []
    sends, take, old = network.peers["o"].send, reader.take, reader.versions[0]

    async def send(peer: str, header: bytes, *rest: Any, **more: Any) -> None:
        request = wire.unpack(header, reader.run.token)
        assert isinstance(request, Fetch)
        asked.append(request)
        await sends(peer, header, *rest, **more)

    async def taken(sender: str, message: wire.AnyMessage) -> None:
        if len(asked) == 1 and isinstance(message, Versions):  # the first shard's commit comes later there
            message = dataclasses.replace(message, versions=(old, *message.versions[1:]))
        await take(sender, message)

    network.peers["o"].send, reader.take = send, taken  # type: ignore[method-assign]
    answer = await observer.refresh()
    assert answer["epoch"] == 2
    assert reader.versions[0] != old
    assert [request.shards for request in asked] == [(), (1,), (), (0,)]
    for peer in (observer, a, b):
        await peer.stop()


def asks(observer: MemoryObserver, network: MemoryNetwork) -> list[str]:
    """The peers that the observer asks for states from now on."""
    asked: list[str] = []
    sends = network.peers["o"].send

    async def send(peer: str, header: bytes, *rest: Any, **more: Any) -> None:
        request = wire.unpack(header, observer.inbox.handler.run.token)  # type: ignore[attr-defined]
        assert isinstance(request, Fetch)
        if request.shards:
            asked.append(peer)
            if len(asked) == 1 and observer.loses_the_first:
                raise Unreachable("gone")
        await sends(peer, header, *rest, **more)

    network.peers["o"].send = send  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("fault", ["gone", "lies"])
@awaited
async def test_another_peer_is_asked_when_one_does_not_give_its_state(fault: str) -> None:
    """Because it is gone, or because its tensors do not have the digest that it names."""
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network)
    await observer.look()
    await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    while len(await observer.inbox.handler._donors()) < 2:  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
    observer.loses_the_first = fault == "gone"
    asked = asks(observer, network)
    if fault == "lies":
        first = {"a": a, "b": b}[(await observer.inbox.handler._donors())[0]]  # type: ignore[attr-defined]
        work = first.inbox.handler._work  # type: ignore[attr-defined]
        true = work.export
        work.export = lambda shard: memoryview(bytes(4) + bytes(true(shard))[4:])
    answer = await observer.refresh()
    assert (answer["epoch"], answer["digest"]) == (2, await digest_of(a))
    assert sorted(asked) == ["a", "b"]
    assert observer.memory.theta.tolist() == a.memory.theta.tolist()
    for peer in (observer, a, b):
        await peer.stop()


@awaited
async def test_what_was_not_asked_for_is_refused() -> None:
    """A state that another peer sends by itself changes nothing."""
    network = MemoryNetwork()
    a, b = await founded(network)
    observer = MemoryObserver(network)
    await observer.look()
    replica = a.inbox.handler._replica
    state = replica.state(0)
    assert isinstance(state, State)
    payload = memoryview(bytes(a.inbox.handler._work.export(0)))
    for sender in ("a", "b"):
        with pytest.raises(Refusal, match="did not ask"):
            await network.peers[sender].send("o", wire.pack(state, a.inbox.handler._token), payload)
    for peer in (observer, a, b):
        await peer.stop()


@awaited
async def test_a_run_in_asynchronous_mode_is_read_as_it_is() -> None:
    """Its shards need not be at one epoch; the parameters are those that the peer holds."""
    network = MemoryNetwork()
    a = MemoryPeer(network, "a", {**QUICK, "mode": "async", "shard_elements": 2})
    await a.enter(theta=5.0)
    await a.exchange(1.0)
    observer = MemoryObserver(network)
    first = await observer.look()
    assert first["epoch"] == 1
    assert observer.memory.theta.tolist() == a.memory.theta.tolist() != [5.0] * 4
    for peer in (observer, a):
        await peer.stop()
