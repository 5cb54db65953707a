"""A training script: one peer with given gradients. Options are JSON, output is JSON lines.

In `sync_every` steps of the inner SGD (lr 1) each element of the parameters changes by -`delta`. If asked for, a
`saboteur` takes the node's place. A line on stdin ends the pauses (`step_s`) between steps; from a given epoch on they
may be others (`changes`). With `stays` the peer leaves an ended run only once stdin is closed.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from p2p_diloco import P2PDilocoError, Peer, PeerConfig
from p2p_diloco.core.version import Version, model_version
from p2p_diloco.peer import node_client


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, "time": time.time(), **values}), flush=True)


def peer_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any], config: dict[str, Any] | None = None
) -> Peer:
    """The peer of a program's options. The program logs under its name, and computes with one thread."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    torch.set_num_threads(1)
    given = {key: options[key] for key in ("run_id", "initial_peers")}
    local = PeerConfig(name=options["name"], open=True, **options.get("local", {}))
    return Peer(model, optimizer, **given, config=options.get("config", {}) if config is None else config, local=local)


class Tied(nn.Module):
    """A model with a tied parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def build(options: dict[str, Any]) -> nn.Module:
    if options.get("kind") == "tied":
        return Tied()
    model = nn.Module()
    for name, shape in options.get("params", {"w": [3]}).items():
        model.register_parameter(name, nn.Parameter(torch.full(shape, options.get("theta", 0.0))))
    return model


def sabotage(plan: dict[str, Any]) -> None:
    """Let the saboteur run as the node's process."""
    command = node_client._command

    def sabotaged(*arguments: Any) -> list[str]:
        node = command(*arguments)
        assert node[1:3] == ["-m", "p2p_diloco.node"]
        return [node[0], str(Path(__file__).with_name("saboteur.py")), json.dumps(plan), *node[3:]]

    node_client._command = sabotaged


def state_of(peer: Peer, epoch: int) -> tuple[str, bool, int]:
    """The digest at this moment, whether all fragments are at this epoch (they advance one by one), and how many inner
    steps (samples, if reported) they count."""
    versions = [Version(*version) for version in peer._entered.node.client.ask("ask", "told")["versions"]]
    counted = sum(version.samples for version in versions) // len(versions)
    return model_version(versions).digest, {version.epoch for version in versions} == {epoch}, counted


def theta_of(peer: Peer) -> str:
    """The hash of the global parameters that were merged last."""
    state = peer.global_state_dict()
    return blake3(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def train(peer: Peer, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    hurry = threading.Event()
    threading.Thread(target=lambda: sys.stdin.readline() and hurry.set(), daemon=True).start()
    epoch, synced, first = peer.epoch, 0, next(model.parameters())
    share = options.get("delta", 1.0) / peer.config.sync_every
    changes_at = options.get("changes", {}).get("epoch", math.inf)
    while not peer.finished and peer.metrics.local_step < options.get("steps", math.inf):
        hurry.wait(options.get("step_s", 0.0) if epoch < changes_at else options["changes"]["step_s"])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, share)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer += 1
        if options.get("samples"):
            peer.report(samples=options["samples"], loss=options.get("loss"))
        optimizer.step()
        metrics = peer.metrics
        if peer.epoch != epoch:
            epoch, took_part, synced = peer.epoch, metrics.sync_count > synced, metrics.sync_count
            digest, whole, counted = state_of(peer, epoch)
            if options.get("values"):
                known = {name: value.tolist() for name, value in peer.global_state_dict().items()}
                say("values", epoch=epoch, digest=peer.digest, theta=known)
            say(
                "epoch", epoch=epoch, synced=took_part and whole, whole=whole, digest=digest, step=peer.global_step,
                local=metrics.local_step, counted=counted, value=first.detach().flatten()[0].item(),
                sync_s=metrics.last_sync_time_s, waiting_s=metrics.waiting_time_s, sent=metrics.bytes_sent,
                dropped=metrics.dropped_samples, peers=metrics.peers,
                **({"theta": theta_of(peer)} if options.get("hashes") else {}),
            )  # fmt: skip


def main(options: dict[str, Any]) -> int:
    logging.getLogger("p2p_diloco").setLevel(options.get("log", "DEBUG"))
    if "sabotage" in options:
        sabotage(options["sabotage"])
    model = build(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    status = 0
    say("joining")
    try:
        with peer_of(model, optimizer, options) as peer:
            first, epoch = next(model.parameters()).detach().flatten()[0].item(), peer.epoch
            digest, whole, _ = state_of(peer, epoch)
            say(
                "in", peer_id=peer.peer_id, addresses=peer.addresses, epoch=epoch, step=peer.global_step, value=first,
                sync_every=peer.config.sync_every, digest=digest, whole=whole,
            )  # fmt: skip
            try:
                train(peer, model, optimizer, options)
            finally:
                say("leaving")
                if peer.finished:
                    say("finished", epoch=peer.epoch, digest=peer.digest)
                if options.get("stays"):
                    sys.stdin.read()
        say("after", epoch=peer.epoch, digest=peer.digest)
    except P2PDilocoError as error:
        say("error", kind=type(error).__name__, sentence=error.sentence)
        status = error.exit_code
    except KeyboardInterrupt:
        status = 130
    say("left")
    return status


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
