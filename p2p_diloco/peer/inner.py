"""What a peer keeps on disk of its own: the inner optimizers, torch's random numbers, its counters.

Law: beside the outer state's checkpoints (`<checkpoint_dir>/inner/checkpoint-<epoch>`), at the same epochs, by the
thread that trains; of a group, each rank its part. It is this peer's alone, and a run goes on without it: what can't
be saved or read is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from p2p_diloco.core.version import ModelVersion
from p2p_diloco.errors import CheckpointError
from p2p_diloco.peer.extents import ALONE, Rank, is_sharded, local_part, sharded_as
from p2p_diloco.tensors import checkpoint

FOLDER = "inner"
ROWS = "rows of this rank"
"""Marks, in what is saved, this rank's part of a sharded tensor."""

log = logging.getLogger("p2p_diloco")


class InnerState:
    """Saved every `every` epochs, counted as the node counts for the outer state. `version` tells the present one."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        root: Path,
        every: int,
        keep: int,
        epoch: int,
        version: Callable[[], ModelVersion],
        rank: Rank = ALONE,
    ) -> None:
        self._optimizers, self._version = optimizers, version
        self._root, self._every, self._keep = _folder(root, rank), every, keep
        self._saved = epoch - epoch % every

    def merged(self, epoch: int, finished: bool, counters: Mapping[str, Any]) -> None:
        """After an exchange: save if it is time."""
        if (due := self.due(epoch, finished, counters)) is not None:
            self.save(**due)

    def due(self, epoch: int, finished: bool, counters: Mapping[str, Any]) -> dict[str, Any] | None:
        """After an exchange: what to save with, if it is time. Fewer epochs than before are another lineage's, and
        counted from.
        """
        if epoch < self._saved:
            self._saved = epoch - epoch % self._every
        if epoch < self._saved + self._every and not (finished and epoch > self._saved):
            return None
        self._saved = epoch
        version = self._version()
        ages = {"epoch": epoch, "generation": version.generation, "samples": version.samples}
        return {**ages, "counters": dict(counters)}

    def save(self, epoch: int, generation: int, samples: int, counters: Mapping[str, Any]) -> None:
        """Beside the outer state's checkpoint of this epoch and age."""
        try:
            tensors, structure = checkpoint.pack(_state(self._optimizers, counters))
            manifest = {"structure": structure, "generation": generation, "samples": samples}
            checkpoint.save(self._root, epoch, {"inner": tensors}, manifest, self._keep)
        except CheckpointError as error:
            log.error("the inner optimizer is not saved: %s", error)


def restore(optimizers: Sequence[Optimizer], outer: Path, rank: Rank = ALONE) -> Mapping[str, Any]:
    """Load what was saved beside an outer checkpoint, if it is there and fits; the counters."""
    path = _folder(outer.parent, rank) / outer.name
    try:
        tensors, manifest = checkpoint.load(path)
        state = checkpoint.unpack(tensors.get("inner", {}), manifest["structure"])
        match state:
            case {
                "optimizers": list(states),
                "torch": torch.Tensor() as rng,
                "cuda": list(cuda),
                "counters": dict(done),
            }:
                for optimizer, saved in zip(optimizers, states, strict=True):
                    optimizer.load_state_dict(_sharded_again(saved, optimizer))
                torch.set_rng_state(rng)
                if len(cuda) == _devices():
                    torch.cuda.set_rng_state_all(cuda)
                return done
        raise CheckpointError("is not of this program", key="checkpoint", value=path)
    except (CheckpointError, KeyError, ValueError) as error:
        log.warning("the inner optimizer starts anew: %s", error)
        return {}


def _state(optimizers: Sequence[Optimizer], counters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "optimizers": [_own_parts(optimizer.state_dict()) for optimizer in optimizers],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _devices() else [],
        "counters": dict(counters),
    }


def _folder(root: Path, rank: Rank) -> Path:
    """Each rank of a group has its own, in which another number of ranks finds nothing."""
    folder = root / FOLDER
    return folder if rank == ALONE else folder / f"rank-{rank.index}-of-{rank.count}"


def _own_parts(state: Any) -> Any:
    """An optimizer's state with this rank's part of what is sharded."""
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
    """The reverse: each part as a tensor that is sharded like its parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, entry in state["state"].items():
        for key, value in entry.items():
            match value:
                case dict() if ROWS in value:
                    rows, param = value[ROWS], params[index]
                    if not is_sharded(param) or rows.shape != local_part(param).shape:
                        raise CheckpointError("is of a model that was sharded otherwise", key="checkpoint")
                    entry[key] = sharded_as(param, rows.to(local_part(param).device))
    return state


def _devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
