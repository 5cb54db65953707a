"""Nodes within this process over real libp2p, with the test in their trainers' place, and one loop for all of them.

Law: what a node does here is what it does in its own process; only the trainer and the process are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from p2p_diloco.config import RunConfig
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.node import records
from p2p_diloco.node.channel import Message
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.run import Run
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.node.swarm import LIMITS
from p2p_diloco.tensors.layout import Layout
from tests.net.members import KEY, invitation
from tests.net.swarm import join
from tests.node.conftest import MemoryPeer, specs

T = TypeVar("T")
RUN_ID = "r"
NUMEL, SLICES = 64, 4
SETTINGS: dict[str, Any] = {
    "codec": "fp32", "sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "slice_elements": NUMEL // SLICES,
    "heartbeat_interval": 0.25, "heartbeat_timeout": 2.0, "round_timeout": 1.0,
}  # fmt: skip
ROW_S = 100.0
"""The longest time that a row may take on a machine that does much else."""
STEP_S = 0.05
"""Between two exchanges of a node, where a row says nothing else."""
PUBLISH_EVERY_S = 0.5
TOLD_S = 60.0


class _Later:
    """The place of a network for nodes whose transport is opened later."""

    def join(self, name: str, inbox: Any) -> Any:
        return None


class RealNode(MemoryPeer):
    """A node of a private run over a real transport. It trains by adding one number to each parameter."""

    def __init__(
        self, name: str, invited: Invitation, config: dict[str, Any], *, founds: bool = False, **local: Any
    ) -> None:
        super().__init__(_Later(), name, config, (NUMEL,), **local)  # type: ignore[arg-type]
        self.invited, self.founds = invited, founds
        self.digests: dict[int, str] = {}
        """Of the whole model, by epoch, as this node has merged them."""
        self.delta, self.step_s = 1.0, STEP_S
        self._training: asyncio.Task[None] | None = None

    async def begin(self, initial_peers: list[str]) -> None:
        """Open the transport, join or found the run, and train from then on."""
        self.transport = await join(self.inbox, run_id=RUN_ID, initial_peers=initial_peers, limits=LIMITS,
                                    invitation=self.invited)  # fmt: skip
        self.inbox.knows(self.transport)  # type: ignore[arg-type]
        self.access = Access(self.transport.membership, KEY if self.founds else None)  # type: ignore[attr-defined]
        await self.enter()
        self._training = asyncio.create_task(self._train())

    async def merge(self, *, measures: bool = False) -> Message:
        """As `MemoryPeer.merge`; remembers what was merged."""
        load = await super().merge(measures=measures)
        self.digests.setdefault(load["epoch"], load["digest"])
        return load

    async def _train(self) -> None:
        while True:
            await self.exchange(self.delta)
            await asyncio.sleep(self.step_s)

    @property
    def id(self) -> str:
        return self.transport.peer_id

    @property
    def epoch(self) -> int:
        """The newest epoch that it has merged."""
        return max(self.digests, default=-1)

    def failed(self) -> BaseException | None:
        """What ended its training or its node; None: both go on."""
        for task in (self._training, self.task):
            if task is not None and task.done():
                return task.exception() or AssertionError(f"{self.setup.local.name} has ended")
        return None

    async def end(self) -> None:
        """Stop training and leave."""
        if self._training is not None:
            self._training.cancel()
            await asyncio.wait({self._training})
        if hasattr(self, "task"):
            await self.stop()


class Field:
    """A private run of honest nodes that train, in a loop of its own thread. Tests call `do`."""

    def __init__(self, names: str = "abc", **config: Any) -> None:
        self.set(len(names), config)
        self.nodes = [RealNode(name, invitation(name=name), self.config, founds=not index)
                      for index, name in enumerate(names)]  # fmt: skip
        self._published_every_s, records.PUBLISH_EVERY_S = records.PUBLISH_EVERY_S, PUBLISH_EVERY_S
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.do(self._begin())
        except BaseException:
            self.end()
            raise

    def set(self, peers: int, config: dict[str, Any]) -> None:
        """Set the run's settings and layout."""
        self.config = {**SETTINGS, "start_peers": peers, **config}
        self.layout = Layout.build(specs(NUMEL), 1, "contiguous", self.config["slice_elements"])

    def do(self, row: Coroutine[Any, Any, T]) -> T:
        """Run a row in the nodes' loop, in bounded time."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(row, ROW_S), self._loop).result(ROW_S + 10.0)

    @property
    def addresses(self) -> list[str]:
        return list(self.nodes[0].transport.addresses())

    @property
    def epoch(self) -> int:
        """The lowest epoch of the honest nodes."""
        return min(node.epoch for node in self.nodes)

    def run(self, salt: bytes) -> Run:
        """The run, as a member knows it."""
        return Run(RUN_ID, RunConfig(**self.config), self.layout, salt)

    async def _begin(self) -> None:
        first, *others = self.nodes
        await first.begin([])
        await asyncio.gather(*(node.begin(self.addresses) for node in others))
        await self.goes_on()

    async def goes_on(self, epochs: int = 3, within_s: float = 60.0) -> float:
        """Wait until every node has made this many further epochs; returns the seconds. All digests are equal."""
        began, goal = time.monotonic(), max(node.epoch for node in self.nodes) + epochs
        await self.until(lambda: self.epoch >= goal, within_s, f"epoch {goal} at all nodes")
        self.agrees()
        return time.monotonic() - began

    async def moves(self, epochs: int) -> float:
        """Wait until every node has made this many further epochs; returns the mean change of θ in each of them."""
        node = self.nodes[0]
        epoch, theta = node.epoch, float(node.memory.theta.mean())
        await self.goes_on(epochs)
        return (float(node.memory.theta.mean()) - theta) / (node.epoch - epoch)

    def agrees(self) -> None:
        """Assert that all nodes have one digest at each epoch that two of them merged."""
        for epoch in {epoch for node in self.nodes for epoch in node.digests}:
            digests = {node.digests[epoch] for node in self.nodes if epoch in node.digests}
            assert len(digests) == 1, f"epoch {epoch} has the digests {digests}"

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for a condition; an AssertionError if it doesn't come, or if a node fails."""
        deadline = time.monotonic() + within_s
        while not condition():
            for node in self.nodes:
                if (error := node.failed()) is not None:
                    raise AssertionError(f"node {node.setup.local.name} failed") from error
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
            await asyncio.sleep(0.02)

    async def statuses(self) -> dict[str, PeerStatus]:
        """What `p2p-diloco status` reads of all peers."""
        return await records.read_peers(self.nodes[0].transport, RUN_ID)

    async def tells(self, who: str, why: str, nodes: int = 1) -> None:
        """Wait until at least this many honest nodes say in their status that they refused a message of a peer of this
        name, the last one for this reason."""
        give_up_at = time.monotonic() + TOLD_S
        while True:
            told = [status.refused for status in (await self.statuses()).values()]
            found = [one for refused in told for one in refused if one.peer.startswith(f"{who} (") and why in one.why]
            if len(found) >= nodes:
                return
            assert time.monotonic() < give_up_at, f"no status tells of {who} that {why!r}: {told}"
            await asyncio.sleep(0.2)

    def end(self) -> None:
        """End all nodes and the loop."""

        async def end() -> None:
            await asyncio.gather(*(node.end() for node in reversed(self.nodes)), return_exceptions=True)
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=ROW_S)

        # not by `do`, whose task waits for this one: it would be among those that are left, and end this one early
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(2 * ROW_S)
        records.PUBLISH_EVERY_S = self._published_every_s
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20.0)
