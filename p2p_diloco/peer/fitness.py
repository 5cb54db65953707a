"""Checks a model and its optimizers before their peer enters a run, and watches whether what is then trained is what
is exchanged.

Law: reads names, dtypes, devices and a few values; changes nothing, and starts nothing. A model that can't be trained
is refused; one that has been changed since the run was entered ends the step with an error, before any exchange. A
probable mistake causes a warning: training that never reaches the hook, an optimizer that undoes a merge, or one that
keeps weights that no merge reaches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from p2p_diloco.errors import ConfigError, UsageError, listed
from p2p_diloco.peer.extents import is_sharded, local_part
from p2p_diloco.tensors.buffers import can_be_written
from p2p_diloco.tensors.layout import plain_name, trainable

few = partial(listed, most=3)
"""A list of names for a sentence."""

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


def not_finite(model: nn.Module) -> str:
    """Names of the parameters in which this process holds a NaN or an infinity; empty if there are none."""
    found = []
    for name, parameter in trainable(model).items():
        part = local_part(parameter)
        part = part.float() if part.dtype.itemsize == 1 else part  # fp8 has no order in torch
        if part.numel() and not (part.min().isfinite() and part.max().isfinite()):  # these take no memory
            found.append(name)
    return few(found)


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


# -- one run for each model

_claimed: set[int] = set()
"""The ids of the objects that are in a run. A forked process has copies of these objects, which are in none."""
os.register_at_fork(after_in_child=_claimed.clear)


def refuse_claimed(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
    """Check that nothing of a peer is in a run.

    Raises:
        UsageError: it is in a run.
    """
    named = [(type(each).__name__, each) for each in optimizers]
    for key, things in (("model", _trained(model)), ("optimizer", named)):
        if taken := [name for name, each in things if id(each) in _claimed]:
            mend = "close() that Peer first, or make a new model and optimizer"
            raise UsageError("is in a run already, with another Peer", key=key, value=few(taken), mend=mend)


@contextmanager
def claimed(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """A block in which nothing of this peer can enter another run.

    Raises:
        UsageError: it is in a run.
    """
    refuse_claimed(model, optimizers)
    held = [*(each for _, each in _trained(model)), *optimizers]  # kept alive, so that no id is used again
    _claimed.update(map(id, held))
    try:
        yield
    finally:
        _claimed.difference_update(map(id, held))


def _trained(model: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters() if model is not None else ():
        if parameter.requires_grad:
            yield name, parameter


# -- what is watched while they train

ASKED = 20
"""Each time the loop has asked so often whether the run has ended, or reported, and made no step meanwhile, it is
looked whether it trains."""
NEAR = 0.25
"""A step has undone a merge if it went so near to the values before the merge, as a share of its own length."""
LONG = 2.0
"""... and if it is so many times as long as the steps before the merge were in the mean, or it may be an ordinary step
that happens to lead back."""
IN_A_ROW = 3
"""So many merges in a row are undone before it is told: with few parameters, a step leads back by chance now and
then."""
CLOSE = 0.25
"""What an optimizer keeps for each parameter are weights if they are so near to the model's, as a share of the length
of these. Moments are not."""
MOVED = 2
"""At so many merges in a row kept weights must have moved with the model's before it is told: the first weights, from
which some optimizers measure distances, stay as they are."""
LOOKS = 8
"""At so many merges it is looked for kept weights."""


class Watch:
    """Watches one peer's model and the optimizer whose steps are counted."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, wrappers: Sequence[object] = ()) -> None:
        """`wrappers`: those in which the optimizer was given. Some, such as Lookahead, have a state of their own."""
        self._model, self._optimizer, self._wrappers = model, optimizer, wrappers
        self._entered = trainable(model)
        self._shapes = [parameter.shape for parameter in self._entered.values()]
        self._checked, self._held = self._outline(), len(stepped(optimizer))
        self._loaded = self._sample()  # after the last merge
        self._before: Tensor | None = None  # before the merges since the last step, if there were any
        self._ordinary = 0.0  # the length of a step before these merges, in the mean
        self._steps = 0  # since the last merge
        self._asked = 0  # since the last step
        self._rested: Tensor | None = self._loaded  # at some time since the last step; None: it was not looked since
        self._changed = 0  # looks in a row that found other values than the look before
        self._undone = 0  # merges in a row
        self._looks = 0  # for kept weights
        self._kept: dict[str, tuple[Tensor, int]] = {}  # each, and at how many merges in a row it had moved
        self._is_stepped = self._is_told = self._is_told_of_weights = False

    @contextmanager
    def merging(self) -> Iterator[None]:
        """A block in which newer global values are loaded into the model."""
        before = self._sample()
        if self._before is None:
            self._before = before
            self._ordinary = _length(before - self._loaded) / max(1, self._steps)
            self._look_for_weights()
        yield
        self._loaded, self._steps = self._sample(), 0
        self._rested = None if self._is_stepped else self._loaded

    def step(self) -> None:
        """Called at each step, before any exchange.

        Raises:
            UsageError: the trainable parameters are others than when the run was entered, or hold their values in
                another way.
        """
        outline = self._outline()
        if outline != self._checked:  # to read all names takes a millisecond, too long for each step
            self._check_parameters()
            self._checked = outline
        if (held := len(stepped(self._optimizer))) != self._held:  # by add_param_group
            self._held = held
            warn_of_others(self._model, self._optimizer)
        self._is_stepped, self._rested, self._asked, self._changed = True, None, 0, 0
        if self._before is not None and not self._is_told_of_weights:
            self._look_whether_undone(self._before)
        self._before = None
        self._steps += 1

    def asked(self) -> None:
        """Called whenever the loop asks whether the run has ended, or reports."""
        self._asked += 1
        if self._asked % ASKED == 0:
            self.tell_unstepped()

    def tell_unstepped(self) -> None:
        """Warn, once, if the model is trained and no step is counted, or none any more."""
        if self._is_told:
            return
        before, self._rested = self._rested, self._sample()
        is_changed = before is not None and not torch.equal(before, self._rested)
        self._changed = self._changed + 1 if is_changed else 0
        if self._changed < 1 + self._is_stepped:  # a program that steps may evaluate other weights for a while
            return
        self._is_told = True
        log.warning(
            "the model is trained, but step() of the optimizer %s is %s called, so no step is counted and nothing "
            "is exchanged; give Peer the optimizer whose step() the training loop calls, outside of CUDA graphs",
            type(self._optimizer).__name__,
            "no longer" if self._is_stepped else "never",
        )

    def _outline(self) -> list[object]:
        """The model's parameters by identity, and whether each is trained; and how those that are exchanged hold their
        values: `parameter.data = ` and `model.to()` change that, and leave the identity."""
        found: list[nn.Parameter | None] = []
        modules: list[nn.Module | None] = [self._model]
        while modules:
            if (module := modules.pop()) is not None:
                found += module._parameters.values()
                modules += module._modules.values()
        held = [(parameter.dtype, parameter.shape) for parameter in self._entered.values()]
        return [*((id(parameter), parameter.requires_grad) for parameter in found if parameter is not None), *held]

    def _check_parameters(self) -> None:
        now = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        if gone := [name for name, parameter in self._entered.items() if not _is_same(parameter, now.get(name))]:
            what = "is another tensor than when the run was entered, or gone, so its values would reach no other peer"
            raise UsageError(what, key="parameter", value=few(gone), mend="change the model before the peer is made")
        if wide := [name for name, parameter in self._entered.items() if not fits(parameter.dtype)]:
            what = f"has become {self._entered[wide[0]].dtype}, but a run holds its values in fp32"
            raise UsageError(what, key="parameter", value=few(wide), mend="keep the model in fp32 or less")
        held = zip(self._entered.items(), self._shapes, strict=True)
        if other := [name for (name, parameter), shape in held if parameter.shape != shape]:
            what = "has another shape than when the run was entered, so its values can't be exchanged"
            mend = "change the model before the peer is made, and let nothing take its parameters' values away"
            raise UsageError(what, key="parameter", value=few(other), mend=mend)
        trained = (name for name, parameter in now.items() if parameter.requires_grad and parameter.numel())
        if new := [name for name in trained if name not in self._entered]:
            what = "was frozen or missing when the run was entered, so its values would reach no other peer"
            mend = "unfreeze or add it before the peer is made, or keep it frozen"
            raise UsageError(what, key="parameter", value=few(new), mend=mend)

    def _look_whether_undone(self, before: Tensor) -> None:
        """Warn, once, if first steps after merges put the values from before them back."""
        now = self._sample()
        made = _length(now - self._loaded)
        is_undone = _length(now - before) < NEAR * made and made > LONG * self._ordinary
        self._undone = self._undone + 1 if is_undone else 0
        if self._undone == IN_A_ROW or (is_undone and any(are for _, are in self._kept_values().values())):
            self._is_told_of_weights = True
            log.warning(
                "step() of the optimizer %s undoes each merge: it seems to keep the weights elsewhere, too (fp32 "
                "masters, offloaded weights), so this peer gets nothing from the others; use an optimizer that reads "
                "the model's own parameters, for instance with an fp32 model under torch.autocast",
                type(self._optimizer).__name__,
            )

    def _look_for_weights(self) -> None:
        """Warn, once, if the optimizer keeps weights that move with the model's: slow ones, or those between which it
        takes a mean."""
        if self._looks == LOOKS or self._is_told_of_weights:
            return
        self._looks += 1
        for name, (kept, are_weights) in self._kept_values().items():
            before, moved = self._kept.get(name, (kept, 0))
            moved = moved + 1 if are_weights and not torch.equal(kept, before) else 0
            self._kept[name] = kept, moved
            if moved == MOVED and not self._is_told_of_weights:
                self._is_told_of_weights = True
                log.warning(
                    "the optimizer %s keeps weights of its own (%r in its state), which no merge reaches: it draws the "
                    "model back to them, so this peer gets less from the others; use an optimizer that keeps none, as "
                    "the run's outer step averages already",
                    type((*self._wrappers, self._optimizer)[0]).__name__,
                    name,
                )

    def _kept_values(self) -> dict[str, tuple[Tensor, bool]]:
        """What the optimizer and its wrappers keep for each parameter, by its name in the state: the first row for
        each parameter, and whether they are weights."""
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for each in (*self._wrappers, self._optimizer):
            state: Any = getattr(each, "state", None)
            for parameter in self._entered.values() if isinstance(state, Mapping) else ():
                entry = state.get(parameter)
                for name, value in entry.items() if isinstance(entry, Mapping) else ():
                    if _is_alike(value, parameter):
                        found.setdefault(str(name), []).append((value, parameter))
        values: dict[str, tuple[Tensor, bool]] = {}
        for name, pairs in found.items():
            kept = _first((value for value, _ in pairs), rows=True)
            own = _first((parameter for _, parameter in pairs), rows=True)
            values[name] = kept, _length(kept - own) < CLOSE * _length(own)
        return values

    def _sample(self) -> Tensor:
        """The first value that this process holds of each trainable parameter."""
        return _first(self._entered.values())


def _first(tensors: Iterable[Tensor], *, rows: bool = False) -> Tensor:
    """The first value that this process holds of each tensor, or its first row."""
    first: dict[torch.device, list[Tensor]] = {}
    for part in map(local_part, tensors):
        if part.numel():
            there = part[(0,) * (part.dim() - rows)] if part.dim() else part
            first.setdefault(part.device, []).append(there.reshape(-1).to(torch.float32))
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    return torch.cat([none, *(torch.cat(values).to("cpu") for values in first.values())])


def _is_alike(value: object, parameter: nn.Parameter) -> bool:
    """Whether an entry of an optimizer's state could be weights of this parameter."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.is_floating_point() and value.shape == parameter.shape


def _length(values: Tensor) -> float:
    return float(values.norm())


def _is_same(entered: nn.Parameter, now: nn.Parameter | None) -> bool:
    """Whether a parameter is the one of the same name that the run was entered with. `fully_shard` puts another tensor
    in a sharded one's place for a while."""
    return now is entered or (now is not None and is_sharded(entered))
