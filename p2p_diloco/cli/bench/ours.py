"""A peer of a run, with its node and its p2pd.

Law: a `Peer` as any script would use it. Its optimizer does nothing, for training is not measured: the time that
`optimizer.step()` takes is the exchange's.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from p2p_diloco.cli.bench.member import (
    CODEC,
    EXCHANGE,
    MERGE,
    OUTER_STEP,
    PSEUDO_GRADIENT,
    TRAINING,
    Line,
    Member,
)
from p2p_diloco.cli.bench.work import Synthetic, model_of
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.node.run import reply_codec_of
from p2p_diloco.peer import Peer
from p2p_diloco.tensors import codec as codecs

TIMES = {
    PSEUDO_GRADIENT: "pseudo_gradient_time_s",
    CODEC: "codec_time_s",
    OUTER_STEP: "outer_step_time_s",
    MERGE: "merge_time_s",
}
"""Where a part of a round is in `peer.metrics`; the rest is the exchange."""


class Still(torch.optim.Optimizer):
    """An optimizer whose steps change nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no loss to give back
        """No step at all; a peer's hook follows it."""


class Contender(Member):
    """A peer."""

    def __init__(self, asked: Line, leaving: ExitStack) -> None:
        super().__init__(asked, leaving)
        self._config = RunConfig(**asked["config"])
        self._initial_peers: list[str] = []

    def open(self, first: Line) -> Line:
        self._initial_peers = first.get("addresses", [])  # the seed's
        return {}

    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        asked = self.asked
        model = model_of(asked["parameters"], self._config.num_fragments)
        self._train = Synthetic(model, asked["rank"]).train
        self._optimizer = Still(model.parameters(), {})
        local = PeerConfig(
            name=asked["name"],
            run_id=asked["run_id"],
            initial_peers=tuple(self._initial_peers),
            host_maddrs=tuple(asked["host_maddrs"]),
            direct=asked["direct"],
        )
        self._peer = self.leaving.enter_context(Peer(model, self._optimizer, config=self._config, local=local))
        return {"addresses": list(self._peer.addresses), "wire_bytes": wire_bytes(self._config, asked["of"])}

    def train(self) -> Line:
        self._train()
        return {}

    def round(self) -> Line:
        before, began, step_s = self._peer.metrics, time.perf_counter(), self.asked["step_s"]
        for _step in range(self._config.sync_every):
            if step_s:
                time.sleep(step_s)
            self._optimizer.step()
        took_s, after = time.perf_counter() - began, self._peer.metrics

        def gone(counter: str) -> float:
            """By how much a counter has risen in this round."""
            return float(getattr(after, counter) - getattr(before, counter))

        times = {TRAINING: "inner_time_s", **TIMES} if step_s else TIMES
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
