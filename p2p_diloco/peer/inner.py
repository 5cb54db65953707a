"""Saves and restores a peer's inner state: the inner optimizers, torch's random states and the counters.

Law: saved beside the outer state's checkpoints (`<checkpoint_dir>/inner/checkpoint-<epoch>`), by the training thread,
at the first step after the node has begun to write the outer one; each rank of a group saves its part. Hyperparameters
stay as the program gives them. Only this peer needs its own checkpoints, so a failure to save or read one is logged,
and training goes on.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from p2p_diloco.errors import CheckpointError
from p2p_diloco.peer.devices import random_states, restore_random_states
from p2p_diloco.peer.extents import ALONE, Rank, is_sharded, local_part, sharded_as
from p2p_diloco.peer.fitness import stepped
from p2p_diloco.tensors import checkpoint
from p2p_diloco.tensors.checkpoint import is_plain

FOLDER = "inner"
KEEPS_STATE = ("amsgrad", "centered", "momentum")
"""Options with which torch's optimizers keep more for each parameter: a state that was saved without one lacks it."""
ROWS = "rows of this rank"
"""Marks this rank's part of a sharded tensor in a saved state."""

log = logging.getLogger("p2p_diloco")


class InnerState:
    """Saves the inner state, once for each checkpoint of the outer state; nothing if `root` is None."""

    def __init__(self, optimizers: Sequence[Optimizer], root: Path | None, keep: int, rank: Rank = ALONE) -> None:
        self._optimizers, self._keep = optimizers, keep
        self._root = None if root is None else _folder(root, rank)
        self._saved = 0

    def is_due(self, epoch: int) -> bool:
        """Whether the node has begun a new checkpoint of the outer state since the last call. Call this after each
        step. `epoch`: the epoch of the newest checkpoint; 0 if there is none."""
        before, self._saved = self._saved, epoch
        return self._root is not None and epoch not in (0, before)

    def save(self, epoch: int, generation: int, samples: int, counters: Mapping[str, Any]) -> None:
        """Save the inner state beside the checkpoint of the outer state that has this epoch and version."""
        if self._root is None:
            return
        try:
            state = _state(self._optimizers, counters)
        except Exception as error:  # whatever an optimizer's own state_dict() raises, training goes on
            log.error("the inner optimizer's state can't be saved, because its state_dict() fails: %s", error)
            return
        try:
            tensors, structure = checkpoint.pack(state)
            manifest = {"structure": structure, "generation": generation, "samples": samples}
            checkpoint.save(self._root, epoch, {"inner": tensors}, manifest, self._keep)
        except CheckpointError as error:
            log.error("the inner optimizer's state can't be saved: %s", error)


def restore(optimizers: Sequence[Optimizer], outer: Path, rank: Rank = ALONE) -> Mapping[str, Any]:
    """Load the inner state that was saved beside the checkpoint `outer` of the outer state. If there is none, load the
    newest inner state from before that checkpoint. The optimizers' hyperparameters stay as they are, and an optimizer
    that the saved state doesn't fit starts anew. Returns the saved counters; they are empty if no inner state was
    found."""
    try:
        path = _beside(outer, _folder(outer.parent, rank))
        tensors, manifest = checkpoint.load(path)
        state = checkpoint.unpack(tensors.get("inner", {}), manifest["structure"])
        match state:
            case {
                "optimizers": list(states),
                "torch": torch.Tensor() as rng,
                "cuda": list(states_of_devices),
                "counters": dict(done),
                "kinds": list(kinds),
            }:
                if len(states) != len(optimizers):
                    text = "the inner optimizers start without a saved state: there are %d, and it is of %d"
                    log.warning(text, len(optimizers), len(states))
                    states = []
                for optimizer, saved, kind in zip(optimizers, states, kinds, strict=False):
                    _load(optimizer, saved, kind)
                torch.set_rng_state(rng)
                restore_random_states(states_of_devices)
                return done
        raise CheckpointError("was not written by p2p_diloco", key="checkpoint", value=path)
    except (CheckpointError, KeyError, ValueError) as error:
        log.warning("the inner optimizer starts without a saved state: %s", error)
        return {}


