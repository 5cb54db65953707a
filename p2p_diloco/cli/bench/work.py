"""The computations of a round that need no other process: a synthetic pseudo-gradient, the outer step and the merge.

Law: uses the same functions and shards (`tensors`) as a run, so that the other methods differ from a run only in how
bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn

from p2p_diloco.cli.bench.member import MERGE, OUTER_STEP, PSEUDO_GRADIENT, Clock, Line, Member
from p2p_diloco.config import RunConfig
from p2p_diloco.tensors.flat import BLOCK, pseudo_gradient
from p2p_diloco.tensors.layout import Layout, specs_of
from p2p_diloco.tensors.outer import OuterOptimizer

PIECES = 8
SIZE = 1e-3
"""The standard deviation of a synthetic pseudo-gradient's elements."""


def model_of(numel: int, fragments: int) -> nn.Module:
    """A model of `numel` elements, all zero, in parameter tensors of about equal size."""
    pieces = min(numel, max(PIECES, fragments))
    model = nn.Module()
    for index in range(pieces):
        length = (index + 1) * numel // pieces - index * numel // pieces
        model.register_parameter(f"w{index:04}", nn.Parameter(torch.zeros(length)))
    return model


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

    def __init__(self, numel: int, fragments: int, rank: int) -> None:
        self.model = model_of(numel, fragments)
        self.train = Synthetic(self.model, rank).train
        self.mean = torch.zeros(numel)
        """fp32 [numel]: the pseudo-gradient, later the mean of all pseudo-gradients."""
        config = RunConfig()
        self._outer = OuterOptimizer(config.outer_optimizer, config.outer_lr, config.outer_momentum, config.nesterov)
        self._theta = torch.zeros(numel)
        self._places = [slice(s.start, s.stop) for s in Layout.build(specs_of(self.model), fragments).shards]
        self._states = [self._outer.init_state(place.stop - place.start) for place in self._places]

    def write_pseudo_gradient(self, clock: Clock, out: Tensor | None = None) -> None:
        """Write the pseudo-gradient, base − local, into `out`; None: into this replica's own `mean`."""
        with clock.part(PSEUDO_GRADIENT):
            for param, base, part in self._beside(self._theta, self.mean if out is None else out):
                pseudo_gradient(base, param, part)

    def take(self, clock: Clock, mean: Tensor | None = None) -> None:
        """Take the outer step on `mean` (None: on this replica's own `mean`), shard by shard as in a run. Then copy the
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
        return Replica(self.plan.parameters, self.plan.fragments, self.asked["rank"])

    def train(self) -> Line:
        self.replica.train()
        return {}
