"""The effect of a newcomer on a run: held-out loss of the global parameters, by round, before and after a join.

Synchronous rounds of the built-in trainer, several replicas in this one process: no network, no node. A newcomer begins
with the global parameters, its own part of the text and a new inner optimizer; `OPTIONS` are ways to
admit it. A seed's rounds before the join are made once, and all options continue from there.

python examples/join_shock.py --folder shock                                # everything, some hours on one core
python examples/join_shock.py --folder shock --setups demo --options plain "no weight at first" --seeds 0
python examples/join_shock.py --folder shock --table                        # only the table

A run leaves one line of JSON in shock/results.jsonl; a second call makes only the missing runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from learning import HELD_OUT, TEXT, TRAINER, flat, load, warmed
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from p2p_diloco.tensors.outer import OuterOptimizer, State
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.schedule import learning_rate
from p2p_diloco.trainer.text import Batches, own_part
from p2p_diloco.trainer.train import mean_loss, new_optimizer

WARM_START = 100
OUTER = OuterOptimizer(lr=0.7, momentum=0.9)
AFTER = 8
"""Rounds after a join among which the highest loss is taken."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Which peers are in a run when. Rounds count from 0, and peers join or leave before the round named."""

    sync_every: int
    epochs: int
    """Rounds of the learning-rate schedule."""
    peers: int
    until: int
    """Rounds that are made."""
    joins: Mapping[int, int]
    """Newcomers by round."""
    leaves: Mapping[int, int] = field(default_factory=dict)
    """How many of the oldest peers leave, by round."""
    at_most: int = 9
    """Above this number of peers the oldest leave when a newcomer joins."""
    alone: Mapping[int, int] = field(default_factory=dict)
    """Rounds that one peer ends alone while the others don't train: 0 the oldest peer, -1 the newest."""
    first_steps: int | None = None
    """Inner steps of a newcomer's first round if it joins within one; its weight is smaller in proportion."""

    @property
    def first_join(self) -> int:
        """The number of rounds before the first join, which all options share."""
        return min(self.joins)


DEMO = Setup(20, 60, 3, 26, joins={18: 1}, leaves={15: 1})
LONG = Setup(100, 30, 2, 15, joins={10: 1})
SETUPS = {
    "demo": DEMO,
    "demo, two at once": replace(DEMO, joins={18: 2}),
    "demo, every second round": replace(DEMO, until=40, joins=dict.fromkeys(range(18, 38, 2), 1), at_most=4),
    "demo, all start again": replace(DEMO, joins={18: 3}, leaves={15: 1, 18: 2}),
    "demo, the newcomer alone": replace(DEMO, alone={18: -1}),
    "demo, an old one alone": replace(DEMO, alone={18: 0}),
    "demo, with 5 steps at first": replace(DEMO, first_steps=5),
    "H=100": LONG,
    "H=100, two at once": replace(LONG, joins={10: 2}),
}


@dataclass(frozen=True, slots=True)
class Option:
    """How a newcomer is admitted."""

    weights: tuple[float, ...] = ()
    """Factors on the weights of its first contributions."""
    ramp_steps: int = 0
    """Its own first steps in which its learning rate rises to the others' rate."""
    ramp_rounds: int = 0
    """The same in rounds."""
    donor: bool = False
    """Whether it begins with the inner optimizer's state of another peer."""
    joins: bool = True
    """Whether any newcomer joins."""


OPTIONS = {
    "nobody joins": Option(joins=False),
    "plain": Option(),
    "no weight at first": Option(weights=(0.0,)),
    "weight over 2 rounds": Option(weights=(1 / 3, 2 / 3)),
    "weight over 4 rounds": Option(weights=(0.2, 0.4, 0.6, 0.8)),
    "none, then weight over 2": Option(weights=(0.0, 1 / 3, 2 / 3)),
    "lr over 20 steps": Option(ramp_steps=20),
    "lr over H steps": Option(ramp_rounds=1),
    "lr over 2H steps": Option(ramp_rounds=2),
    "donor's AdamW": Option(donor=True),
    "lr over 20 steps, no weight at first": Option(weights=(0.0,), ramp_steps=20),
    "lr over 20 steps, weight over 2 rounds": Option(weights=(1 / 3, 2 / 3), ramp_steps=20),
}


