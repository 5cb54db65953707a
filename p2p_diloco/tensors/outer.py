"""The outer optimizer: one step on one shard, as a pure function.

Law: no update in place; a step returns new tensors, which the caller accepts or drops. Shards are flat slices, so only
element-wise optimizers work. State is fp32 tensors: as long as the shard, or of one element (Adam's `step`). Their
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

The state is {"m"}, also for μ = 0. The other optimizers are torch's own, which may round differently on different
machines; if digests show such a difference, replicas fetch the state instead of computing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.digest import Look
from p2p_diloco.tensors.flat import arrays, unheeded

State = dict[str, Tensor]
Like = Callable[[Tensor], Tensor]
"""A function that returns uninitialised memory of a tensor's length."""

SGD = "sgd"

_ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop"
ELEMENTWISE = {name.lower(): name for name in _ELEMENTWISE.split()}
"""Element-wise optimizers of torch.optim, by lower-case name."""


_FORCED_OFF = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch that change the order of operations, and are of no use for a shard on the CPU."""

_PROBE = 3
"""Length of the tensor in `_probe`. Not 1, so that state as long as the shard is told from state of one element."""


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The outer optimizer of a run. Its name is "sgd", or the name of an element-wise class of torch.optim, in upper or
    lower case.

    sgd takes `lr`, `momentum` and `nesterov`; the others take `lr` and, in `options`, keyword arguments of their own.
    Raises `ConfigError`, naming the key, for settings that can't be used.
    """

    name: str = SGD
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    options: Mapping[str, object] = field(default_factory=dict)
    _kinds: tuple[tuple[str, bool], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every argument. Then make one step on a small tensor to find out which state the optimizer keeps."""
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
            kinds: tuple[tuple[str, bool], ...] = (("m", True),)
        else:
            kinds = _probe(_torch_class(self.name), self._arguments())
        object.__setattr__(self, "_kinds", kinds)

    @property
    def is_sgd(self) -> bool:
        """Whether this is "sgd", each of whose elements is computed by itself, state included."""
        return self.name.lower() == SGD

    def revised(self, lr: float, momentum: float) -> OuterOptimizer:
        """Return the same optimizer with other rates; its state stays valid. Raises `ConfigError` for invalid rates."""
        return replace(self, lr=lr, momentum=momentum)

    def state_lengths(self, numel: int) -> dict[str, int]:
        """Return the number of elements of each state tensor for a shard of `numel` elements, by name, in the order of
        storage."""
        return {name: numel if long else 1 for name, long in self._kinds}

    def init_state(self, numel: int) -> State:
        """Return the state before the first step: zeros. (A torch optimizer uses its own initial state while `step` is
        0.)"""
        return {name: torch.zeros(length, device="cpu") for name, length in self.state_lengths(numel).items()}

    def step(
        self,
        theta: Tensor,
        state: Mapping[str, Tensor],
        grad: Tensor | Iterable[Tensor],
        seen: Look | None = None,
        like: Like = torch.empty_like,
    ) -> tuple[Tensor, State]:
        """Make one outer step: return (θ', state') for θ, its state and ḡ, all flat fp32 [numel]. The inputs stay
        unchanged.

        `grad` may come in blocks like those of `flat.blocks`; each is read before the next one is drawn. `seen` gets
        each new piece as soon as it is made, named "theta", or "state." and the name of a state tensor. `like` gives
        memory for the result.
        """
        parts = torch.split(grad, flats.BLOCK) if isinstance(grad, Tensor) else grad
        if self.is_sgd:
            return self._step_sgd(theta, state["m"], parts, seen, like)
        new_theta, new_state = self._step_torch(theta, state, torch.cat([part.clone() for part in parts]))
        if seen is not None:
            seen("theta", new_theta.numpy())
            for name, values in new_state.items():
                seen(f"state.{name}", values.numpy())
        return new_theta, new_state

    @unheeded
    def _step_sgd(
        self, theta: Tensor, m: Tensor, grad: Iterable[Tensor], seen: Look | None, like: Like
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
                seen("theta", new)
                seen("state.m", new_buffer, follows=True)
        return new_theta, {"m": new_m}

    def _step_torch(self, theta: Tensor, state: Mapping[str, Tensor], grad: Tensor) -> tuple[Tensor, State]:
        param = torch.nn.Parameter(theta.clone())
        param.grad = grad
        optimizer = _torch_class(self.name)([param], **self._arguments())
        if state["step"].item() > 0:
            optimizer.state[param] = {
                name: state[name].clone() if long else state[name].reshape(()).clone() for name, long in self._kinds
            }
        optimizer.step()
        kept = optimizer.state[param]
        return param.detach(), {name: _flat32(kept[name]) for name, _ in self._kinds}

    def _arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the torch class. Lists become tuples, because JSON and TOML have only
        lists."""
        for key in ("lr", *_FORCED_OFF):
            if key in self.options:
                mend = "set outer_lr instead" if key == "lr" else "leave it out: it is always off"
                raise ConfigError("may not be set", key=f"outer_options.{key}", value=self.options[key], mend=mend)
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in self.options.items()}
        return {"lr": self.lr, "foreach": False, **given}


def _torch_class(name: str) -> type[torch.optim.Optimizer]:
    known = ELEMENTWISE.get(name.lower())
    if known is None:
        exists = isinstance(getattr(torch.optim, name, None), type)
        wrong = "isn't element-wise, and shards are flat slices" if exists else "is unknown"
        mend = f"use one of {', '.join((SGD, *ELEMENTWISE.values()))}"
        raise ConfigError(wrong, key="outer_optimizer", value=name, mend=mend)
    found: type[torch.optim.Optimizer] = getattr(torch.optim, known)
    return found


def _probe(kind: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Make one step on a small tensor to find out which state tensors the optimizer keeps. Return (name, whether it is
    as long as the shard) for each, sorted."""
    param = torch.nn.Parameter(torch.zeros(_PROBE, device="cpu"))
    param.grad = torch.ones(_PROBE, device="cpu")
    try:
        optimizer = kind([param], **arguments)
        optimizer.step()
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"doesn't suit {kind.__name__}: {error}",
            key="outer_options",
            value={key: value for key, value in arguments.items() if key not in ("lr", "foreach")},
            mend=f"see the arguments of torch.optim.{kind.__name__}",
        ) from error
    kept = optimizer.state[param]
    assert "step" in kept, "every optimizer in ELEMENTWISE keeps its number of steps in `step`"
    return tuple((name, kept[name].numel() == _PROBE) for name in sorted(kept))


def _flat32(value: Tensor) -> Tensor:
    return value.detach().reshape(-1).to(torch.float32)
