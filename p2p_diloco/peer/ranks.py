"""Detects from the model which processes are one peer, and connects them to their rank 0 when the peer starts.

Law: torch.distributed carries only two small messages: where rank 0 listens, and which ranks could not connect. No
parameter is sent here. A rank takes rank 0's Unix socket if it can, because memory can be shared over it; a rank on
another host takes TCP. Rank 0 stops listening as soon as all ranks have connected.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from p2p_diloco.errors import ConfigError, RankDied, UsageError
from p2p_diloco.net.tcp import set_up
from p2p_diloco.node.shared import shareable
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


# -- they meet

ADDRESSES_MAX = 24
"""The most addresses of rank 0's host that are tried."""
BEGIN_S = 60.0
"""Deadline for rank 0's answer over a Unix socket, and for the first bytes that follow over any connection."""
LOOK_EVERY_S = 0.1
"""Seconds between two moments at which rank 0 checks whether it should stop waiting."""
DIAL_S = 3.0
"""Deadline for connecting to one address, and for the first bytes, which the connecting rank sends to rank 0."""
ANSWER_S = 10.0
"""Deadline for rank 0's answer over TCP. At an address of rank 0's host, another program may listen instead."""
SILENT_S = 30.0
"""Seconds after which a TCP connection ends if the other host has acknowledged nothing."""
_SECRET_BYTES, _RANK_BYTES = 16, 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where rank 0 listens: at a Unix socket, and at a TCP port of its host's addresses. `secret`: hex digits; each end
    shows the other end one half of them."""

    path: str
    addresses: Sequence[str]
    port: int
    secret: str

    @property
    def halves(self) -> tuple[bytes, bytes]:
        """The half of the secret that a rank shows, and the half that rank 0 answers with."""
        secret = bytes.fromhex(self.secret)
        return secret[:_SECRET_BYTES], secret[_SECRET_BYTES:]


@contextmanager
def meeting(group: Group | None) -> Iterator[list[socket.socket]]:
    """A block in which the processes of the group are connected; all of them enter it at the same time. It yields
    sockets: on rank 0 one to each other rank in order, on any other rank the one to rank 0, and without a group none.
    If the block fails, the sockets are closed.

    Raises:
        ConfigError: some of them can't reach rank 0.
        RankDied: rank 0 takes no connections.
    """
    if group is None or group.rank.count == 1:
        yield []
        return
    with ExitStack() as sockets:  # closes them, unless the block ends well
        made = _opened(group, sockets) if group.rank.index == 0 else [_to_rank_0(group, sockets)]
        for sock in made:
            sock.settimeout(BEGIN_S)
        yield made
        sockets.pop_all()


# -- rank 0


def _opened(group: Group, sockets: ExitStack) -> list[socket.socket]:
    """Listen, tell the other ranks where, and return the sockets of their connections, which `sockets` closes."""
    with ExitStack() as stack:
        folder = tempfile.gettempdir()
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="p2p-diloco-"))
            near = stack.enter_context(socket.socket(socket.AF_UNIX))
            near.bind(str(Path(folder) / "ranks"))
        except OSError as error:  # for example a path that is too long
            _broadcast(group, None)
            mend = "name a folder with a short path that can be written to"
            raise ConfigError(f"allows no socket in {folder} ({error})", key="TMPDIR", mend=mend) from None
        far = stack.enter_context(socket.socket())
        far.bind(("", 0))
        for listener in (near, far):
            listener.listen(group.rank.count)
        addresses = _addresses()
        place = Place(near.getsockname(), addresses, far.getsockname()[1], secrets.token_hex(2 * _SECRET_BYTES))
        _broadcast(group, place)
        found: dict[int, socket.socket] = {}
        with _all_have_come(group, True, place) as over:
            for rank, sock in _accepted((near, far), group.rank.count, place, over):
                found[rank] = sockets.enter_context(sock)
        return [sock for _, sock in sorted(found.items())]


def _addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this host; loopback addresses only if there are no others."""
    links = psutil.net_if_addrs().values()
    found = [each.address for link in links for each in link if each.family == socket.AF_INET]
    return tuple([address for address in found if not address.startswith("127.")] or found)[:ADDRESSES_MAX]


