"""Detects from the model which processes are one peer, and connects each of them to rank 0 by a socket.

Law: torch.distributed carries only two small messages, when a peer starts: where rank 0 listens, and which ranks could
not connect. No parameter is sent here. The socket's path is deleted as soon as all ranks have connected.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2p_diloco.errors import ConfigError, RankDied, UsageError
from p2p_diloco.peer.extents import Rank, is_sharded, reshard
from p2p_diloco.tensors.layout import trainable

PATH_BYTES = 256
"""Length of the message with the path on which rank 0 listens; the system allows paths of about a hundred bytes."""
COME_S = 60.0
"""Deadline for a rank to connect."""
_HELLO_BYTES = 4


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of one peer, as one of them sees the group. `rank`: this process's rank. `process_group`: torch's
    group, which carries small tensors on `device`."""

    rank: Rank
    process_group: Any
    device: torch.device


class Replicated(nn.Module):
    """Marks a model of which each process of torch.distributed trains a copy, as DistributedDataParallel does. For
    libraries that pass on only the bare model."""

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
    """The model, and one after another the models inside its wrappers."""
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
    for layer in () if model is None else _layers(model):
        if isinstance(layer, DistributedDataParallel):
            return _whole_world(layer.process_group, next(layer.parameters()).device, type(layer).__name__)
        if isinstance(layer, Replicated):
            world = torch.distributed.group.WORLD
            return _whole_world(world, next(layer.parameters()).device, type(layer.module).__name__)
    if model is not None:
        reshard(model)
    sharded = {} if model is None else {n: p for n, p in trainable(model).items() if is_sharded(p)}
    if not sharded:
        return None
    meshes = [_mesh(name, param) for name, param in sharded.items()]
    mesh = meshes[0]
    for name, other in zip(sharded, meshes, strict=True):
        if other != mesh:
            mend = "shard all of the model over one mesh"
            raise ConfigError("is sharded over another mesh than the rest", key="model", value=name, mend=mend)
    return _whole_world(mesh.get_group(), torch.device(mesh.device_type), next(iter(sharded)))


def _whole_world(process_group: Any, device: torch.device, what: str) -> Group:
    """Make the `Group` of torch's `process_group`, and check that it contains all processes of torch.distributed.
    `what`: the name of the part of the model that is spread over the group, which an error would show."""
    rank, count = (ask(process_group) for ask in (torch.distributed.get_rank, torch.distributed.get_world_size))
    world = torch.distributed.get_world_size()
    if count != world:
        raise ConfigError(
            f"is spread over {count} of the {world} processes of torch.distributed, but a peer must have all of them",
            key="model",
            value=what,
            mend="use the whole group, and start a group for each peer",
        )
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return Group(Rank(rank, count), process_group, device)


def _mesh(name: str, param: nn.Parameter) -> Any:
    """The mesh of a sharded parameter. Raises ConfigError if the parameter is sharded in an unsupported way."""
    distributed: Any = param
    mesh, placements = distributed.device_mesh, distributed.placements
    if mesh.ndim != 1:
        raise ConfigError(
            f"is sharded over a mesh of {mesh.ndim} dimensions, but only one dimension is supported",
            key="model",
            value=name,
            mend="use fully_shard without a second dimension (no HSDP, no tensor parallelism)",
        )
    (placement,) = placements
    if not (placement.is_replicate() or placement.is_shard(0)):
        raise ConfigError(
            f"is sharded as {placement}, but only rows (Shard(0)) are supported",
            key="model",
            value=name,
            mend="leave fully_shard's shard_placement_fn out",
        )
    return mesh


# -- the sockets


@contextmanager
def meeting(group: Group | None) -> Iterator[list[socket.socket]]:
    """A block in which the processes of the group are connected; all of them enter it at the same time. It yields
    sockets: on rank 0 one to each other rank in order, on any other rank the one to rank 0, and without a group none.
    If the block fails, the sockets are closed.

    Raises:
        ConfigError: some of them are on another host than rank 0.
        RankDied: not all of them connected.
    """
    if group is None or group.rank.count == 1:
        yield []
        return
    made = _opened(group) if group.rank.index == 0 else [_to_rank_0(group)]
    try:
        yield made
    except BaseException:
        for sock in made:
            sock.close()
        raise


