"""Detects from the model which processes are one peer.

Law: looks at the model and at torch.distributed, and sends nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.peer.devices import numbered
from p2p_diloco.peer.extents import Rank, is_sharded, mesh_of, reshard
from p2p_diloco.tensors.layout import trainable


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of one peer, as one of them sees the group: all processes of torch.distributed. `rank`: this
    process's rank. `device`: the model's device."""

    rank: Rank
    device: torch.device


class Replicated(nn.Module):
    """Marks a model of which each process of torch.distributed trains a copy, as DistributedDataParallel does. It is
    for libraries that hand on the model without its DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def bare(model: nn.Module | None) -> nn.Module | None:
    """The model inside DistributedDataParallel and torch.compile, whose parameters have the same names as on other
    peers. Any other model is returned as it is. Raises UsageError if it is no model of torch."""
    if model is None:
        return None
    if not isinstance(model, nn.Module):
        raise UsageError("is no torch.nn.Module", key="model", value=type(model).__name__, mend="give the model itself")
    return list(_layers(model))[-1]


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, then the model inside its wrapper, and so on to the innermost one."""
    inner: object = model
    while isinstance(inner, nn.Module):
        yield inner
        copied = isinstance(inner, (DistributedDataParallel, Replicated))
        inner = inner.module if copied else getattr(inner, "_orig_mod", None)


def group_of(model: nn.Module | None) -> Group | None:
    """The group over which a model's parameters are sharded or copied. None if the model is in one process.

    Raises:
        ConfigError: the model is sharded in an unsupported way.
    """
    if model is None:
        return None
    for layer in _layers(model):
        if isinstance(layer, (DistributedDataParallel, Replicated)):
            count = torch.distributed.get_world_size(getattr(layer, "process_group", None))
            return _whole_world(count, next(layer.parameters()).device, type(layer.module).__name__)
    if any(map(_is_flat, model.modules())):
        what, mend = "keeps parts of flattened parameters on each process", "use fully_shard (FSDP2)"
        raise ConfigError(what, key="model", value="FullyShardedDataParallel", mend=mend)
    reshard(model)
    sharded = {name: param for name, param in trainable(model).items() if is_sharded(param)}
    if not sharded:
        return None
    meshes = [mesh_of(name, param) for name, param in sharded.items()]
    mesh = meshes[0]
    for name, other in zip(sharded, meshes, strict=True):
        if other != mesh:
            mend = "shard all of the model over one mesh"
            raise ConfigError("is sharded over another mesh than the rest", key="model", value=name, mend=mend)
    return _whole_world(mesh.size(), numbered(mesh.device_type), next(iter(sharded)))


def _is_flat(layer: object) -> bool:
    """Whether FullyShardedDataParallel (FSDP1) has spread this layer over several processes."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(layer, kind) and layer.process_group.size() > 1


def _whole_world(count: int, device: torch.device, what: str) -> Group:
    """Make the `Group` of a model that is spread over `count` processes, and check that these are all processes of
    torch.distributed. `what`: the name of the part of the model that an error would show."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if count != world:
        raise ConfigError(
            f"is spread over {count} of the {world} processes of torch.distributed, but a peer must have all of them",
            key="model",
            value=what,
            mend="use the whole group, and start a group for each peer",
        )
    return Group(Rank(rank, world), device)