class Replica:
    """One peer: a model, its inner optimizer, its text, and its number of inner steps."""

    def __init__(self, seed: int, name: str, option: Option, joined: int = 0) -> None:
        self.model = GPT(GPTConfig(seed=seed))
        self.optimizer = new_optimizer(self.model, TRAINER)
        self.batches = Batches(
            own_text(f"{seed}:{name}"), batch_size=TRAINER.batch_size, context=TRAINER.context, seed=seed, key=name
        )
        self.option, self.joined = option, joined
        self.steps = self.rounds = 0

    def round(self, theta: Tensor, setup: Setup, number: int) -> tuple[Tensor, float]:
        """Make the inner steps of a round from the global parameters; return the pseudo-gradient and its weight."""
        load(self.model, theta)
        end, steps = (number + 1) * setup.sync_every, setup.sync_every
        if self.joined == number and setup.first_steps is not None:
            steps = setup.first_steps
        for step in range(end - steps, end):
            self._step(step, setup)
        weights, self.rounds = self.option.weights, self.rounds + 1
        factor = weights[self.rounds - 1] if self.rounds <= len(weights) else 1.0
        return theta - flat(self.model), factor * steps

    def _step(self, step: int, setup: Setup) -> None:
        rate = learning_rate(
            step,
            horizon=setup.epochs * setup.sync_every,
            peak=TRAINER.lr,
            warmup_steps=TRAINER.warmup_steps,
            min_ratio=TRAINER.min_lr_ratio,
        )
        ramp = self.option.ramp_steps or self.option.ramp_rounds * setup.sync_every
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate * min(1.0, self.steps / max(1, ramp))
        self.batches.position = step
        tokens, targets = next(self.batches)  # int64 [batch, context] each
        torch.autograd.backward(self.model(tokens, targets))
        clip_grad_norm_(self.model.parameters(), TRAINER.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


@cache
def own_text(key: str) -> Tensor:
    """A peer's third of the training text: uint8 [bytes]."""
    return own_part(TEXT, key, TRAINER.context)


@dataclass
class Run:
    """The global parameters, the outer optimizer's state, the present peers, and the held-out losses so far."""

    seed: int
    theta: Tensor
    state: State
    replicas: list[Replica]
    came: int
    losses: list[float]

    @classmethod
    def founded(cls, setup: Setup, seed: int) -> Run:
        """A new run with its founding peers."""
        theta = warmed(seed, WARM_START)
        replicas = [Replica(seed, f"peer{number}", Option()) for number in range(setup.peers)]
        run = cls(seed, theta, OUTER.init_state(len(theta)), replicas, setup.peers, [])
        run.judge()
        return run

    def advance(self, setup: Setup, option: Option, until: int) -> None:
        """Make all rounds up to this one."""
        for number in range(len(self.losses) - 1, until):
            self._change(setup, option, number)
            working = self.replicas
            if number in setup.alone and option.joins:
                working = [self.replicas[setup.alone[number]]]
            made = [replica.round(self.theta, setup, number) for replica in working]
            total = sum(weight for _, weight in made)
            if not total:  # an average of no contributions
                made, total = [(gradient, 1.0) for gradient, _ in made], float(len(made))
            mean = torch.stack([gradient * (weight / total) for gradient, weight in made]).sum(0)
            self.theta, self.state = OUTER.step(self.theta, self.state, mean)
            self.judge()

    def judge(self) -> None:
        """Record the held-out loss of the global parameters, nats a byte."""
        model = self.replicas[0].model
        load(model, self.theta)
        self.losses.append(mean_loss(model, HELD_OUT))

    def _change(self, setup: Setup, option: Option, number: int) -> None:
        """Add and remove the peers that join or leave before this round."""
        donors = self.replicas
        coming = setup.joins.get(number, 0) if option.joins else 0
        going = setup.leaves.get(number, 0) if option.joins or number < setup.first_join else 0
        going = max(going, len(self.replicas) + coming - setup.at_most)
        self.replicas = self.replicas[going:]
        for _ in range(coming):
            newcomer = Replica(self.seed, f"peer{self.came}", option, number)
            if option.donor:
                newcomer.optimizer.load_state_dict(copy.deepcopy(donors[-1].optimizer.state_dict()))
            self.replicas = [*self.replicas, newcomer]
            self.came += 1


def runs(wanted: Iterable[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """A row of figures for each set-up, option and seed; rounds that options share are made once."""
    before: dict[tuple[int, int, int], Run] = {}
    for name, option, seed in wanted:
        setup = SETUPS[name]
        key = (setup.sync_every, setup.first_join, seed)
        if key not in before:
            before[key] = Run.founded(setup, seed)
            before[key].advance(setup, Option(), setup.first_join)
        run = copy.deepcopy(before[key])
        run.advance(setup, OPTIONS[option], setup.until)
        yield {"setup": name, "option": option, "seed": seed, "losses": [round(loss, 5) for loss in run.losses]}


# -- the table


@dataclass(frozen=True, slots=True)
class Cost:
    """The effect of the joins on one run's held-out loss."""

    rise: float
    """The worst of all joins: the highest loss after it relative to the last one before it, minus 1."""
    back: float
    """Rounds until the loss is at most that before the join, for the join that took longest. Infinite: never."""
    end: float
    """The loss after all rounds."""


def cost(setup: Setup, losses: Sequence[float]) -> Cost:
    """The cost of one run's joins. A rise counts for a join until the next join, or for `AFTER` rounds."""
    rises, backs = [], []
    joins = sorted(setup.joins)
    for join, following in zip(joins, [*joins[1:], len(losses)], strict=True):
        before, after = losses[join], losses[join + 1 : min(following, join + AFTER) + 1]
        rises.append(max(after) / before - 1)
        backs.append(next((n for n, loss in enumerate(losses[join + 1 :], 1) if loss <= before), float("inf")))
    return Cost(max(rises), max(backs), losses[-1])


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown, by set-up and option: the seeds' rises and rounds, and their mean loss at the end."""
    yield "| set-up | option | rise, by seed | back after rounds | loss at the end |"
    yield "|---|---|---|---|---|"
    for name, setup in SETUPS.items():
        for option in OPTIONS:
            found = [row for row in rows if (row["setup"], row["option"]) == (name, option)]
            if not found:
                continue
            costs = [
                cost(setup, row["losses"][: setup.until + 1]) for row in sorted(found, key=lambda row: row["seed"])
            ]
            rises = ", ".join(f"{100 * c.rise:+.1f} %" for c in costs)
            backs = ", ".join("never" if c.back == float("inf") else f"{c.back:g}" for c in costs)
            spread = f" ± {statistics.stdev(c.end for c in costs):.3f}" if len(costs) > 1 else ""
            end = f"{statistics.mean(c.end for c in costs):.3f}{spread}"
            yield f"| {name} | {option} | {rises} | {backs} | {end} |"


def main() -> None:
    """Make the requested runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description="The effect of a newcomer on a run.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="make no run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {(row["setup"], row["option"], row["seed"]) for row in rows}
    wanted = product(asked.seeds, asked.setups, asked.options) if not asked.table else ()
    for row in runs(run for seed, *what in wanted if (run := (*what, seed)) not in there):
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    sys.stdout.write("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