def _opened(group: Group) -> list[socket.socket]:
    """Called on rank 0. Listen at a new socket, tell the other ranks its path, and return the sockets of their
    connections."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="p2p-diloco-")
    except OSError as error:
        raise _no_socket(group, tempfile.gettempdir(), error) from None
    with folder as name, socket.socket(socket.AF_UNIX) as listener:
        place = str(Path(name) / "ranks")
        try:
            listener.bind(place)
            listener.listen(group.rank.count)
        except OSError as error:  # for example a path that is too long
            raise _no_socket(group, name, error) from None
        _broadcast(group, place)
        _all_have_come(group, True)
        return _accepted(listener, group.rank.count)


def _no_socket(group: Group, folder: str, error: OSError) -> ConfigError:
    _broadcast(group, "")
    mend = "name a folder with a short path that can be written to"
    return ConfigError(f"allows no socket in {folder} ({error})", key="TMPDIR", mend=mend)


def _to_rank_0(group: Group) -> socket.socket:
    """Called on the other ranks. Connect to rank 0 and return the socket."""
    place = _broadcast(group, "")
    if not place:
        raise RankDied("rank 0 takes no connections", mend="see the log of rank 0")
    sock = _reached(place)
    _all_have_come(group, sock is not None)
    assert sock is not None, "a rank that could not connect has got an error already"
    sock.settimeout(COME_S)
    sock.sendall(group.rank.index.to_bytes(_HELLO_BYTES, "big"))
    return sock


def _accepted(listener: socket.socket, count: int) -> list[socket.socket]:
    """Accept one connection from each other rank. Returns their sockets in the order of the ranks."""
    found: dict[int, socket.socket] = {}
    give_up_at = time.monotonic() + COME_S
    try:
        while len(found) < count - 1:
            listener.settimeout(max(0.01, give_up_at - time.monotonic()))
            sock, _ = listener.accept()
            sock.settimeout(COME_S)
            found[int.from_bytes(sock.recv(_HELLO_BYTES), "big")] = sock
    except OSError as error:
        for sock in found.values():
            sock.close()
        raise RankDied(f"not all ranks have connected to rank 0 ({error})", mend="start the group again") from None
    return [found[rank] for rank in range(1, count)]


def _reached(place: str) -> socket.socket | None:
    """Connect to rank 0. None if rank 0 doesn't listen on this machine."""
    sock = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        sock.connect(place)
        return sock
    sock.close()
    return None


def _broadcast(group: Group, text: str) -> str:
    """Send rank 0's text to all ranks, and return it. Every rank calls this at the same time; only rank 0's argument
    counts."""
    message = torch.tensor(list(text.encode().ljust(PATH_BYTES, b"\0")), dtype=torch.uint8).to(group.device)
    source = torch.distributed.get_global_rank(group.process_group, 0)
    torch.distributed.broadcast(message, src=source, group=group.process_group)
    return bytes(message.cpu().tolist()).rstrip(b"\0").decode()


def _all_have_come(group: Group, here: bool) -> None:
    """Let all ranks know which of them could not reach rank 0. If there are any, all ranks raise the same error. Every
    rank calls this at the same time. `here`: whether this rank reached rank 0."""
    missing = torch.zeros(group.rank.count, dtype=torch.int32)
    missing[group.rank.index] = int(not here)
    missing = missing.to(group.device)
    torch.distributed.all_reduce(missing, group=group.process_group)
    away = [rank for rank, gone in enumerate(missing.tolist()) if gone]
    if away:
        raise ConfigError(
            "can't reach rank 0 on this machine: the ranks of one peer share memory, so all must be on one host",
            key="rank",
            value=away,
            mend="start a group on each host, each a peer of its own",
        )