def _accepted(
    listeners: Sequence[socket.socket], count: int, place: Place, over: Callable[[], bool]
) -> Iterator[tuple[int, socket.socket]]:
    """Accept one connection from each other rank, until all have come, or it is `over`. Yields the ranks and their
    sockets."""
    missing = {*range(1, count)}
    with selectors.DefaultSelector() as ready:
        for listener in listeners:
            ready.register(listener, selectors.EVENT_READ)
        while missing and not over():
            for key, _ in ready.select(LOOK_EVERY_S):
                sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                rank = _greeted(sock, place)
                if rank is not None and rank in missing:
                    missing.remove(rank)
                    yield rank, sock
                else:
                    sock.close()


def _greeted(sock: socket.socket, place: Place) -> int | None:
    """Greet a process that has connected. Returns its rank; None if it does not know the secret, so it is no rank."""
    theirs, ours = place.halves
    with contextlib.suppress(OSError):
        _set_up(sock)
        said = _received(sock, _SECRET_BYTES + _RANK_BYTES)
        if hmac.compare_digest(said[:_SECRET_BYTES], theirs):
            sock.sendall(ours)
            return int.from_bytes(said[_SECRET_BYTES:], "big")
    return None


# -- the other ranks


def _to_rank_0(group: Group, sockets: ExitStack) -> socket.socket:
    """Connect to rank 0 and return the socket, which `sockets` closes."""
    place = _broadcast(group, None)
    if place is None:
        raise RankDied("rank 0 takes no connections", mend="see the log of rank 0")
    if (sock := _reached(place, group.rank.index)) is not None:
        sockets.enter_context(sock)
    with _all_have_come(group, sock is not None, place):
        pass
    assert sock is not None, "a rank that could not connect has got an error already"
    return sock


def _reached(place: Place, rank: int) -> socket.socket | None:
    """Connect to rank 0, on this machine or at one of its addresses. None if it can't be reached."""
    for family, address in ((socket.AF_UNIX, place.path), *((socket.AF_INET, each) for each in place.addresses)):
        sock = socket.socket(family)
        ours, theirs = place.halves
        with contextlib.suppress(OSError):
            sock.settimeout(DIAL_S)
            sock.connect(address if family == socket.AF_UNIX else (address, place.port))
            _set_up(sock)
            sock.sendall(ours + rank.to_bytes(_RANK_BYTES, "big"))
            sock.settimeout(BEGIN_S if shareable(sock) else ANSWER_S)
            if hmac.compare_digest(_received(sock, _SECRET_BYTES), theirs):  # or another program listens there
                return sock
        sock.close()
    return None


# -- both


def _set_up(sock: socket.socket) -> None:
    """Set the socket's deadline to `DIAL_S`. Also let a TCP connection end soon after its other host has gone."""
    sock.settimeout(DIAL_S)
    if not shareable(sock):
        set_up(sock)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * SILENT_S))


def _received(sock: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes; fewer if the other end closes."""
    found = b""
    while len(found) < count and (more := sock.recv(count - len(found))):
        found += more
    return found


def _broadcast(group: Group, place: Place | None) -> Place | None:
    """Send the `place` that rank 0 gives to all ranks, and return it on each of them. Every rank calls this at the same
    time; other ranks give None. The result is None if rank 0 could not listen."""
    told = [place]
    torch.distributed.broadcast_object_list(told, src=0, device=group.device)
    return told[0]


@contextmanager
def _all_have_come(group: Group, here: bool, place: Place) -> Iterator[Callable[[], bool]]:
    """A block at whose end all ranks know which of them have not met rank 0. If there are any, all ranks raise the same
    error. Every rank enters the block at the same time, rank 0 before it has answered the others: it yields a function
    that tells whether all have come or given up. `here`: whether this rank has met rank 0."""
    missing = torch.zeros(group.rank.count, dtype=torch.int32, device="cpu")
    missing[group.rank.index] = int(not here)
    missing = missing.to(group.device)
    work = torch.distributed.all_reduce(missing, async_op=True)
    yield work.is_completed
    work.wait()
    away = [rank for rank, gone in enumerate(missing.tolist()) if gone]
    if away:
        raise ConfigError(
            f"can't reach rank 0 at TCP port {place.port} of {' or '.join(place.addresses) or 'its host'}",
            key="rank",
            value=away,
            mend="let TCP connections from their hosts to the host of rank 0 through, as torch.distributed needs, too",
        )
