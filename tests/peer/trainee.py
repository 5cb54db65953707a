"""A training script for tests: one process, one peer. It gets a JSON object, and says what it does in JSON lines.

The inner optimizer is SGD with learning rate 1 and the gradient is set by hand, so that in `sync_every` steps each
element of the parameters moves by exactly -`delta`. A line on stdin ends the pauses (`step_s`) between steps; with
`stays` the peer leaves an ended run only once stdin is closed. `default_device`: where torch makes tensors by default,
once the model is made in host memory.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from p2p_diloco import P2PDilocoError, Peer, PeerConfig


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, "time": time.time(), **values}), flush=True)


class Tied(nn.Module):
    """A model with a tied parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def gpt2() -> nn.Module:
    """A small model of Transformers, which ties its embedding to its output."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def build(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if "kind" in options:
        return {"tied": Tied, "gpt2": gpt2}[options["kind"]]()
    model = nn.Module()
    dtype = getattr(torch, options.get("dtype", "float32"))
    for name, size in options.get("params", {"w": 3}).items():
        model.register_parameter(name, nn.Parameter(torch.full((size,), options.get("theta", 0.0), dtype=dtype)))
    if "frozen" in options:
        model.register_parameter("base", nn.Parameter(torch.full((5,), options["frozen"]), requires_grad=False))
    return model


def train(peer: Peer, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    hurry = threading.Event()
    if "step_s" in options:
        threading.Thread(target=lambda: sys.stdin.readline() and hurry.set(), daemon=True).start()
    epoch = peer.epoch
    while not peer.finished and peer.metrics.local_step < options.get("steps", math.inf):
        for parameter in model.parameters():
            delta = float("nan") if options.get("nan_at") == peer.metrics.local_step else options["delta"]
            parameter.grad = torch.full_like(parameter, delta / peer.config.sync_every)
        if options.get("samples"):
            peer.report(loss=0.5, samples=options["samples"])
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer += 1
        optimizer.step()
        if peer.epoch != epoch:
            epoch = peer.epoch
            values = torch.cat([p.detach().float().flatten() for p in model.parameters()]).tolist()
            known = {name: value.tolist() for name, value in peer.global_state_dict().items()}
            say("epoch", epoch=epoch, values=values, digest=peer.digest, step=peer.global_step, theta=known)
        if options.get("force_at") == peer.metrics.local_step:
            peer.force_sync()
            say("forced", epoch=peer.epoch)
        hurry.wait(options.get("step_s", 0.0))
    if "fails" in options:
        raise RuntimeError(options["fails"])
    say("finished", epoch=peer.epoch, digest=peer.digest)
    if options.get("stays"):
        sys.stdin.read()


def main(options: dict[str, Any]) -> int:
    logging.basicConfig(level=logging.INFO, format=f"{options['name']}: %(message)s")
    logging.getLogger("p2p_diloco").setLevel(options.get("log_level", logging.INFO))
    local = PeerConfig(name=options["name"], **options.get("local", {}))
    model = None if options.get("aggregator") else build(options)
    torch.set_default_device(options.get("default_device"))
    optimizer = None if model is None else torch.optim.SGD(model.parameters(), lr=1.0)
    begun = time.time()
    try:
        peer = Peer(
            model, optimizer, run_id=options["run_id"], initial_peers=options["initial_peers"],
            config=options["config"], local=local,
        )  # fmt: skip
        with peer:
            pids = [] if peer._entered.node is None else [peer._entered.node.pid]
            say(
                "in",
                peer_id=peer.peer_id,
                seed=peer.seed,
                addresses=peer.addresses,
                epoch=peer.epoch,
                pids=pids,
                metrics=asdict(peer.metrics),
            )
            if model is None or optimizer is None:
                while not peer.finished:
                    time.sleep(0.05)
                say("finished", epoch=peer.epoch, digest=peer.digest)
            else:
                train(peer, model, optimizer, options)
            begun = time.time()
        if model is not None:
            theta = {name: value.tolist() for name, value in peer.global_state_dict().items()}
            say("after", theta=theta, epoch=peer.epoch, digest=peer.digest, steps=peer.metrics.local_step)
    except P2PDilocoError as error:
        say("error", kind=type(error).__name__, sentence=error.sentence)
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        say("left", after_s=time.time() - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
