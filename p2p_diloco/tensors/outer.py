"""The outer optimizer: one step on one slice, as a pure function.

Law: no update in place; a step returns new tensors, which the caller accepts or drops. Slices are flat, so only
element-wise optimizers work. State is fp32 tensors: as long as the slice, or of one element (`step`). Their
names and lengths depend on the optimizer and its options, never on lr or momentum, which may change during a run.

The order of operations of "sgd" is the reference: torch.optim.SGD's formula, rounded as follows. Each line is one
operation on fp32, rounded by itself, never fused, so that replicas on different machines agree to the bit; μ and η are
rounded to fp32 first:

    m' ← μ · m
    m' ← m' + g
    u  ← μ · m'           Nesterov only; else u is m'
    u  ← u + g            Nesterov only
    u  ← η · u
    θ' ← θ − u

The state is {"m"}, also for μ = 0. The other optimizers are classes of torch.optim or of any package
(`outer_class`), which may round differently on different machines; if digests show such a difference, replicas fetch
the state instead of computing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import Finite, arrays, unheeded
from p2p_diloco.tensors.outer_class import OuterClass, tried

State = dict[str, Tensor]
Like = Callable[[Tensor], Tensor]
"""A function that returns uninitialised memory of a tensor's length."""

SGD = "sgd"


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The outer optimizer of a run. Its name is "sgd", or that of an element-wise class: one of torch.optim, in upper
    or lower case, or "package.module:Class".

    sgd takes `lr`, `momentum` and `nesterov`; the others take `lr` and, in `options`, keyword arguments of their own.
    Raises `ConfigError`, naming the key, for settings that can't be used.
    """

    name: str = SGD
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    options: Mapping[str, object] = field(default_factory=dict)
    _class: OuterClass | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every argument, and try the class out."""
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ConfigError("must be 0 or more", key="outer_lr", value=self.lr, mend="0.7 is usual")
        if self.is_sgd:
            if not 0 <= self.momentum < 1:
                raise ConfigError(
                    "must be at least 0 and less than 1",
                    key="outer_momentum",
                    value=self.momentum,
                    mend="0.9 is usual",
                )
            if self.options:
                raise ConfigError(
                    "has no meaning for sgd",
                    key="outer_options",
                    value=dict(self.options),
                    mend="leave it out, or choose another outer_optimizer",
                )
        object.__setattr__(self, "_class", None if self.is_sgd else tried(self.name, self.lr, self.options))

    @property
    def is_sgd(self) -> bool:
        """Whether this is "sgd", each of whose elements is computed by itself, state included."""
        return self.name.lower() == SGD

    def revised(self, lr: float, momentum: float) -> OuterOptimizer:
        """Return the same optimizer with other rates; its state stays valid. Raises `ConfigError` for invalid rates."""
        return replace(self, lr=lr, momentum=momentum)

    def state_lengths(self, numel: int) -> dict[str, int]:
        """Return the number of elements of each state tensor for a slice of `numel` elements, by name, in the order of
        storage."""
        kinds = {"m": True} if self._class is None else self._class.kept
        return {name: numel if long else 1 for name, long in kinds.items()}

    def init_state(self, numel: int) -> State:
        """Return the state before the first step: zeros. (A class uses its own initial state while `step` is 0.)"""
        return {name: torch.zeros(length, device="cpu") for name, length in self.state_lengths(numel).items()}

    def step(
        self,
        theta: Tensor,
        state: Mapping[str, Tensor],
        grad: Tensor | Iterable[Tensor],
        seen: Finite | None = None,
        like: Like = torch.empty_like,
    ) -> tuple[Tensor, State]:
        """Make one outer step: return (θ', state') for θ, its state and ḡ, all flat fp32 [numel]. The inputs stay
        unchanged.

        `grad` may come in blocks like those of `flat.blocks`; each is read before the next one is drawn. `seen` gets
        each new piece as soon as it is made, while it is in the cache; not the momentum of `sgd`, which is not finite
        only where θ isn't. `like` gives memory for the result.
        """
        parts = torch.split(grad, flats.BLOCK) if isinstance(grad, Tensor) else grad
        if self._class is None:
            return self._step_sgd(theta, state["m"], parts, seen, like)
        new_theta, new_state = self._class.step(theta, state, torch.cat([part.clone() for part in parts]))
        if seen is not None:
            for values in (new_theta, *new_state.values()):
                seen(values.numpy())
        return new_theta, new_state

    @unheeded
    def _step_sgd(
        self, theta: Tensor, m: Tensor, grad: Iterable[Tensor], seen: Finite | None, like: Like
    ) -> tuple[Tensor, State]:
        new_theta, new_m = like(theta), like(m)
        momentum, lr = np.float32(self.momentum), np.float32(self.lr)
        update = np.empty(flats.BLOCK, dtype=np.float32)
        for g, old, buffer, new, new_buffer in arrays(grad, theta, m, new_theta, new_m):
            u = update[: len(g)]
            np.multiply(buffer, momentum, out=new_buffer)
            np.add(new_buffer, g, out=new_buffer)
            if self.nesterov:
                np.multiply(new_buffer, momentum, out=u)
                np.add(u, g, out=u)
                np.multiply(u, lr, out=u)
            else:
                np.multiply(new_buffer, lr, out=u)
            np.subtract(old, u, out=new)
            if seen is not None:
                seen(new)
        return new_theta, {"m": new_m}
