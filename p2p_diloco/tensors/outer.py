"""The outer optimizer: one step on one slice, as a pure function; and whether a class can be an outer optimizer.

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
(`OuterClass`), which may round differently on different machines; if digests show such a difference, replicas fetch
the state instead of computing it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import Finite, arrays, unheeded

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
        """Try the class out."""
        if self.is_sgd and self.options:
            mend = "leave it out, or choose another outer_optimizer"
            raise ConfigError("has no meaning for sgd", key="outer_options", value=dict(self.options), mend=mend)
        object.__setattr__(self, "_class", None if self.is_sgd else tried(self.name, self.lr, self.options))

    @property
    def is_sgd(self) -> bool:
        """Whether this is "sgd", each of whose elements is computed by itself, state included."""
        return self.name.lower() == SGD

    def revised(self, lr: float, momentum: float) -> OuterOptimizer:
        """Return the same optimizer with other rates; its state stays valid."""
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


# -- outer optimizers that are classes. What one can't do is found out before a run begins, by steps on a few numbers.
# Who may name one is decided elsewhere (`node/joining.py`).

STEP = "step"
"""The number of steps: its state tensor is there for each class, also for those that count none."""
FORCED_OFF = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch that change the order of operations, and are of no use for a slice on the CPU."""
MEND = "use an element-wise one, such as sgd, Adam or Adagrad"

_LATE = ("torch._meta_registrations", "torch._native")
"""Parts of torch that a node loads at the first question for one of their names (`node/__main__.py`). What an
optimizer's class imports asks in the midst of its own import, and fails."""

_CANT = "can't step a slice, which is a flat part of the model and comes without a closure ({})"

_THETA = (3.0, -0.5, 0.02, 1.0, -2.0, 0.3, 40.0, -7.0)
_GRADS = ((0.1, -2.0, 0.003, 5.0, -0.4, 0.02, 90.0, 1.0), (1.0, 0.5, -0.2, -3.0, 0.1, 0.4, -20.0, 60.0))
_LR = 0.05
"""What a class is tried with: numbers of unlike sizes in both halves, and several steps."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
"""By how much the steps of halves may differ from those of the whole: vectorised code rounds the ends differently."""


@dataclass(frozen=True, slots=True)
class OuterClass:
    """A class with its arguments. `kept`: its state tensors by name, sorted, and whether each is as long as the slice;
    the others have one element. `numbers`: those of them that the class keeps as Python numbers. `counts`: whether it
    counts its steps itself."""

    kind: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    kept: Mapping[str, bool]
    numbers: Mapping[str, type]
    counts: bool

    def step(self, theta: Tensor, state: Mapping[str, Tensor], grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Make one step by a new object of the class, which goes on from the state given. Return (θ', state')."""
        param = torch.nn.Parameter(theta.clone())
        param.grad = grad
        optimizer = self.kind([param], **self.arguments)
        count = state[STEP].item()
        if count > 0:
            own = (name for name in self.kept if name != STEP or self.counts)
            optimizer.state[param] = {name: self._as_kept(name, state[name]) for name in own}
        optimizer.step()
        after = {STEP: torch.tensor(count + 1, device="cpu"), **optimizer.state[param]}
        return param.detach(), {name: _flat32(after[name]) for name in self.kept}

    def _as_kept(self, name: str, values: Tensor) -> Any:
        if name in self.numbers:
            return self.numbers[name](values.item())
        return values.clone() if self.kept[name] else values.reshape(()).clone()


