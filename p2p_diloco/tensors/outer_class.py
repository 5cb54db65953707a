"""An outer optimizer that is a class: torch's own, or one of any package; and whether it can be an outer optimizer.

Law: what a class can't do is found out before a run begins, by steps on a few numbers, and refused with the reason. A
class is imported here by its name; who may name one is decided elsewhere (`node/joining.py`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError

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