def _load(optimizer: Optimizer, saved: dict[str, Any], kind: object) -> None:
    """Load an optimizer's state if it fits. Torch would load any, and fail, or train wrongly, at the next step."""
    try:
        if kind != _kind(optimizer):
            raise CheckpointError("is of another class, or of other parameters or another order of them")
        if len(saved["param_groups"]) != len(optimizer.param_groups):
            raise CheckpointError("has another number of parameter groups")
        for before, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            if new := [key for key in KEEPS_STATE if own.get(key) and not before.get(key)]:
                raise CheckpointError(f"was saved without {new[0]}, and so without what that keeps")
        optimizer.load_state_dict(_with_own_settings(_sharded_again(saved, optimizer), optimizer))
    except Exception as error:  # whatever an optimizer's own load_state_dict() raises, training goes on
        name = type(optimizer).__name__
        log.warning("the inner optimizer %s starts without a saved state: the saved one can't be used: %s", name, error)


def _kind(optimizer: Optimizer) -> dict[str, Any]:
    """What a saved state must have in common with an optimizer: its class, and the shapes of its parameters."""
    return {"class": type(optimizer).__name__, "shapes": [list(parameter.shape) for parameter in stepped(optimizer)]}


def _state(optimizers: Sequence[Optimizer], counters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "optimizers": [_own_parts(_saveable(optimizer)) for optimizer in optimizers],
        "kinds": [_kind(optimizer) for optimizer in optimizers],
        "torch": torch.get_rng_state(),
        "cuda": random_states(),
        "counters": dict(counters),
    }


def _saveable(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state, without those hyperparameters that are no plain data (functions, numbers and arrays of
    NumPy): a restart has its program's own."""
    state = optimizer.state_dict()
    kept = _counted(optimizer) | {"params"}
    groups = [{k: v for k, v in group.items() if k in kept or is_plain(v)} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def _beside(outer: Path, root: Path) -> Path:
    """Find the inner checkpoint with the outer checkpoint's name. If there is none, take the newest one before it: this
    peer was perhaps killed in the step in which the node made the outer checkpoint."""
    beside, number = root / outer.name, checkpoint.epoch_of(outer)
    if beside.is_dir():
        return beside
    for path in checkpoint.whole(root):  # newest first
        if (epoch := checkpoint.epoch_of(path)) < number:
            log.info("the inner optimizer loads its state of epoch %d: none was saved beside %s", epoch, outer)
            return path
    raise CheckpointError("has no state of the inner optimizer beside it", key="checkpoint", value=outer)


def _folder(root: Path, rank: Rank) -> Path:
    """The folder for one rank's inner state. Its name contains the number of ranks, so that a group with another number
    of ranks finds no saved state."""
    folder = root / FOLDER
    return folder if rank == ALONE else folder / f"rank-{rank.index}-of-{rank.count}"


def _own_parts(state: Any) -> Any:
    """An optimizer's state in which this rank's part takes the place of each sharded tensor."""
    match state:
        case dict():
            return {key: _own_parts(value) for key, value in state.items()}
        case list():
            return [_own_parts(value) for value in state]
        case torch.Tensor() if is_sharded(state):
            return {ROWS: local_part(state)}
        case _:
            return state


def _sharded_again(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Undo `_own_parts`: replace each part by a tensor that is sharded like its parameter."""
    params = stepped(optimizer)
    for index, entry in state["state"].items():
        for key, value in entry.items():
            match value:
                case dict() if ROWS in value:
                    rows, param = value[ROWS], params[index]
                    if not is_sharded(param) or rows.shape != local_part(param).shape:
                        raise CheckpointError("is of a model that was sharded in another way", key="checkpoint")
                    entry[key] = sharded_as(param, rows.to(local_part(param).device))
    return state


def _with_own_settings(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state for an optimizer, with the hyperparameters that the program gives this time: the user may have changed
    them for this start, and the saved learning rate is one that a scheduler had changed. What an optimizer counts in
    its groups (as schedule-free ones and Prodigy do) comes from the saved state: it is in the class's defaults, but is
    no argument of the class."""
    counted = _counted(optimizer)
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):  # torch compares their numbers
        saved.pop("initial_lr", None)  # a scheduler's: a new one would begin with it
        saved |= {key: value for key, value in own.items() if key not in counted and key != "params"}
    return state


def _counted(optimizer: Optimizer) -> set[str]:
    """The keys of an optimizer's groups under which it counts: the classes that it is made of aren't called with
    them."""
    classes = [kind for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    arguments = {name for kind in classes for name in inspect.signature(vars(kind)["__init__"]).parameters}
    return optimizer.defaults.keys() - arguments