def tried(name: str, lr: float, options: Mapping[str, Any]) -> OuterClass:
    """Import the class of this name, and try it out.

    Raises:
        ConfigError: there is none, the options don't suit it, or it can't be an outer optimizer.
    """
    for key in ("lr", *FORCED_OFF):
        if key in options:
            mend = "set outer_lr instead" if key == "lr" else "leave it out: it is always off"
            raise ConfigError("may not be set", key=f"outer_options.{key}", value=options[key], mend=mend)
    for late in _LATE:
        getattr(sys.modules.get(late), "__doc__", None)
    kind = _imported(name)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    off = {"foreach": False} if "foreach" in inspect.signature(kind).parameters else {}
    arguments: dict[str, Any] = {"lr": lr, **off, **given}
    try:
        kind([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], **arguments)
    except Exception as error:
        if not options:
            raise ConfigError(_CANT.format(error), key="outer_optimizer", value=name, mend=MEND) from error
        raise ConfigError(
            f"doesn't suit {kind.__name__}: {error}",
            key="outer_options",
            value=dict(options),
            mend=f"see the arguments of {kind.__module__.removesuffix('.' + kind.__name__.lower())}.{kind.__name__}",
        ) from error
    if wrong := _wrong_with(kind, {**arguments, "lr": _LR}):
        raise ConfigError(wrong, key="outer_optimizer", value=name, mend=MEND)
    return _made(kind, arguments)


def _imported(name: str) -> type[torch.optim.Optimizer]:
    module, colon, attribute = name.rpartition(":")
    if not colon:
        of_torch = {each.lower(): each for each in dir(torch.optim) if isinstance(getattr(torch.optim, each), type)}
        module, attribute = "torch.optim", of_torch.get(name.lower(), name)
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        mend = "install it for each peer of the run, or put its file beside each peer's script"
        raise ConfigError(f"can't be imported ({error})", key="outer_optimizer", value=name, mend=mend) from error
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    wrong = "is no class of optimizers" if colon else "is unknown"
    mend = "use sgd, the name of a class of torch.optim, or package.module:Class"
    raise ConfigError(wrong, key="outer_optimizer", value=name, mend=mend)


def _wrong_with(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str:
    """Say why the class can't be an outer optimizer; an empty string if it can."""
    theta, *grads = (torch.tensor(values, dtype=torch.float32, device="cpu") for values in (_THETA, *_GRADS * 2))
    try:
        whole = _lived(kind, arguments, theta, grads)
        again = _lived(kind, arguments, theta, grads)
        halves = [_lived(kind, arguments, theta[half], [g[half] for g in grads]) for half in (slice(3), slice(3, None))]
        outer = _made(kind, arguments)
        renewed = theta
        state = {name: torch.zeros_like(theta if long else theta[:1]) for name, long in outer.kept.items()}
        for grad in grads:
            renewed, state = outer.step(renewed, state, grad.clone())
    except Exception as error:
        return _CANT.format(error)
    if not torch.equal(whole, again):
        return "makes another step each time, so the peers' models would differ"
    if not torch.allclose(torch.cat(halves), whole, rtol=_RELATIVE, atol=_ABSOLUTE):
        return "is not element-wise: it steps each element by others, too, and a slice is a flat part of any tensors"
    if not torch.equal(whole, renewed):
        return "keeps something beside the state of its parameters, which no checkpoint and no newcomer would get"
    return ""


def _lived(
    kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any], theta: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    """Return θ after steps of one object of the class."""
    param = torch.nn.Parameter(theta.clone())
    optimizer = kind([param], **arguments)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def _made(kind: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> OuterClass:
    """Make one step, to find out which state a class keeps.

    Raises:
        ValueError: the state is none that a slice can have.
    """
    zeros = torch.zeros(3, dtype=torch.float32, device="cpu")  # not 1: then both kinds would be as long
    param = torch.nn.Parameter(zeros)
    param.grad = torch.ones_like(zeros)
    optimizer = kind([param], **arguments)
    optimizer.step()
    kept = optimizer.state[param]
    numbers = {name: type(value) for name, value in kept.items() if isinstance(value, int | float)}
    lengths = {name: 1 if name in numbers else value.numel() for name, value in kept.items()}
    if odd := [name for name, length in lengths.items() if length not in (1, 3)]:
        raise ValueError(f"its state {odd[0]} is neither as long as the parameter nor one number")
    long = {name: lengths.get(name) == 3 for name in sorted({STEP, *kept})}
    return OuterClass(kind, arguments, long, numbers, counts=STEP in kept)


def _flat32(value: Any) -> Tensor:
    return torch.as_tensor(value, device="cpu").detach().reshape(-1).to(torch.float32)
