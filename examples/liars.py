"""What a peer that lies about its pseudo-gradient does to a run, by what it sends and by `aggregation`.

Synchronous rounds of the built-in trainer, three honest peers and a liar in this one process: no network, no node.
Contributions are encoded in bf16, averaged shard by shard by the function that an aggregator uses, and take one outer
step, as in a run. A liar knows what the others send in the same round. Prints the table of docs/robustness.md.

python examples/liars.py --seeds 0 1 2                              # everything, half an hour on one core
python examples/liars.py --sent zeros --methods clip --seeds 0

A run leaves one line of JSON in --results; a second call makes only the missing runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from learning import HELD_OUT, draw, flat, inner_steps, load, warmed
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import Layout, Shard, specs_of
from p2p_diloco.tensors.limits import Aggregation
from p2p_diloco.tensors.mean import WEIGHT_MAX, weighted_mean
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.train import mean_loss

HONEST = 3
CODEC = "bf16"
OUTER = OuterOptimizer(lr=0.7, momentum=0.9)
METHODS: tuple[Aggregation, ...] = ("mean", "clip", "centered_clip")


class Known(NamedTuple):
    """What a liar knows when it sends: pseudo-gradients [parameters] each."""

    own: Tensor
    """What it should send."""
    first: Tensor
    """What it should have sent in the first round."""
    others: Tensor
    """The honest peers' contributions of this round, [peers, parameters]."""
    random: torch.Generator


class Lie(NamedTuple):
    send: Callable[[Known], Tensor]
    weight: float = 1.0
    """Times the honest weight."""


