"""What the callbacks of all libraries do: enter the run, evaluate the global parameters, and leave. Also batches of a
shared data set, for a library that asks for its loader before the callback has entered the run.

Law: outside of `optimizer.step()` only this module changes the model's parameters, and it restores them, bit for bit,
before the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.errors import UsageError
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.peer import OptimizerOrWrapper, Peer
from p2p_diloco.peer.ranks import Replicated, bare
from p2p_diloco.peer.shard import Shard, ShardLoader
from p2p_diloco.tensors.buffers import candidates


class TakingPart:
    """One training's part in a run.

    Between `show_global` and `show_own` the model holds the global parameters, and the other peers know that this one
    makes no steps. After `leave` the model holds the global parameters for good.
    """

    def __init__(self, settings: Mapping[str, Any], ahead: int = 0) -> None:
        """`settings`: arguments of `Peer` other than model and optimizer; if empty, `Peer.from_env` makes the peer.
        `ahead`: the number of batches of shared data that the library fetches before the step on the first of them."""
        self._settings, self.ahead = dict(settings), ahead
        self._peer: Peer | AbsentPeer | None = None
        self._model: nn.Module
        self._own: dict[str, Tensor] = {}
        self._pause = ExitStack()
        self.loaders: list[SharedLoader] = []
        self.inside = False
        """Whether training takes part now: it has entered, and not left yet."""

    @property
    def begun(self) -> bool:
        """Whether training has entered a run; also true after it has left."""
        return self._peer is not None

    @property
    def peer(self) -> Peer | AbsentPeer:
        """The peer; also after it has left. Raises UsageError before training begins."""
        if self._peer is None:
            raise UsageError("training has not begun, so there is no peer yet", mend="ask for it after training began")
        return self._peer

    def enter(self, model: nn.Module, optimizer: OptimizerOrWrapper | list[OptimizerOrWrapper]) -> Peer | AbsentPeer:
        """Make the peer and enter the run. `model`: the model as it is trained, with its DistributedDataParallel if it
        has one. If an earlier training was ended by an exception and is still in the run, it leaves first."""
        self.leave()
        made = Peer(model, optimizer, **self._settings) if self._settings else Peer.from_env(model, optimizer)
        self._peer = made.__enter__()
        inner = bare(model)
        assert inner is not None
        self._model = inner
        self.inside = True
        return self._peer

    @property
    def data_is_used(self) -> bool:
        """Whether all peers together have used all of a shared data set."""
        return any(loader.complete for loader in self.loaders)

    def show_global(self) -> None:
        """Pause, and put the global parameters and buffers into the model, until `show_own`."""
        if not self.inside or self._own or isinstance(self.peer, AbsentPeer):
            return
        self._pause.enter_context(self.peer.pause())
        self._own = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        self._load(self.peer.global_state_dict())

    def show_own(self) -> None:
        """Put this peer's own parameters and buffers back, and end the pause."""
        self._load(self._own)
        self._own = {}
        self._pause.close()

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run, and load the run's result into the model. `error`: the exception that ended training; then the
        model keeps its parameters."""
        if not self.inside:
            return
        self.show_own()
        self.inside = False
        self.peer.__exit__(None if error is None else type(error), error, None)
        if error is None and not isinstance(self.peer, AbsentPeer):
            self._load(self.peer.global_state_dict())

    @torch.no_grad()
    def _load(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors().items() if values else ():
            tensor.copy_(values[name])

    def _tensors(self) -> dict[str, Tensor]:
        """The model's tensors that runs exchange, by name. A model may replace a buffer, so they are looked up anew."""
        trained = {name: param for name, param in self._model.named_parameters() if param.requires_grad}
        return {**trained, **dict(candidates(self._model))}


class OfARun:
    """The attributes that the callbacks of all libraries have for their users."""

    _part: TakingPart

    @property
    def peer(self) -> Peer | AbsentPeer:
        """The peer. It exists once training has begun, and can still be asked after training."""
        return self._part.peer

    def loader(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        name: str = "train",
        epochs: int | None = None,
        fingerprint: str = "",
        length: int | None = None,
        **arguments: Any,
    ) -> SharedLoader:
        """A loader of this peer's part of a data set that all peers share, for Trainer's `get_train_dataloader` or
        Lightning's `trainer.fit`. Arguments are those of `Peer.shard` and `Shard.loader`. Training ends when all epochs
        are used."""
        sharing = {"name": name, "epochs": epochs, "fingerprint": fingerprint, "length": length}
        arguments |= {"batch_size": batch_size, "ahead": self._part.ahead}
        self._part.loaders.append(SharedLoader(self._part, dataset, sharing, arguments))
        return self._part.loaders[-1]


def as_one_peer(model: nn.Module) -> nn.Module:
    """Mark a model as `Replicated` if torch.distributed has several processes. Call this if the library hands on the
    model without its DistributedDataParallel."""
    group = torch.distributed
    several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
    return Replicated(model) if several else model


class SharedLoader:
    """This peer's batches of a data set that all peers share. It has no length, and each loop goes on where the last
    one ended."""

    def __init__(
        self, part: TakingPart, dataset: Any, sharing: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        """`sharing`: arguments of `Peer.shard`; `arguments`: those of `Shard.loader`."""
        self._part, self._dataset, self._sharing, self._arguments = part, dataset, sharing, arguments
        self._made: tuple[Peer | AbsentPeer, Shard, ShardLoader] | None = None

    def __iter__(self) -> Iterator[Any]:
        peer = self._part.peer
        if self._made is None or self._made[0] is not peer:
            shard = peer.shard(self._dataset, **self._sharing)
            self._made = peer, shard, shard.loader(**self._arguments)
        return iter(self._made[2])

    @property
    def endless(self) -> bool:
        """Whether the data has no end."""
        return self._sharing["epochs"] is None

    @property
    def complete(self) -> bool:
        """Whether all peers together have used all of the data, as of this peer's last merge."""
        return self._made is not None and self._made[1].complete
