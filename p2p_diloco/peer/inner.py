"""What a peer keeps on disk of its own: the inner optimizers, torch's random numbers, its counters.

Law: beside the outer state's checkpoints (`<checkpoint_dir>/inner/checkpoint-<epoch>`), at the same epochs, by the
thread that trains. It is this peer's alone, and a run goes on without it: what can't be saved or read is logged.
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
from p2p_diloco.tensors import checkpoint

FOLDER = "inner"

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
    ) -> None:
        self._optimizers, self._version = optimizers, version
        self._root, self._every, self._keep = root / FOLDER, every, keep
        self._saved = epoch - epoch % every

    def merged(self, epoch: int, finished: bool, counters: Mapping[str, Any]) -> None:
        """After an exchange: save if it is time. Fewer epochs than before are another lineage's, and counted from."""
        if epoch < self._saved:
            self._saved = epoch - epoch % self._every
        if epoch < self._saved + self._every and not (finished and epoch > self._saved):
            return
        self._saved = epoch
        try:
            tensors, structure = checkpoint.pack(_state(self._optimizers, counters))
            version = self._version()
            manifest = {"structure": structure, "generation": version.generation, "samples": version.samples}
            checkpoint.save(self._root, epoch, {"inner": tensors}, manifest, self._keep)
        except CheckpointError as error:
            log.error("the inner optimizer is not saved: %s", error)


def restore(optimizers: Sequence[Optimizer], outer: Path) -> Mapping[str, Any]:
    """Load what was saved beside an outer checkpoint, if it is there and fits; the counters."""
    path = outer.parent / FOLDER / outer.name
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
                    optimizer.load_state_dict(saved)
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
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _devices() else [],
        "counters": dict(counters),
    }


def _devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
