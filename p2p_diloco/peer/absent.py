"""A peer that is in no run. It has the methods of `Peer`, but only counts steps.

Law: if no run is named, a script that uses `Peer.from_env` behaves as if it did not use this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.peer.local import like_state_dict
from p2p_diloco.peer.metrics import Metrics
from p2p_diloco.peer.reported import Sinks, number, samples_of
from p2p_diloco.peer.session import after_each_step
from p2p_diloco.peer.shard import Alone, Shard, data_set
from p2p_diloco.tensors.layout import FragmentPlan


class AbsentPeer:
    """The object that `Peer.from_env` returns if no run is named. It counts steps. Its global parameters are the
    model's own."""

    peer_id = ""
    seed = 0
    peers: tuple[str, ...] = ()
    epoch = 0
    digest = ""
    finished = False

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        self.config = RunConfig()
        self.global_step = 0
        self._model = model
        self._shards: dict[str, Shard] = {}
        self._sinks = Sinks()
        self.sinks = self._sinks.all
        self._stop = None if optimizer is None else after_each_step(optimizer, self._count)

    @property
    def plan(self) -> FragmentPlan | None:
        """A plan that has all parameters in one fragment. None without a model."""
        return None if self._model is None else FragmentPlan(self._model)

    @property
    def metrics(self) -> Metrics:
        """The count of steps; all other counters are zero."""
        return Metrics(local_step=self.global_step)

    def report(
        self, *, loss: float | None = None, samples: int | None = None, held_out_loss: float | None = None
    ) -> None:
        """Only hand the reported values on to the sinks. Raises ConfigError for the same values as `Peer.report`."""
        loss, held_out_loss = number("loss", loss), number("held_out_loss", held_out_loss)
        samples = samples_of(samples)
        self._sinks.write(self.global_step, self.epoch, loss=loss, samples=samples, held_out_loss=held_out_loss)

    def refresh(self) -> bool:
        """Do nothing: there is nothing newer."""
        return False

    def shard(
        self,
        dataset: Dataset[Any] | Iterable[Any] | Callable[..., Iterable[Any]] | int,
        *,
        name: str = "train",
        epochs: int | None = None,
        fingerprint: str = "",
        length: int | None = None,
    ) -> Shard:
        """The whole data set, because there is no other peer. Its order is that of a run with the id "main"."""
        data, found = data_set(dataset, name, epochs, fingerprint, length)
        made = self._shards.setdefault(name, Shard(data, found, f"main/{name}", Alone(data)))
        return made.again(data, found)

    def slices(self, name: str, *, fingerprint: str = "") -> NoReturn:
        """Raise UsageError: data nodes serve a run's peers."""
        mend = "start this script with `p2p-diloco join ... -- COMMAND`, or read the files themselves"
        raise UsageError("come from a run's data nodes, and there is no run", key="slices", value=name, mend=mend)

    def force_sync(self) -> None:
        """Do nothing: there is no other peer."""

    def pause(self) -> AbstractContextManager[None]:
        """Do nothing: no other peer waits."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, for `load_state_dict` after a restart."""
        return {"local_step": self.global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting steps from the count in `state`."""
        self.global_step = int(state["local_step"])

    def global_state_dict(self) -> dict[str, Any]:
        """A copy of the model's own state. Entries that are no tensors are kept as they are."""
        own = {} if self._model is None else self._model.state_dict()
        state = like_state_dict(own)
        state.update((name, v.detach().clone() if isinstance(v, Tensor) else v) for name, v in own.items())
        return state

    def close(self) -> None:
        """Stop counting steps."""
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> AbsentPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self) -> None:
        for shard in self._shards.values():
            shard.stepped()
        self.global_step += 1
