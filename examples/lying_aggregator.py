"""What an elected aggregator that commits wrong means does to a run, by what it commits and by `step_limit`.

The built-in model, trained by four peers in this one process: no network, no node. Contributions are averaged and
applied by the functions of a run (`weighted_mean`, `ShardStore`). After some honest rounds one peer lies in each shard
that it aggregates: a quarter of them, drawn anew in each round as by the election, or the same ones in each round.
Prints the tables of docs/robustness.md.

python examples/lying_aggregator.py --seeds 0 1 2                      # twenty minutes on one core
python examples/lying_aggregator.py --honest --seeds 0 1 2             # how often honest runs are cut; ten minutes
python examples/lying_aggregator.py --commits "× 1000" --limits 0 1.25 --seeds 0
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from learning import HELD_OUT, draw, flat, inner_steps, load
from liars import CODEC, OUTER, start
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.layout import Layout, Shard, specs_of
from p2p_diloco.tensors.mean import weighted_mean
from p2p_diloco.tensors.store import ShardStore
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.train import mean_loss

PEERS = 4
SPEEDS = (1.0, 0.5, 0.2)
"""Of the peers of an asynchronous run."""


class Lie(NamedTuple):
    """What the lying aggregator makes of a mean; `fixed`: it aggregates the same shards in each round."""

    times: float
    fixed: bool = False


LIES = {
    "nothing wrong": Lie(1.0),
    "× 1000": Lie(1000.0),
    "sign flipped": Lie(-1.0),
    "sign flipped, × 10": Lie(-10.0),
    "× 1000, always the same shards": Lie(1000.0, fixed=True),
    "sign flipped, × 10, always the same shards": Lie(-10.0, fixed=True),
}


class Commits:
    """The outer state that all peers of a run share, and what commits do to it."""

    def __init__(self, theta: Tensor, layout: Layout, limit: float, delay: int = 0) -> None:
        """`delay`: the size of the Delayed Nesterov buffer; 0: none."""
        self.theta, self.layout, self._delay = theta.clone(), layout, delay
        self._store = ShardStore(layout, DelayedNesterov(OUTER, delay) if delay else OUTER, self.theta, limit)
        self._made = [0] * len(layout.shards)
        self.cut = 0
        """Means that were cut."""

    @property
    def made(self) -> int:
        """Commits of all shards."""
        return sum(self._made)

    def make(self, shards: Iterable[Shard], sent: Sequence[Tensor], times: Callable[[int], float]) -> bool:
        """One commit for each shard on the contributions [parameters] of all peers. `times`: what its aggregator
        multiplies the mean of a shard by. Returns whether the parameters are still finite."""
        for shard in shards:
            place = slice(shard.start, shard.stop)
            given = [
                (f"peer{peer}", 1.0, codecs.encode(values[place].contiguous(), CODEC))
                for peer, values in enumerate(sent)
            ]
            mean = weighted_mean(given, CODEC, shard.numel, torch.bfloat16, "clip") * times(shard.index)
            buffered = self._made[shard.index] % self._delay if self._delay else 0
            try:
                step = self._store.propose(shard.index, codecs.encode(mean, CODEC), CODEC, b"", 1, buffered)
            except ValueError:
                return False
            self._store.accept(shard.index, step)
            self._made[shard.index] += 1
            self.cut += step.factor < 1
        return True


def honest(shard: int) -> float:
    """An honest aggregator multiplies no mean."""
    return 1.0


def synchronous(models: Sequence[GPT], seed: int, asked: argparse.Namespace, commits: Commits, lie: Lie) -> bool:
    """Rounds of `asked.sync_every` steps; the last `asked.lies` with lies. Returns whether the run stayed finite."""
    count, drawn = len(commits.layout.shards), torch.Generator().manual_seed(seed)
    rounds, own = asked.honest_rounds + asked.lies, set(range(0, count, PEERS))
    training = _training(models, seed, [rounds * asked.sync_every] * PEERS)
    for turn in range(rounds):
        for model, inner in zip(models, training, strict=True):
            load(model, commits.theta)
            _make(inner, asked.sync_every)
        if not lie.fixed:
            own = set(torch.randperm(count, generator=drawn)[: count // PEERS].tolist())
        sent = [commits.theta - flat(model) for model in models]
        lies = own if turn >= asked.honest_rounds else set()
        if not commits.make(commits.layout.shards, sent, lambda shard: lie.times if shard in lies else 1.0):  # noqa: B023
            return False
    return True


def overlapping(models: Sequence[GPT], seed: int, asked: argparse.Namespace, commits: Commits) -> None:
    """Two fragments in turn, each merged a tenth of `asked.sync_every` after it was sent, by half."""
    layout, total = commits.layout, asked.sync_every * (asked.honest_rounds + asked.lies)
    training, bases = _training(models, seed, [total] * PEERS), [commits.theta.clone() for _ in models]
    between, late = asked.sync_every // 2, max(1, asked.sync_every // 10)
    for step in range(1, total + 1):
        for inner in training:
            next(inner)
        if step % between == 0:
            sent = [base - flat(model) for base, model in zip(bases, models, strict=True)]
            commits.make(layout.shards_of(step // between % 2), sent, honest)
        if step > between and step % between == late:
            shards = layout.shards_of((step - late) // between % 2)
            place = slice(shards[0].start, shards[-1].stop)
            for model, base in zip(models, bases, strict=True):
                local = flat(model).clone()
                local[place] = torch.lerp(commits.theta[place], local[place], 0.5)
                base[place] = commits.theta[place]
                load(model, local)


def asynchronous(
    models: Sequence[GPT], seed: int, asked: argparse.Namespace, commits: Commits, *, dylu: bool = False
) -> None:
    """Peers of `SPEEDS`: each submission is a commit of its own, after `asked.sync_every` steps, with `dylu` after that
    share of them that its peer makes in the time of the fastest."""
    total = asked.sync_every * (asked.honest_rounds + asked.lies)
    every = [max(1, math.floor(speed * asked.sync_every)) if dylu else asked.sync_every for speed in SPEEDS]
    lasts = [math.floor(total * speed) // steps * steps for speed, steps in zip(SPEEDS, every, strict=True)]
    training, bases = _training(models, seed, lasts), [commits.theta.clone() for _ in models]
    due = sorted(
        (done / SPEEDS[peer], peer)
        for peer, (steps, last) in enumerate(zip(every, lasts, strict=True))
        for done in range(steps, last + 1, steps)
    )
    for _, peer in due:
        _make(training[peer], every[peer])
        commits.make(commits.layout.shards, [bases[peer] - flat(models[peer])], honest)
        load(models[peer], commits.theta)
        bases[peer] = commits.theta.clone()


def _training(models: Sequence[GPT], seed: int, steps: Sequence[int]) -> list[Iterator[None]]:
    return [
        inner_steps(model, draw(seed, f"peer{peer}"), count, count)
        for peer, (model, count) in enumerate(zip(models, steps, strict=True))
    ]


def _make(inner: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(inner)


WAYS = ("sync", "overlap", "async, DN", "async, DN, DyLU")


def run(way: str, lie: Lie, limit: float, seed: int, asked: argparse.Namespace) -> tuple[float, float]:
    """The held-out loss at the end, nats a byte, infinite if the run has diverged; and the share of means cut."""
    asynchronously = way.startswith("async")
    models = [GPT(GPTConfig(seed=seed)) for _ in (SPEEDS if asynchronously else range(PEERS))]
    theta = start(seed, asked.warm_start)
    for model in models:
        load(model, theta)
    layout = Layout.build(specs_of(models[0]), 2 if way == "overlap" else 1)
    commits, finite = Commits(theta, layout, limit, len(SPEEDS) if asynchronously else 0), True
    if asynchronously:
        asynchronous(models, seed, asked, commits, dylu="DyLU" in way)
    elif way == "overlap":
        overlapping(models, seed, asked, commits)
    else:
        finite = synchronous(models, seed, asked, commits, lie)
    load(models[0], commits.theta)
    loss = mean_loss(models[0], HELD_OUT) if finite else math.inf
    return (loss if math.isfinite(loss) else math.inf), commits.cut / max(1, commits.made)


def _cell(runs: Sequence[tuple[float, float]]) -> str:
    losses, cut = [loss for loss, _ in runs], statistics.mean(share for _, share in runs)
    mean = statistics.mean(losses)
    if math.isinf(mean):
        return "diverged"
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 and mean < 10 else ""
    return (f"{mean:.3f}{spread}" if mean < 10 else f"{mean:.2g}") + (f"; {cut:.2%} cut" if cut else "")


def main() -> None:
    """Make the runs that are asked for, and print a row for each group of them; each run also goes to stderr."""
    parser = argparse.ArgumentParser(description="What a lying aggregator does to a run, in one process.")
    parser.add_argument("--honest", action="store_true", help="honest runs of every mode instead of lies")
    parser.add_argument("--commits", nargs="+", default=list(LIES), choices=LIES, metavar="WHAT", help="rows")
    parser.add_argument(
        "--limits", nargs="+", type=float, default=[0.0, 1.25, 3.0], help="values of step_limit; 0: none"
    )
    parser.add_argument("--honest-rounds", type=int, default=4, help="outer steps before the first lie")
    parser.add_argument("--lies", type=int, default=10, help="outer steps with lies")
    parser.add_argument("--sync-every", type=int, default=10, help="inner steps of a round")
    parser.add_argument("--warm-start", type=int, default=100, help="inner steps before all peers start")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("p2p_diloco").setLevel(logging.ERROR)  # not a line for each cut
    rows = [(way, "nothing wrong") for way in WAYS] if asked.honest else [("sync", what) for what in asked.commits]
    sys.stdout.write(f"| | {' | '.join(f'`step_limit={limit:g}`' for limit in asked.limits)} |\n")
    sys.stdout.write("|---|" + "---|" * len(asked.limits) + "\n")
    for way, what in rows:
        made: dict[float, list[tuple[float, float]]] = {limit: [] for limit in asked.limits}
        for seed, limit in product(asked.seeds, asked.limits):
            made[limit].append(run(way, LIES[what], limit, seed, asked))
            sys.stderr.write(json.dumps([way, what, limit, seed, *made[limit][-1]]) + "\n")
        cells = [_cell(made[limit]) for limit in asked.limits]
        sys.stdout.write(f"| {way if asked.honest else what} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
