"""The contender `ours`: a peer of a run, with its node and its p2pd.

Law: uses a `Peer` as any script would. Its optimizer does nothing, so that the time of `optimizer.step()` is the
exchange's. Inner steps, if the plan has them, compute with a network that isn't exchanged.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from examples.benchmarks.member import (
    CODEC,
    EXCHANGE,
    MERGE,
    OUTER_STEP,
    PSEUDO_GRADIENT,
    TRAINING,
    Line,
    Member,
)
from examples.benchmarks.plan import Plan
from examples.benchmarks.work import Synthetic, Training, model_of
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.node.run import reply_codec_of
from p2p_diloco.peer import Peer
from p2p_diloco.peer.devices import finish, usable
from p2p_diloco.tensors import codec as codecs

TIMES = {
    PSEUDO_GRADIENT: "pseudo_gradient_time_s",
    CODEC: "codec_time_s",
    OUTER_STEP: "outer_step_time_s",
    MERGE: "merge_time_s",
}
"""The field of `peer.metrics` with the time of each part of a round; the rest is the exchange."""


class Still(torch.optim.Optimizer):
    """An optimizer whose steps change nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no loss to give back
        """Change no parameter. The peer's hook runs after each call."""


class Contender(Member):
    """A peer of the measured run. The seed, a peer without a rank, is alone in another run, whose model has one
    parameter."""

    def __init__(self, plan: Plan, asked: Line, leaving: ExitStack) -> None:
        super().__init__(plan, asked, leaving)
        self._config = plan.config()
        self._initial_peers: list[str] = []

    def open(self, first: Line) -> Line:
        self._initial_peers = first.get("addresses", [])  # the seed's addresses
        return {}

    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        plan, rank, config = self.plan, self.asked["rank"], self._config
        seed = rank is None
        self._device = usable(plan.device)
        model = (model_of(1, 1) if seed else model_of(plan.parameters, plan.tensors)).to(self._device)
        self._train = Synthetic(model, rank or 0).train
        if plan.step_s:
            self._training = Training(self._device)
        self._optimizer = Still(model.parameters(), {})
        local = PeerConfig(
            name=self.asked["name"],
            run_id="seed" if seed else "bench",
            initial_peers=tuple(self._initial_peers),
            host_maddrs=tuple(self.asked["host_maddrs"]),
            direct=plan.direct,
            on_exit="drop",  # at the end nothing more is measured
            open=True,  # must be said on simulated machines, which aren't on loopback
        )
        small = RunConfig(codec=config.codec)
        run = Peer(model, self._optimizer, config=small if seed else config, local=local)
        self._peer = self.leaving.enter_context(run)
        return {"addresses": list(self._peer.addresses), "wire_bytes": wire_bytes(config, plan.parameters)}

    def calibrate(self) -> Line:
        """How many passes of the training network take as long as an inner step."""
        return {"passes": self._training.passes(2 * self.plan.step_s) / 2}

    def work(self, passes: int) -> Line:
        """From now on an inner step has as many passes."""
        self._passes = passes
        return {}

    def alone(self) -> Line:
        """Make a round's inner steps without any exchange."""
        began = time.perf_counter()
        for _step in range(self._config.sync_every):
            self._training.step(self._passes)
        return {"took_s": time.perf_counter() - began}

    def train(self) -> Line:
        self._train()
        finish(self._device)
        return {}

    def round(self) -> Line:
        before, began, trains = self._peer.metrics, time.perf_counter(), self.plan.step_s > 0
        for _step in range(self._config.sync_every):
            if trains:
                self._training.step(self._passes)
            self._optimizer.step()
        finish(self._device)
        took_s, after = time.perf_counter() - began, self._peer.metrics

        def gone(counter: str) -> float:
            """The increase of the peer's counter in this round."""
            return float(getattr(after, counter) - getattr(before, counter))

        times = {TRAINING: "inner_time_s", **TIMES} if trains else TIMES
        parts = {part: gone(counter) for part, counter in times.items()}
        return {
            "took_s": took_s,
            "parts": {**parts, EXCHANGE: took_s - sum(parts.values())},
            "exchanges": gone("sync_count"),
            "waiting_s": gone("waiting_time_s"),
            "hidden_s": gone("hidden_time_s"),
            "digest": self._peer.digest,
        }


def wire_bytes(config: RunConfig, parameters: int) -> int:
    """Bytes of one contribution and one commit of the whole model."""
    return codecs.nbytes(config.codec, parameters) + codecs.nbytes(reply_codec_of(config), parameters)
