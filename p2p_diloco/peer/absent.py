"""A peer in no run: it has the methods of `Peer`, which only count steps.

Law: if no run is named, a script that uses `Peer.from_env` behaves as if it did not use this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_diloco.config import RunConfig
from p2p_diloco.peer.metrics import Metrics
from p2p_diloco.tensors.layout import FragmentPlan


class AbsentPeer:
    """`Peer.from_env`'s result if no run is named. Steps are counted; the global parameters are the model's own."""

    peer_id = ""
    peers: tuple[str, ...] = ()
    epoch = 0
    digest = ""
    finished = False

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        self.config = RunConfig()
        self.global_step = 0
        self._model = model
        self._handle = None if optimizer is None else optimizer.register_step_post_hook(self._count)

    @property
    def plan(self) -> FragmentPlan | None:
        """The plan with all parameters in one fragment; None without a model."""
        return None if self._model is None else FragmentPlan(self._model)

    @property
    def metrics(self) -> Metrics:
        """The count of steps; all other counters are zero."""
        return Metrics(local_step=self.global_step)

    def report(self, *, loss: float | None = None, samples: int | None = None) -> None:
        """Does nothing."""

    def force_sync(self) -> None:
        """Does nothing: there is no other peer."""

    def pause(self) -> AbstractContextManager[None]:
        """Does nothing: no peer waits."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The count of steps, to go on counting after a restart."""
        return {"local_step": self.global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting steps from `state`."""
        self.global_step = int(state["local_step"])

    def global_state_dict(self) -> dict[str, Tensor]:
        """A copy of the model's own state."""
        state = {} if self._model is None else self._model.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    def close(self) -> None:
        """Stop counting."""
        if self._handle is not None:
            self._handle.remove()

    def __enter__(self) -> AbsentPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, *_: object) -> None:
        self.global_step += 1
