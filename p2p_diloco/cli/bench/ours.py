"""`python -m p2p_diloco.cli.bench.ours OPTIONS`: a peer of a run that is measured, with its node and its p2pd.

Law: a `Peer` as any script would use it. Its optimizer does nothing, for training is none of what is measured: what
`optimizer.step()` takes is the exchange.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from p2p_diloco.cli.bench.parts import CODEC, EXCHANGE, MERGE, OUTER_STEP, PSEUDO_GRADIENT, TRAINING
from p2p_diloco.cli.bench.side import Clock, options, say, serve
from p2p_diloco.cli.bench.work import Synthetic, model_of
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import P2PDilocoError
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


class Measured:
    """A peer, and the answers to what it is asked to do."""

    def __init__(self, asked: dict[str, Any], leaving: ExitStack) -> None:
        self._asked, self._leaving = asked, leaving

    def make(self, _: dict[str, Any]) -> dict[str, Any]:
        """Join the run, or found it."""
        asked = self._asked
        config = RunConfig(**asked["config"])
        model = model_of(asked["parameters"], config.num_fragments)
        self._train = Synthetic(model, asked["rank"]).train
        self._optimizer = Still(model.parameters(), {})
        local = PeerConfig(name=asked["name"], **asked["local"])
        run_id, initial_peers = asked["run_id"], asked["initial_peers"]
        peer = Peer(model, self._optimizer, run_id=run_id, initial_peers=initial_peers, config=config, local=local)
        self._peer = self._leaving.enter_context(peer)
        return {"addresses": list(self._peer.addresses)}

    def train(self, _: dict[str, Any]) -> dict[str, Any]:
        """Move the parameters."""
        self._train()
        return {}

    def round(self, _: dict[str, Any]) -> dict[str, Any]:
        """Exchange every fragment once, while training goes on or stands still."""
        before, began, step_s = self._peer.metrics, time.perf_counter(), self._asked["step_s"]
        for _step in range(self._peer.config.sync_every):
            if step_s:
                time.sleep(step_s)
            self._optimizer.step()
        took_s, after = time.perf_counter() - began, self._peer.metrics
        clock, times = Clock(), {TRAINING: "inner_time_s", **TIMES} if step_s else TIMES
        clock.parts = {part: getattr(after, name) - getattr(before, name) for part, name in times.items()}
        clock.parts[EXCHANGE] = took_s - sum(clock.parts.values())
        return clock.round(
            took_s,
            exchanges=after.sync_count - before.sync_count,
            waiting_s=after.waiting_time_s - before.waiting_time_s,
            hidden_s=after.hidden_time_s - before.hidden_time_s,
            digest=self._peer.digest,
        )


def wire_bytes(config: RunConfig, parameters: int) -> int:
    """Bytes of one contribution and one commit of the whole model."""
    return codecs.nbytes(config.codec, parameters) + codecs.nbytes(reply_codec_of(config), parameters)


def main() -> int:
    """Take part until told to end; the exit status."""
    asked = options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    say("sizes", wire_bytes=wire_bytes(RunConfig(**asked["config"]), asked["of"]))
    try:
        with ExitStack() as leaving:
            one = Measured(asked, leaving)
            serve({"make": one.make, "train": one.train, "round": one.round})
    except P2PDilocoError as error:
        sys.stderr.write(f"{error.sentence}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
