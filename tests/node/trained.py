"""A peer with a model, within one loop: a node over the in-memory swarm, and the trainer's own merges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from p2p_diloco.node.local_progress import Take
from p2p_diloco.peer.local import LocalModel, with_global_values
from p2p_diloco.tensors.codec import written_in
from p2p_diloco.tensors.layout import Layout


class Trained:
    """A node, and a model that `step` trains by one step."""

    def __init__(self, peer: Any, model: nn.Module, step: Callable[[], None]) -> None:
        """`peer`: a MemoryPeer of this model."""
        self.peer, self.model, self._step = peer, model, step
        self.local: LocalModel

    async def enter(self) -> None:
        peer, memory = self.peer, self.peer.memory
        await peer.start()
        run = await peer.hear("run")
        layout, codec = Layout.from_wire(run["layout"]), run["config"]["codec"]
        delta = memory.delta_in(written_in(codec, "nearest"))
        share = peer.setup.asked.local_share
        self.local = LocalModel(self.model, layout, memory.theta, memory.base, delta, share, values=memory.delta)
        self.local.write_theta()
        peer.tell("theta")
        await peer.hear("ready")
        await self.merge()

    async def merge(self, *, sends: bool = False) -> Any:
        load = await self.peer.ask("merge", "load", measures=sends, afresh=False, data={})
        takes = {shard: Take(take) for shard, take in load["takes"]}
        self.local.merge(takes, load["kept"])
        if sends:
            self.local.write_delta(load["due"], set(load["kept"]) - takes.keys())
        self.peer.tell("have read", loaded=list(takes), torn=False)
        return load

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
            self.peer.memory.steps += 1

    async def exchange(self, steps: int = 1, *, later: int = 0) -> None:
        """Train and send the fragment that is due. Train `later` more steps, then wait for the result and merge it."""
        self.train(steps)
        load = await self.merge(sends=True)
        asked = {"shards": load["due"], "weight": load["weight"], "samples": steps, "stands": not later, "every": 1}
        self.peer.tell("contribute", n=1000, **asked)
        self.train(later)
        assert (await self.peer.hear("release"))["sent"]
        await self.merge()

    async def state(self) -> dict[str, Tensor]:
        """Its global state_dict."""
        answer = await self.peer.ask("read", "readable")
        state = with_global_values(self.model, self.local.global_values(answer["kept"]))
        self.peer.tell("have read", loaded=[], torn=False)
        return state
