"""Finds the part of each parameter that this process holds, and the place of that part in the flat vector.

Law: names, places and views; no computation and no communication. A process that trains alone holds all of every
parameter. One rank of a group holds its own rows of a sharded parameter (a DTensor), which are one range of the flat
vector, and all of an unsharded parameter; rank 0 alone sends the unsharded ones. Where several ranks hold the same rows
(HSDP), only the first of these ranks sends them.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.layout import Layout, trainable


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this process among the processes of one peer."""

    index: int = 0
    count: int = 1


ALONE = Rank()
"""A peer of one process."""


@dataclass(frozen=True, slots=True)
class Extent:
    """This process's part of a parameter: the elements [start, start + numel) of the flat vector.

    `speaks`: whether this process is the one that writes these elements into the peer's shared memory.
    """

    name: str
    param: nn.Parameter
    start: int
    numel: int
    speaks: bool

    @property
    def stop(self) -> int:
        """The position in the flat vector just after the last element."""
        return self.start + self.numel

    def values(self) -> Tensor:
        """The tensor that holds this process's part of the parameter now. Call this for each use, because a wrapper
        such as FSDP may move the values to other memory when training begins."""
        return local_part(self.param)

    def like(self, flat: Tensor) -> Tensor:
        """A copy of `flat` [numel] with the parameter's shape, dtype, device and sharding."""
        mine = self.values()
        values = flat.view(mine.shape).to(device=mine.device, dtype=mine.dtype, copy=True)
        return sharded_as(self.param, values) if is_sharded(self.param) else values


def extents_of(model: nn.Module, layout: Layout, rank: Rank = ALONE) -> list[Extent]:
    """The extents of the model's trainable parameters in this process, in the order in which they lie in the flat
    vector."""
    named = trainable(model)
    found: list[Extent] = []
    for spec, start in layout.places[: len(layout.params)]:
        parameter = named[spec.name]
        before, numel, speaks = _share(spec.name, parameter, rank)
        found.append(Extent(spec.name, parameter, start + before, numel, speaks))
    return found


def _share(name: str, param: nn.Parameter, rank: Rank) -> tuple[int, int, bool]:
    """This rank's part of a parameter: (number of elements before the part, number of elements in it, whether this rank
    writes it for the peer)."""
    if not is_sharded(param):
        return 0, param.numel(), rank.index == 0
    distributed: Any = param
    mesh, first_copy, part, parts = distributed.device_mesh, True, 0, 1
    (place,) = (mesh.mesh == rank.index).nonzero().tolist()
    for position, size, placement in zip(place, mesh.shape, distributed.placements, strict=True):
        if placement.is_shard():
            part, parts = position, size
        else:
            first_copy &= position == 0
    rows, width = param.shape[0] if param.dim() else 1, math.prod(param.shape[1:])
    each = -(-rows // parts)
    first, last = min(part * each, rows), min((part + 1) * each, rows)
    if parts > 1 and local_part(param).shape != (last - first, *param.shape[1:]):
        held = "x".join(map(str, local_part(param).shape))
        mend = "shard it with torch's fully_shard"
        raise ConfigError(f"is cut unevenly: rank {rank.index} holds {held} of it", key="model", value=name, mend=mend)
    return first * width, (last - first) * width, first_copy


# -- DTensor

_HOMES = ("torch.distributed.tensor", "torch.distributed._tensor")
"""The modules of DTensor: first in torch 2.5 and later, then in older versions."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. No tensor can be a DTensor before the module of that class is imported."""
    kinds = (getattr(sys.modules.get(name), "DTensor", None) for name in _HOMES)
    return any(kind is not None and isinstance(tensor, kind) for kind in kinds)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this process's memory."""
    if is_sharded(tensor):
        distributed: Any = tensor
        with torch.no_grad():  # with gradients it would be a copy in autograd's graph
            tensor = distributed.to_local()
    return tensor.detach()


def sharded_as(param: Tensor, local: Tensor) -> Tensor:
    """Make a DTensor of this rank's values. It is sharded like the parameter."""
    distributed: Any = param
    made: Tensor = type(distributed.detach()).from_local(
        local,
        distributed.device_mesh,
        distributed.placements,
        run_check=False,  # the check would communicate
        shape=param.shape,
        stride=param.stride(),
    )
    return made


def mesh_of(name: str, param: nn.Parameter) -> Any:
    """The mesh of a sharded parameter.

    Raises:
        ConfigError: it is sharded in an unsupported way. Its rows may be cut along one dimension of the mesh, and
            copied along the others.
    """
    distributed: Any = param
    cuts = [placement for placement in distributed.placements if not placement.is_replicate()]
    if any(not placement.is_shard(0) for placement in cuts):
        mend = "leave fully_shard's shard_placement_fn out, and use no tensor parallelism"
        what = f"is sharded as {distributed.placements}, but only rows (Shard(0)) are supported"
        raise ConfigError(what, key="model", value=name, mend=mend)
    if len(cuts) > 1:
        mend = "use fully_shard alone, without tensor parallelism"
        raise ConfigError("is sharded twice, over two dimensions of its mesh", key="model", value=name, mend=mend)
    return distributed.device_mesh


def reshard(model: nn.Module) -> None:
    """Free the unsharded parameters that a forward pass of fully_shard may have left in memory. Only this rank's rows
    are read and written here, so the next forward pass must gather the parameters again."""
    for name in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):  # torch 2.6 and later, and before
        kind: Any = getattr(sys.modules.get(name), "FSDPModule", None)
        for module in model.modules() if kind is not None else ():
            if isinstance(module, kind):
                module.reshard()  # has no effect if it was done already
