"""Checks a model and its optimizers before their peer enters a run.

Law: reads names, dtypes and devices; changes nothing, and starts nothing. A model that can't be trained is refused; a
probable mistake causes a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.tensors.buffers import can_be_written
from p2p_diloco.tensors.layout import plain_name, trainable

SHOWN = 3
"""The most names that a sentence lists."""

log = logging.getLogger("p2p_diloco")


def check(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that every tensor of the model has values and fp32 holds those that are trained. Warn of trainable
    parameters that no optimizer trains or no state_dict has, and of what an optimizer trains beside the model.

    Raises:
        ConfigError: a tensor has no shape yet, or is nested, or is on the meta device, which holds no values; no
            parameter is trainable; one is sparse, can't be changed in place, or has a dtype that fp32 doesn't hold; or
            the model's state_dict can't be read.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        mend = "send one batch through the model before the optimizer and the peer are made"
        raise ConfigError("has no shape yet, as it is of a lazy module", key="model", value=few(lazy), mend=mend)
    if empty := [name for name, tensor in tensors if tensor.device.type == "meta"]:
        mend = "give it values before the peer is made (model.to_empty(device=...), then load or initialise them)"
        raise ConfigError("is on the meta device, which holds no values", key="model", value=few(empty), mend=mend)
    if nested := [name for name, tensor in tensors if tensor.is_nested]:
        mend = "keep a list of plain tensors in the model"
        raise ConfigError("is a nested tensor, which has no one shape", key="model", value=few(nested), mend=mend)
    held = {id(parameter) for optimizer in optimizers for parameter in stepped(optimizer)}
    named = trainable(model)
    if wide := [name for name, parameter in named.items() if not fits(parameter.dtype)]:
        dtype = named[wide[0]].dtype
        mend = "call model.float() before the optimizer is made"
        if dtype.is_complex:
            mend = "make torch.view_as_real of it the parameter, and use torch.view_as_complex where it is read"
        raise ConfigError(f"is {dtype}, but a run holds its values in fp32", key="model", value=few(wide), mend=mend)
    if sparse := [name for name, parameter in named.items() if parameter.layout is not torch.strided]:
        mend = "make it dense; an embedding's gradients may be sparse"
        raise ConfigError("is a sparse tensor, which slices can't hold", key="model", value=few(sparse), mend=mend)
    if fixed := [name for name, parameter in named.items() if not can_be_written(parameter)]:
        mend = "make it outside of torch.inference_mode(), and clone() what was expanded"
        raise ConfigError("can't be changed in place by any step", key="model", value=few(fixed), mend=mend)
    if left := [name for name, parameter in named.items() if id(parameter) not in held]:
        log.warning(
            "%d of %d trainable parameters are in no given optimizer, so this peer never changes them: %s; give all "
            "optimizers, or set requires_grad=False",
            len(left),
            len(named),
            few(left),
        )
    for optimizer in optimizers:
        warn_of_others(model, optimizer)
    _check_state_dict(model, named)


def _check_state_dict(model: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Check a state_dict() of the model's own: global values take the places of the tensors that it returns."""
    name = type(model).__name__
    try:
        state = model.state_dict(keep_vars=True)
    except Exception as error:
        mend = "let it take *args and **kwargs, and hand them on to super().state_dict()"
        raise ConfigError(
            f"has a state_dict() that can't be called: {error}", key="model", value=name, mend=mend
        ) from error
    values, names = {id(value) for value in state.values()}, {plain_name(each) for each in state}
    if absent := [each for each, parameter in named.items() if id(parameter) not in values and each not in names]:
        log.warning(
            "state_dict() of %s has not %d of the parameters that are exchanged, or has them in a form of its own: "
            "there global_state_dict() has this peer's values, not global ones: %s; begin with super().state_dict()",
            name,
            len(absent),
            few(absent),
        )


def warn_of_others(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn if an optimizer trains parameters that are not the model's, such as those of a loss."""
    own = {id(parameter) for parameter in model.parameters()}
    if others := [tuple(each.shape) for each in stepped(optimizer) if each.requires_grad and id(each) not in own]:
        log.warning(
            "the optimizer %s also trains %d parameters that are not in the model that Peer was given, so they reach "
            "no other peer: shape %s; give Peer one module that has them all",
            type(optimizer).__name__,
            len(others),
            few([str(list(shape)) for shape in others]),
        )


def stepped(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer trains."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def fits(dtype: torch.dtype) -> bool:
    """Whether fp32 holds all values of a dtype."""
    return dtype.is_floating_point and dtype.itemsize <= 4


def few(names: Sequence[str]) -> str:
    """A list of names for a sentence."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# -- one run for each model

_claimed: dict[int, int] = {}
"""The ids of the objects that are in a run, each with the process that put it there. A forked process inherits this,
but its objects are copies."""
MEND = "close() that Peer first, or make a new model and optimizer"


def refuse_claimed(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
    """Check that nothing of a peer is in a run.

    Raises:
        UsageError: it is in a run.
    """
    if taken := [name for name, each in _trained(model) if _is_claimed(each)]:
        raise UsageError("is in a run already, with another Peer", key="model", value=few(taken), mend=MEND)
    if taken := [type(each).__name__ for each in optimizers if _is_claimed(each)]:
        raise UsageError("is in a run already, with another Peer", key="optimizer", value=few(taken), mend=MEND)


@contextmanager
def claimed(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A block in which nothing of this peer can enter another run.

    Raises:
        UsageError: it is in a run.
    """
    refuse_claimed(model, optimizers)
    held = [*(each for _, each in _trained(model)), *optimizers]  # kept alive, so that no id is used again
    _claimed.update(dict.fromkeys(map(id, held), os.getpid()))
    try:
        yield
    finally:
        for each in held:
            _claimed.pop(id(each), None)


def _trained(model: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters() if model is not None else ():
        if parameter.requires_grad:
            yield name, parameter


def _is_claimed(thing: object) -> bool:
    return _claimed.get(id(thing)) == os.getpid()
