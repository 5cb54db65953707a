"""A hook and its model beside a node that a script plays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from p2p_diloco.config import RunConfig
from p2p_diloco.core.carry import Outcome
from p2p_diloco.node.shared import SharedMemory, create
from p2p_diloco.node.slice_work import Bases
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.tensors.layout import Layout, specs_of

COUNTED, KEPT = Outcome(counted=True), Outcome()


class ScriptedNode:
    """A node that commits at once what is contributed, alone: η=`lr`, μ=0. `releases` scripts what becomes of each."""

    lr = 1.0

    def __init__(self, numel: int) -> None:
        fd = create(numel)
        self.memory = SharedMemory(fd, numel)
        os.close(fd)
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.releases: list[bool | None] = []
        self.stood: dict[str, float] = {}
        self.hidden = {"transfer": 0.2, "group": 0.3}
        self.asynchronous: dict[str, int] = {}
        self.workers, self.counted = 2, 0
        self.measures: list[bool] = []
        self.answer_s, self.waited_s = 60.0, list[float]()
        self.say: Callable[[str], None] = lambda text: None
        self.fate = COUNTED
        self.layout: Layout
        self.bases: Bases
        self.epochs: list[int] = []
        self.every = 1  # H, of the state or this peer's own
        self.next_every = 0  # H from the next release on; 0: the same
        self.steps_before = 0  # inner steps of the run beyond those that epochs of the present H have
        self.fresh: dict[int, Outcome] = {}
        self.tables: list[Any] | None = None
        self.again = False

    def begin(self, config: RunConfig, layout: Layout) -> None:
        self.layout, self.epochs, self.every = layout, [0] * len(layout.fragments), config.sync_every
        self.bases = Bases(layout, self.memory.theta, self.memory.base)

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, kind: str, **values: Any) -> None:
        self.log.append((kind, values))
        if kind == "have read":
            self.bases.loaded([place.index for place in self.layout.slices if place.fragment in values["loaded"]])

    def overwrite(self, theta: Any) -> None:
        """Have something else come as θ."""
        for place in self.layout.slices:
            self.bases.keep(place.index)
        self.memory.theta.copy_(torch.as_tensor(theta))

    def ask(self, kind: str, answer: str, *, measures: bool = False, data: bool = False) -> dict[str, Any]:
        if (kind, answer) == ("read", "readable"):
            self.log.append((kind, {}))
            return {"kind": answer, "kept": sorted(self.bases.kept)}
        assert (kind, answer) == ("merge", "load")
        self.measures.append(measures)
        self.log.append((kind, {}))
        due = min(range(len(self.epochs)), key=lambda f: (self.epochs[f], f))
        outcomes, self.fresh = [[fragment, asdict(outcome)] for fragment, outcome in self.fresh.items()], {}
        places = self.layout.slices
        bases: dict[str, list[int]] = {"kept": sorted(self.bases.kept)}
        bases |= {name: sorted({places[n].fragment for n in getattr(self.bases, name)}) for name in ("gone", "lost")}
        told = {
            "outcomes": outcomes,
            "due": None if self.memory.finished else due,
            "again": self.again,
            "ended": bool(self.memory.finished),
            "tables": self.tables,
        }
        counts = {"commits": sum(self.epochs), "epoch": min(self.epochs), "digest": f"d{sum(self.epochs)}"}
        counts |= {"trained": self.counted, "workers": self.workers}
        steps = self.steps_before + sum(self.epochs) * (self.every // len(self.epochs))
        return {"kind": "load", **told, **bases, **counts, "every": self.every, "commit_steps": steps}

    def request(self, kind: str, **values: Any) -> int:
        self.log.append((kind, values))
        return len(self.log)

    def wait_for(self, kind: str, *, n: int | None = None, timeout_s: float) -> dict[str, Any] | None:
        assert kind == "release"
        assert n is not None
        assert self.log[n - 1][0] == "contribute"
        assert self.memory.stands
        self.waited_s.append(timeout_s)
        sent = self.releases.pop(0) if self.releases else True
        if sent and self.log[n - 1][1]["stands"]:
            fragment = self.log[n - 1][1]["fragment"]
            self.bases.stand([place.index for place in self.layout.slices_of(fragment)])
        if sent:
            self.commit(self.log[n - 1][1])
            self.memory.changed = self.memory.changed + 1
        if sent is None:
            return None
        self.every = self.next_every or self.every
        spent = {"stood": self.stood, "hidden": self.hidden}
        return {"kind": "release", "n": n, "sent": sent, **spent, **self.asynchronous}

    def commit(self, request: dict[str, Any]) -> None:
        fragment = request["fragment"]
        for place in self.layout.slices_of(fragment):
            part = slice(place.start, place.stop)
            self.bases.keep(place.index)
            self.memory.theta[part] -= self.lr * self.memory.delta[part]
        self.fresh[fragment] = self.fate
        self.epochs[fragment] += 1
        self.counted += request["samples"]

    def contributed(self) -> list[dict[str, Any]]:
        return [values for kind, values in self.log if kind == "contribute"]


def hooked(
    fragments: int = 1, theta: float = 0.0, clock: Callable[[], float] = time.monotonic, **settings: Any
) -> tuple[Hook, ScriptedNode, nn.Module]:
    model = nn.Module()
    model.u, model.v = nn.Parameter(torch.full((2,), theta)), nn.Parameter(torch.full((2,), theta))
    config = RunConfig(**{"sync_every": 4, "num_fragments": fragments, **settings})
    layout = Layout.build(specs_of(model), fragments)
    node = ScriptedNode(layout.numel)
    node.begin(config, layout)
    memory = node.memory
    local = LocalModel(model, layout, memory.theta, memory.base, memory.delta, share=config.local_share)
    local.write_theta()
    node.bases.loaded(range(len(layout.slices)))
    return Hook(node, local, config, layout, 5.0, clock), node, model  # type: ignore[arg-type]


def step(hook: Hook, model: nn.Module, times: int = 1, by: float = 1.0) -> None:
    for _ in range(times):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(by)
        hook.step()


def taking(clock: SimpleNamespace, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, which takes so long."""

    def timed(*arguments: Any, **named: Any) -> Any:
        clock.now += seconds
        return call(*arguments, **named)

    return timed
