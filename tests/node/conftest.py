"""Nodes within one loop, over the in-memory swarm, for the tests of this folder."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.node import beginning, joining, participation, shared, slice_work
from p2p_diloco.node.channel import Message, NodeEnd, TrainerEnd
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.node import Node
from p2p_diloco.node.participation import take_part
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.run_record import Founding, RunRecord
from p2p_diloco.node.shared import Setup, SharedMemory
from p2p_diloco.node.swarm import Swarm
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors.card import card_of
from p2p_diloco.tensors.layout import ParamSpec, specs_of
from tests.net.memory import MemoryNetwork, MemoryTransport

QUICK = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.5, "codec": "fp32", "sync_every": 1, "outer_lr": 1.0}
"""Settings of a quick run."""


def specs(*sizes: int) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(f"p{index}", (size,), "float32") for index, size in enumerate(sizes))


@pytest.fixture
def memory_is_always_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are compared with their digests each time, however short the rounds are."""
    monkeypatch.setattr(slice_work, "LOOK_AGAIN_S", 0.0)


@pytest.fixture(autouse=True)
def records_show_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the in-memory swarm stores is there for all at once, unlike what a DHT does: nobody looks for it as seldom,
    or waits for another founder as long."""
    monkeypatch.setattr(joining, "FOUNDERS_MEET_S", 0.05)
    for module in (joining, beginning, participation):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(beginning, "SEEN_EVERY_S", 0.02)


class MemoryPeer:
    """A node over the in-memory swarm, and the test in the trainer's place. `said` holds what the node has said."""

    work = staticmethod(take_part)

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        config: dict[str, Any] | None = None,
        sizes: tuple[int, ...] | None = (4,),
        model: nn.Module | None = None,
        **local: Any,
    ) -> None:
        """`sizes`: those of parameters without a model; None: an aggregator. `model`: its parameters and buffers."""
        role = {"role": "aggregator"} if sizes is None else {}
        own = None if sizes is None else specs(*sizes)
        peer = PeerConfig(**{"run_id": "r", "name": name, **role, **local})
        self.setup = Setup(RunConfig(**(config or {})), peer, own)
        if model is not None:
            card = card_of(model).pack()
            self.setup = replace(self.setup, specs=specs_of(model), buffers=buffers.specs_of(model), card=card)
        fd = shared.create(self.setup.numel)
        self.memory = SharedMemory(fd, self.setup.numel)
        os.close(fd)
        self.inbox = Inbox()
        self.transport: MemoryTransport = network.join(name, self.inbox)
        self.access: Access | None = None
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.said: list[Message] = []
        self._n = 0

    async def start(self) -> None:
        """Begin; ends in `stop`, or with the test."""
        ours, theirs = socket.socketpair()
        self.trainer, self._channel = TrainerEnd(ours), await NodeEnd.over(theirs)
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            await self.work(self.setup, self._channel, self.messages, self.memory, self.swarm())
        except asyncio.CancelledError:  # by `stop`, or at the end of the test
            await self._close()
            raise

    async def _close(self) -> None:
        await self.transport.close()
        await self._channel.close()
        self.trainer.close()

    def swarm(self) -> Swarm:
        return Swarm(self.transport, self.inbox, self.access, asyncio.get_running_loop().create_future())

    async def hear(self, kind: str, timeout_s: float = 60.0) -> Message:
        """The next message of a kind. What the node raised, if it has ended."""
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < give_up_at:
            if (message := self._received()) is not None:
                self.said.append(message)
                if message["kind"] == kind:
                    return message
            elif self.task.done():
                self.task.result()
            await asyncio.sleep(0.005)
        raise AssertionError(f"{self.setup.local.name} heard no {kind}, but {self.said[-5:]}")

    def _received(self) -> Message | None:
        """What has come; the loop that the nodes share is not to wait for more."""
        there = self.trainer.receive(0.0)
        if there is None and select.select([self.trainer._socket], [], [], 0.0)[0]:
            return self.trainer.receive(0.001)
        return there

    @property
    def node(self) -> Node:
        node: Node = self.inbox.handler._node  # type: ignore[attr-defined]
        return node

    @property
    def told_run(self) -> Message:
        """What the node has said of the run."""
        return next(message for message in self.said if message["kind"] == "run")

    def tell(self, kind: str, **values: Any) -> None:
        self.messages.put_nowait({"kind": kind, **values})

    async def ask(self, kind: str, answer: str, **values: Any) -> Message:
        self._n += 1
        self.tell(kind, n=self._n, **values)
        message = await self.hear(answer)
        assert message["n"] == self._n
        return message

    async def enter(self, theta: float = 0.0) -> None:
        """Start, offer θ₀, wait until ready and load."""
        await self.start()
        await self.hear("run")
        if self.setup.specs is not None:
            self.memory.theta.fill_(theta)
            self.tell("theta")
        await self.hear("ready")

    async def merge(self, *, measures: bool = False) -> Message:
        load = await self.ask("merge", "load", measures=measures, data=False)
        self.tell("have read", loaded=[*(fragment for fragment, _ in load["outcomes"]), *load["lost"]])
        return load

    async def exchange(self, delta: float, weight: float = 1.0, *, stands: bool = True) -> Message:
        """Contribute one value throughout, and wait for the end of the exchange."""
        self.memory.steps += 1
        if (due := (await self.merge(measures=True))["due"]) is None:
            return {"sent": False}  # the run is over, and a trainer sends no more
        self.memory.delta.fill_(delta)
        release = await self.contribute(due, weight=weight, stands=stands)
        await self.merge()
        return release

    async def contribute(self, fragment: int, **more: Any) -> Message:
        """Contribute what is in `memory.delta`, and wait for the end of the exchange."""
        usual = {"weight": 1.0, "samples": 1, "stands": True, "every": 1, "uses": []}
        return await self.ask("contribute", "release", fragment=fragment, **{**usual, **more})

    async def stop(self) -> None:
        """Leave the run. At the end of a test all peers do that."""
        if self.task.done():
            await self._close()
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=10.0)


async def entered(
    names: str, config: Mapping[str, Any] = QUICK, network: MemoryNetwork | None = None, **more: Any
) -> list[MemoryPeer]:
    """Peers with names of one letter that have entered one run, one after the other."""
    network = network or MemoryNetwork()
    peers = [MemoryPeer(network, name, dict(config), **more) for name in names]
    for peer in peers:
        await peer.enter()
    return peers


async def exchange(*peers: MemoryPeer, delta: float = 1.0) -> None:
    """An exchange of all these peers."""
    await asyncio.gather(*(peer.exchange(delta) for peer in peers))


async def stop(*peers: MemoryPeer) -> None:
    for peer in peers:
        await peer.stop()


def founding_in(network: MemoryNetwork) -> Founding:
    """The founding of the run "r", as its record has it."""
    ((value, _),) = network.records["r/config"].values()
    return Founding.of("r", RunRecord.unpack(value))


def without_a_dht(peer: str, error: Exception) -> tuple[MemoryTransport, list[object]]:
    """The transport of a peer whose DHT fails with this error, and the calls that failed so far."""
    transport, calls = MemoryNetwork().join(peer, Inbox()), list[object]()

    async def fail(*given: object, **_: object) -> Any:
        calls.append(given)
        raise error

    transport.store = transport.fetch = transport.introduce = fail  # type: ignore[method-assign]
    return transport, calls