class Group(NamedTuple):
    """The peers of a run."""

    paces: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Inner steps of each honest peer in a round, as shares of H."""
    lie: Lie | None = None
    """What one more peer, of full pace, sends."""


def _noise(known: Known) -> Tensor:
    noise = torch.randn(len(known.own), generator=known.random)
    return noise * (10 * known.own.norm() / noise.norm())


NONE = "no fourth peer"
GROUPS = {
    NONE: Group(),
    "an honest contribution": Group(lie=Lie(lambda known: known.own)),
    "its own, sign flipped": Group(lie=Lie(lambda known: -known.own)),
    "its own, sign flipped, × 10": Group(lie=Lie(lambda known: -10 * known.own)),
    "noise, 10 times as long as its own": Group(lie=Lie(_noise)),
    "minus the mean of the others": Group(lie=Lie(lambda known: -known.others.mean(0))),
    "zeros": Group(lie=Lie(lambda known: torch.zeros_like(known.own))),
    "stale: its first one, each round": Group(lie=Lie(lambda known: known.first)),
    "its own, × 1000": Group(lie=Lie(lambda known: 1000 * known.own)),
    "its own, sign flipped, weight 2⁴⁰": Group(lie=Lie(lambda known: -known.own, WEIGHT_MAX)),
    "no third and no fourth peer": Group((1.0, 1.0)),
    "no third peer; its own, sign flipped, × 10": Group((1.0, 1.0), Lie(lambda known: -10 * known.own)),
    "no fourth peer; honest ones of pace 1 : 1/2 : 1/5": Group((1.0, 0.5, 0.2)),
}


@cache
def start(seed: int, steps: int) -> Tensor:
    """The parameters from which all runs of a seed begin."""
    return warmed(seed, steps)


class Run:
    """The global parameters of one run, and what a round does to them."""

    def __init__(self, theta: Tensor, shards: Sequence[Shard], method: Aggregation) -> None:
        self.theta, self._shards, self._method = theta, shards, method
        self._states = [OUTER.init_state(shard.numel) for shard in shards]

    def step(self, sent: Sequence[Tensor], weights: Sequence[float]) -> None:
        """One outer step of every shard on the contributions [parameters] of all peers."""
        new = self.theta.clone()
        for index, shard in enumerate(self._shards):
            place = slice(shard.start, shard.stop)
            given = [
                (f"peer{peer}", weight, codecs.encode(values[place].contiguous(), CODEC))
                for peer, (values, weight) in enumerate(zip(sent, weights, strict=True))
            ]
            mean = weighted_mean(given, CODEC, shard.numel, codecs.written_in(CODEC, "nearest"), self._method)
            decoded = codecs.decode(codecs.encode(mean, CODEC), CODEC, shard.numel)
            new[place], self._states[index] = OUTER.step(self.theta[place], self._states[index], decoded)
        self.theta = new


def held_out_loss(group: Group, method: Aggregation, seed: int, asked: argparse.Namespace) -> float:
    """Held-out loss of the global parameters after the last round, nats a byte; infinite if the run has diverged."""
    lie, paces = group.lie, [*group.paces, *([1.0] if group.lie else [])]
    models = [GPT(GPTConfig(seed=seed)) for _ in paces]
    run = Run(start(seed, asked.warm_start), Layout.build(specs_of(models[0]), 1).shards, method)
    steps = [max(1, round(pace * asked.sync_every)) for pace in paces]
    training = [
        inner_steps(model, draw(seed, f"peer{peer}"), asked.rounds * count, asked.rounds * count)
        for peer, (model, count) in enumerate(zip(models, steps, strict=True))
    ]
    random, first = torch.Generator().manual_seed(seed), torch.empty(0)
    for turn in range(asked.rounds):
        for model, inner, count in zip(models, training, steps, strict=True):
            load(model, run.theta)
            for _ in range(count):
                next(inner)
        sent = [run.theta - flat(model) for model in models]
        weights = [float(count) for count in steps]
        if lie is not None:
            first = sent[-1] if turn == 0 else first
            sent[-1] = lie.send(Known(sent[-1], first, torch.stack(sent[:-1]), random))
            weights[-1] = min(lie.weight * weights[-1], WEIGHT_MAX)
        if not all(math.isfinite(values.abs().max()) for values in sent):
            return math.inf
        run.step(sent, weights)
    load(models[0], run.theta)
    return mean_loss(models[0], HELD_OUT)


def made(asked: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """The losses of all seeds by what is sent and method; runs that are missing in the file are made."""
    file = Path(asked.results)
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    shape = [asked.rounds, asked.sync_every, asked.warm_start]
    losses: dict[tuple[str, str, int], float] = {
        tuple(row["run"]): row["loss"] for row in known if row["shape"] == shape
    }
    for sent, method, seed in product(asked.sent, asked.methods, asked.seeds):
        if (sent, method, seed) in losses:
            continue
        losses[sent, method, seed] = loss = held_out_loss(GROUPS[sent], method, seed, asked)
        with file.open("a") as lines:
            lines.write(json.dumps({"shape": shape, "run": [sent, method, seed], "loss": loss}) + "\n")
    return {
        (sent, method): [losses[sent, method, seed] for seed in asked.seeds]
        for sent, method in product(asked.sent, asked.methods)
    }


def table(losses: dict[tuple[str, str], list[float]], methods: Sequence[str]) -> Iterable[str]:
    """A Markdown table: a row for each group, a column for each method; each loss beside the plain mean's without a
    fourth peer."""
    yield f"| the fourth peer sends | {' | '.join(f'`{method}`' for method in methods)} |"
    yield "|---|" + "---|" * len(methods)
    for sent in dict.fromkeys(sent for sent, _ in losses):
        alike = (name for name, group in GROUPS.items() if group.paces == GROUPS[sent].paces and group.lie is None)
        without = losses.get((next(alike), "mean"), [math.nan])
        cells = [_cell(losses[sent, method], statistics.mean(without)) for method in methods]
        yield f"| {sent} | {' | '.join(cells)} |"


def _cell(losses: Sequence[float], without: float) -> str:
    mean = statistics.mean(losses)
    if math.isinf(mean):
        return "diverged"
    if not mean < 10:
        return f"{mean:.0f}" if mean < 1e5 else f"{mean:.1e}"
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{mean:.3f}{spread}" + ("" if mean == without else f", {mean / without - 1:+.1%}")


def main() -> None:
    """Make the runs that are asked for, and print their table."""
    parser = argparse.ArgumentParser(description="What a lying peer does to a run, in one process.")
    parser.add_argument("--sent", nargs="+", default=list(GROUPS), choices=GROUPS, metavar="WHAT", help="rows")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=get_args(Aggregation))
    parser.add_argument("--rounds", type=int, default=10, help="outer steps")
    parser.add_argument("--sync-every", type=int, default=10, help="inner steps of a round")
    parser.add_argument("--warm-start", type=int, default=100, help="inner steps before all peers start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--results", default="liars.jsonl", help="file of the runs that were made")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for line in table(made(asked), asked.methods):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
