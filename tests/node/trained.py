"""A peer with a model, within one loop: a node over the in-memory swarm, and the trainer's own merges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from p2p_diloco.config import RunConfig
from p2p_diloco.peer.hook import outcomes_in
from p2p_diloco.peer.local import LocalModel, with_global_values
from p2p_diloco.peer.progress import LocalProgress
from p2p_diloco.tensors.codec import written_in
from p2p_diloco.tensors.layout import Layout


class Trained:
    """A node, and a model that `step` trains by one step."""

    def __init__(self, peer: Any, model: nn.Module, step: Callable[[], None]) -> None:
        """`peer`: a MemoryPeer of this model."""
        self.peer, self.model, self._step = peer, model, step
        self.local: LocalModel
        self.progress: LocalProgress

    async def enter(self) -> None:
        peer, memory = self.peer, self.peer.memory
        await peer.start()
        run = await peer.hear("run")
        layout, config = Layout.from_wire(run["layout"]), RunConfig.from_wire(run["config"])
        delta = memory.delta_in(written_in(config.codec, "nearest"))
        self.local = LocalModel(
            self.model, layout, memory.theta, memory.base, delta, values=memory.delta, share=config.local_share
        )
        self.progress, self.layout = LocalProgress(config, layout), layout
        self.local.write_theta()
        peer.tell("theta")
        await peer.hear("ready")
        await self.merge()

    async def merge(self, landed: int | None = None, *, sends: bool = False) -> Any:
        load, memory = await self.peer.ask("merge", "load", measures=sends, data=False), self.peer.memory
        bases = {name: load[name] for name in ("due", "gone", "lost", "ended")}
        trained = memory.steps, memory.samples
        blends = self.progress.merge(outcomes_in(load["outcomes"]), trained, landed=landed, **bases)
        by_slice = {place.index: blends[place.fragment] for place in self.layout.slices if place.fragment in blends}
        self.local.merge(by_slice, load["kept"])
        if sends:
            due = [place.index for place in self.layout.slices_of(load["due"])]
            self.local.write_delta(due, set(load["kept"]) - by_slice.keys())
        self.peer.tell("have read", loaded=list(blends))
        return load

    async def exchange(self) -> None:
        """Make a step, send the fragment that is due, and merge the result."""
        self._step()
        self.peer.memory.steps += 1
        load = await self.merge(sends=True)
        weight, _ = self.progress.weigh(load["due"])
        self.progress.send(load["due"], 1)
        assert (await self.peer.contribute(load["due"], weight=weight))["sent"]
        await self.merge(load["due"])

    async def state(self) -> dict[str, Tensor]:
        """Its global state_dict."""
        answer = await self.peer.ask("read", "readable")
        state = with_global_values(self.model, self.local.global_values(answer["kept"]))
        self.peer.tell("have read", loaded=[])
        return state
