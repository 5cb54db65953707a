"""A peer without a run, whose global parameters and steps a test chooses, and a small model for it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.errors import UsageError
from p2p_diloco.integrations import taking_part
from p2p_diloco.peer.peer import Peer
from p2p_diloco.peer.ranks import bare
from p2p_diloco.peer.shard import Alone, Shard, data_set

GLOBAL = 0.25
"""The value of every global parameter."""


class FakePeer(Peer):
    """Counts steps from `start`, and writes down what is done to it."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        start: int = 0,
        ends_at: int = 10**6,
        seed: int = 7,
        jump: tuple[int, int] = (-1, 0),
    ) -> None:
        """`jump`: after this own step the run is ahead by so many more steps, as if a round had gone on without it."""
        self.jump = jump
        self.model, self.start, self.ends_at, self.seed = bare(model), start, ends_at, seed
        self.optimizer = optimizer[-1] if isinstance(optimizer, list) else optimizer.optimizer
        self.steps, self.events, self.inside = 0, [], False
        self.rates: dict[int, float] = {}
        self.counters: dict[str, Any] = {}
        self.shards: dict[str, Shard] = {}
        self.memory = mmap.mmap(-1, 1)  # can't be copied, as what a real peer holds

    def __enter__(self) -> FakePeer:
        self.inside = True
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._count)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.inside = False
        self.left_with = {name: param.item() for name, param in self.model.named_parameters()} if self.model else {}
        self.events.append("left" if kind is None else f"left after {kind.__name__}")

    def _before(self, *_: Any) -> None:
        assert self.events[-1:] != ["pause"], "a step within a pause"
        self.rates[self.global_step] = self.optimizer.param_groups[0]["lr"]

    def _count(self, *_: Any) -> None:
        self.steps += self.inside
        for shard in self.shards.values():
            shard.stepped()
        if self.steps == self.jump[0]:
            self.start += self.jump[1]

    def shard(self, dataset: Any, *, name: str = "train", **sharing: Any) -> Shard:
        data, found = data_set(dataset, name, **sharing)
        return self.shards.setdefault(name, Shard(data, found, f"main/{name}", Alone(data)))

    @property
    def global_step(self) -> int:
        return self.start + self.steps

    @property
    def epoch(self) -> int:
        return self.global_step // 10

    @property
    def finished(self) -> bool:
        return self.global_step >= self.ends_at

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.events.append("pause")
        yield
        self.events.append("go on")

    def report(
        self, *, loss: float | None = None, samples: int | None = None, held_out_loss: float | None = None
    ) -> None:
        if not self.inside:
            raise UsageError("this peer is not in its run")
        if samples is not None:
            self.events.append(f"{samples} samples")
        if loss is not None:
            self.events.append("loss")
        if held_out_loss is not None:
            self.events.append("held-out loss")

    def global_state_dict(self) -> dict[str, Tensor]:
        assert self.model is not None
        mine = {name for name, param in self.model.named_parameters() if param.requires_grad}
        mine |= {name for name, _ in self.model.named_buffers()}
        state = self.model.state_dict()
        return {n: torch.full_like(v, GLOBAL) if n in mine else v.clone() for n, v in state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"local_step": self.steps + self.counters.get("local_step", 0), "bytes_of_the_run": 5.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counters = dict(state)

    def happened(self, *kinds: str) -> list[str]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event in kinds]


class Model(nn.Module):
    """One trainable weight, one frozen one, and a statistic. Records the values of the first that its passes saw, and
    their data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0]))
        self.frozen = nn.Parameter(torch.tensor([3.0]), requires_grad=False)
        self.register_buffer("mean", torch.zeros(1))
        self.trained: list[tuple[float, list[float]]] = []
        self.evaluated: list[tuple[int, float]] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        value = self.weight.item()
        if self.training:
            self.trained.append((value, x.flatten().tolist()))
            self.mean = self.mean + 1.0  # replaced, as by some implementations of an EMA
        else:
            assert self.mean.item() == (GLOBAL if value == GLOBAL else len(self.trained)), "a mix of two models"
            self.evaluated.append((len(self.trained), value))
        return {"loss": (self.weight * x - self.frozen).square().mean(), "logits": self.weight * x}


def data(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.tensor([float(i)]) / count, "labels": torch.tensor([0.0])} for i in range(count)]


@pytest.fixture(autouse=True)
def fake_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks make this peer."""
    monkeypatch.setattr(taking_part, "Peer", FakePeer)
