"""The computations of a round that need no other process: inner steps, a synthetic pseudo-gradient, the outer step and
the merge.

Law: uses the same functions and slices (`tensors`) as a run, so that the other methods differ from a run only in how
bytes travel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn

from examples.benchmarks.member import MERGE, OUTER_STEP, PSEUDO_GRADIENT, Clock, Line, Member
from examples.benchmarks.plan import Plan
from p2p_diloco.config import RunConfig
from p2p_diloco.peer.devices import finish
from p2p_diloco.tensors.flat import BLOCK, pseudo_gradient
from p2p_diloco.tensors.layout import Layout, specs_of
from p2p_diloco.tensors.outer import OuterOptimizer

SPREAD = 1000
"""The largest tensor of a model has about this many times the elements of the smallest."""
WIDTH, BATCH = 512, 64
"""Of the network whose passes stand for training."""
GOLDEN = (5**0.5 - 1) / 2
SIZE = 1e-3
"""The standard deviation of a synthetic pseudo-gradient's elements."""


def model_of(numel: int, tensors: int) -> nn.Module:
    """A model of `numel` elements, all zero, in `tensors` parameter tensors of unlike sizes, as real models have."""
    weights = [SPREAD ** (index * GOLDEN % 1) for index in range(tensors)]  # large and small ones mixed
    sizes = [1 + int((numel - tensors) * weight / sum(weights)) for weight in weights]
    sizes[0] += numel - sum(sizes)
    model = nn.Module()
    for index, size in enumerate(sizes):
        model.register_parameter(f"w{index:05}", nn.Parameter(torch.zeros(size)))
    return model


class Training:
    """Inner steps that compute: passes of a small network, forward and backward, on the peers' device, with as many
    threads as torch takes by itself."""

    def __init__(self, device: torch.device) -> None:
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self._network = nn.Sequential(*layers).to(device)
        self._batch = torch.randn(BATCH, WIDTH, device=device)
        self._device = device

    def passes(self, within_s: float) -> int:
        """The passes that this process makes in `within_s` seconds, at least one."""
        self.step(1)  # the first one allocates
        made, began = 0, time.perf_counter()
        while not made or time.perf_counter() - began < within_s:
            self.step(1)
            made += 1
        return made

    def step(self, passes: int) -> None:
        """One inner step. Its computations have ended when it returns, as those of a loop that reads its loss."""
        for _ in range(passes):
            self._network(self._batch).square().mean().backward()
        self._network.zero_grad()
        finish(self._device)


class Synthetic:
    """A replacement for training: each call of `train` subtracts the same small numbers from the parameters. They
    depend on `rank`, so each peer has other numbers."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._params = list(model.parameters())
        numbers = SIZE * torch.randn(BLOCK, generator=torch.Generator().manual_seed(rank))
        self._numbers = numbers.to(self._params[0].device)

    @torch.no_grad()
    def train(self) -> None:
        for param in self._params:
            for piece in torch.split(param.view(-1), BLOCK):
                piece.sub_(self._numbers[: piece.numel()])


class Replica:
    """The outer state and the model of one process of a method other than the run (a `Counterpart`)."""

    def __init__(self, plan: Plan, rank: int) -> None:
        numel = plan.parameters
        self.model = model_of(numel, plan.tensors)
        self.train = Synthetic(self.model, rank).train
        self.mean = torch.zeros(numel)
        """fp32 [numel]: the pseudo-gradient, later the mean of all pseudo-gradients."""
        config = RunConfig()
        self._outer = OuterOptimizer(config.outer_optimizer, config.outer_lr, config.outer_momentum, config.nesterov)
        self._theta = torch.zeros(numel)
        self._places = [slice(s.start, s.stop) for s in Layout.build(specs_of(self.model), plan.fragments).slices]
        self._states = [self._outer.init_state(place.stop - place.start) for place in self._places]

    def write_pseudo_gradient(self, clock: Clock, out: Tensor | None = None) -> None:
        """Write the pseudo-gradient, base − local, into `out`; None: into this replica's own `mean`."""
        with clock.part(PSEUDO_GRADIENT):
            for param, base, part in self._beside(self._theta, self.mean if out is None else out):
                pseudo_gradient(base, param, part)

    def take(self, clock: Clock, mean: Tensor | None = None) -> None:
        """Take the outer step on `mean` (None: on this replica's own `mean`), slice by slice as in a run. Then copy the
        new θ into the model."""
        mean = self.mean if mean is None else mean
        with clock.part(OUTER_STEP):
            for index, place in enumerate(self._places):
                theta, self._states[index] = self._outer.step(self._theta[place], self._states[index], mean[place])
                self._theta[place] = theta
        with clock.part(MERGE):
            for param, part in self._beside(self._theta):
                param.copy_(part)

    def _beside(self, *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Pair each parameter with its slice of each flat vector."""
        params = [param.detach() for param in self.model.parameters()]
        sizes = [param.numel() for param in params]
        return zip(params, *(torch.split(vector, sizes) for vector in flat), strict=True)


class Counterpart(Member):
    """A contender that takes the outer step in its own process."""

    @cached_property
    def replica(self) -> Replica:
        """The outer state and the model. They are made at their first use, so that an idle process has none."""
        return Replica(self.plan, self.asked["rank"])

    def train(self) -> Line:
        self.replica.train()
        return {}
