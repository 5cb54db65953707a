"""Reads a run's global parameters, from its peers or from a checkpoint, and writes them as a model.

Law: changes nothing but the folder that it writes. The folder is checked before anything is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from p2p_diloco.config import PeerConfig
from p2p_diloco.core.version import model_version
from p2p_diloco.errors import CheckpointError
from p2p_diloco.node.observing import observing
from p2p_diloco.node.run import Run
from p2p_diloco.node.saving import read_checkpoint
from p2p_diloco.tensors import export
from p2p_diloco.tensors.card import ModelCard
from p2p_diloco.tensors.layout import Layout

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Source:
    """A state that was read. `theta`: the global parameters, [layout.numel]. `card`: the model's packed card; may be
    empty. `digest`: that of the whole model's version. `finished`: whether it is the run's last state."""

    run_id: str
    layout: Layout
    theta: Tensor
    card: bytes
    epoch: int
    digest: str
    finished: bool


def of_checkpoint(path: Path) -> Source:
    """Read a checkpoint, or the newest one in a folder of checkpoints.

    Raises:
        CheckpointError: there is none, or it can't be used.
    """
    try:
        saved = read_checkpoint(PeerConfig(from_checkpoint=path))
    except CheckpointError as error:
        key = "--checkpoint" if error.key == "from_checkpoint" else error.key
        raise CheckpointError(error.wrong, key=key, value=error.value, mend="name another folder") from None
    assert saved is not None, "a checkpoint that is named is read"
    model, versions = model_version(saved.versions), saved.versions
    finished = saved.has_ended(Run(saved.run_id, saved.run_config, saved.layout).rules)
    epoch = min(version.epoch for version in versions)
    return Source(saved.run_id, saved.layout, saved.theta, saved.card, epoch, model.digest, finished)


async def of_run(local: PeerConfig, tell: Callable[[str], None]) -> Source:
    """Read the newest complete state of a run from its peers, as an observer. `tell` gets a text about each step.

    Raises:
        P2PDilocoError: the run can't be read.
    """
    async with observing(local, tell) as observer:
        run = observer.run
        tell(f"reading {run.layout.numel} parameters of the run {run.run_id}")
        await observer.refresh(local.wait_timeout)
        digest, finished = observer.model.digest, observer.finished
        return Source(run.run_id, run.layout, observer.theta, observer.card, observer.epoch, digest, finished)


def write(source: Source, folder: Path, form: str, dtype: str, *, replace: bool) -> dict[str, Any]:
    """Write a state as a model; returns what was written, as plain values. The rest as in `export.write`.

    Raises:
        ConfigError: the model can't be written in this form, or the folder can't be used.
    """
    model = export.assemble(source.layout, source.theta, ModelCard.unpack(source.card))
    told = {"run_id": source.run_id, "epoch": str(source.epoch), "digest": source.digest}
    files = export.write(folder, model, form, dtype, told, replace=replace)
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": source.run_id,
        "epoch": source.epoch,
        "digest": source.digest,
        "finished": source.finished,
        "format": form,
        "dtype": dtype,
        "parameters": model.parameters,
        "bytes": sum(files.values()),
        "files": [str(folder / name) for name in files],
        "tied": len(model.tied),
        "missing": list(model.missing),
        "described": bool(source.card),
    }
