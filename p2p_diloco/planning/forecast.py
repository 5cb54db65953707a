"""How a run spends its time: utilisation, hours and bytes, beside data-parallel training and one peer alone; and the
host memory of a peer, without activations, by what was measured (docs/operations.md, docs/performance.md).

Law: synchronous rounds only. A round is H inner steps, and for each fragment the part of its exchange that overlap
doesn't hide (`exchange`). With pace="steps" every peer makes H steps, so the slowest one sets the time; with
pace="time" the fastest makes H and the others as many as they can meanwhile.

    utilisation = training / (training + stall)

is the utilisation of the peer that sets the time: it stands still only for exchanges. In data-parallel training every
peer trains on the same number of tokens in a step, and a ring all-reduce over the slowest link averages gradients in
bf16. All of it that fits into the backward pass, two thirds of a step, is taken as hidden. That is in favour of
data-parallel training, in which single buckets of gradients can be late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from p2p_diloco.config import RunConfig
from p2p_diloco.planning.exchange import FEEDS_BACK, Codecs, Exchange, Machine, data_parallel, of_model

GRADIENT_BYTES = 2
BACKWARD = 2 / 3
"""The share of a step that is its backward pass."""
NODE_BYTES = 200_000_000
"""Memory of a node without a model."""
SMALL = 50_000_000
"""Models with fewer parameters than this take `SMALL_MORE` bytes more for each parameter."""
SMALL_MORE = 2
PER_PARAMETER = 20
"""Bytes of host memory for each parameter, at the peak of a round: bf16, SGD, two peers."""
PER_PEER, PEERS_MOST = 1.5, 9.0
"""Further bytes for each parameter: `PER_PEER` for each peer beyond two (2.8 in all were measured with four peers, 8.7
with eight), `PEERS_MOST` at most in all, because collected contributions and kept commits are limited."""
TRAINER = 16
"""Bytes for each parameter in the trainer: fp32 values and gradients, and AdamW's two moments."""


class Memory(NamedTuple):
    """The bytes of a peer's two processes. Memory that they share (θ, the pseudo-gradient) counts as the node's."""

    trainer: float
    node: float


def per_parameter(run: RunConfig, parameters: int) -> int:
    """Bytes of host memory that a peer needs for each parameter, in a run of two peers. The model and its optimizer are
    not included."""
    amount = PER_PARAMETER + (SMALL_MORE if parameters < SMALL else 0)
    amount += 0 if run.codec == "bf16" else 2  # the pseudo-gradient in shared memory
    amount += 8 if run.codec == "fp32" else 0  # contributions and means are twice as long
    amount += 4 if run.overlap_steps or run.mode == "async" else 0  # the older θ
    return amount + (8 if run.codec in FEEDS_BACK else 0)  # the kept rounding error


def memory(run: RunConfig, parameters: int, peers: int) -> Memory:
    """The memory of a peer's two processes: of the trainer without activations, and of the node at the peak of a
    round."""
    more = min(PEERS_MOST, PER_PEER * max(0, peers - 2))
    return Memory(TRAINER * parameters, NODE_BYTES + (per_parameter(run, parameters) + more) * parameters)


@dataclass(frozen=True, slots=True)
class Course:
    """What one way of training achieves. A unit is a token, or an inner step of one peer if tokens are unknown. The
    units of all peers are counted together."""

    units_per_second: float
    sent_per_unit: float
    """Bytes that one peer sends for each unit that all peers together train on."""
    utilisation: float

    def seconds(self, units: float) -> float:
        """The seconds that training on this many tokens or steps (`units`) takes."""
        return units / self.units_per_second

    def sent(self, units: float) -> float:
        """The bytes that one peer sends while all peers train on this many tokens or steps (`units`)."""
        return units * self.sent_per_unit


@dataclass(frozen=True)
class Forecast:
    """A run of `params` trained parameters on these machines. `tokens_per_step`: the tokens of one peer's inner step;
    None: inner steps are counted instead of tokens."""

    params: int
    machines: Sequence[Machine]
    run: RunConfig
    tokens_per_step: float | None = None

    @property
    def peers(self) -> int:
        return len(self.machines)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of one fragment."""
        codecs = Codecs.of(self.run.codec, self.run.reply_codec)
        return of_model(self.params, self.run.num_fragments, self.machines, codecs)

    @cached_property
    def pace_s(self) -> float:
        """Seconds of an inner step of the peer that sets the time."""
        each = [machine.step_s for machine in self.machines]
        return min(each) if self.run.pace == "time" else max(each)

    @cached_property
    def training_s(self) -> float:
        """Seconds of inner steps in a round, of the peer that sets the time."""
        slowest = max(machine.step_s for machine in self.machines)
        return max(self.run.sync_every * self.pace_s, self.run.num_fragments * slowest)

    @property
    def steps(self) -> tuple[int, ...]:
        """The inner steps of each peer in a round."""
        most = self.run.sync_every
        return tuple(max(1, min(most, math.floor(self.training_s / m.step_s + 1e-9))) for m in self.machines)

    @property
    def stall_s(self) -> float:
        """Seconds of a round in which training stands still."""
        hidden_s = self.run.overlap_steps * self.pace_s
        return self.run.num_fragments * (self.exchange.own_s + max(0.0, self.exchange.hideable_s - hidden_s))

    @property
    def round_s(self) -> float:
        """From one outer step of the whole model to the next."""
        return self.training_s + self.stall_s

    @property
    def exchange_s(self) -> float:
        """Seconds of a round's exchanges, hidden or not."""
        return self.run.num_fragments * self.exchange.seconds

    @property
    def utilisation(self) -> float:
        return self.training_s / self.round_s

    @property
    def sent(self) -> float:
        """Bytes that a peer sends in a round, in the mean over the peers, without headers."""
        return self.run.num_fragments * self.exchange.mean_sent

    @property
    def units(self) -> float:
        """Tokens (or inner steps) of all peers in a round."""
        return sum(self.steps) * self._weight

    @property
    def course(self) -> Course:
        """This run."""
        return Course(self.units / self.round_s, self.sent / self.units, self.utilisation)

    @property
    def data_parallel(self) -> Course:
        """Data-parallel training on the same links."""
        sent, exchange_s = data_parallel(self.params, self.machines, GRADIENT_BYTES)
        step_s = max(machine.step_s for machine in self.machines)
        whole_s = step_s + max(0.0, exchange_s - BACKWARD * step_s)
        units = self.peers * self._weight
        return Course(units / whole_s, sent / units, step_s / whole_s)

    @property
    def alone(self) -> Course:
        """Training by the fastest peer alone, which sends nothing."""
        return Course(self._weight / min(machine.step_s for machine in self.machines), 0.0, 1.0)

    @property
    def ways(self) -> dict[str, Course]:
        """The three ways to train that are compared."""
        return {"run": self.course, "data_parallel": self.data_parallel, "alone": self.alone}

    @property
    def memory(self) -> Memory:
        return memory(self.run, self.params, self.peers)

    @property
    def _weight(self) -> float:
        return 1.0 if self.tokens_per_step is None else self.tokens_per_step

    def changed(self, **settings: object) -> Forecast:
        """The same forecast with other settings of the run.

        Raises:
            ConfigError: the settings don't fit together.
        """
        return replace(self, run=RunConfig(**{**self.run.model_dump(), **settings}))

    def on_links(self, slowest: float) -> Forecast:
        """The same forecast with all links scaled by one factor, so that the slowest has `slowest` bytes a second."""
        factor = slowest / min(machine.link for machine in self.machines)
        return replace(self, machines=[replace(machine, link=factor * machine.link) for machine in self.machines])

    def without(self, number: int) -> Forecast:
        """The same forecast without the peer of this number."""
        return replace(self, machines=[*self.machines[:number], *self.machines[number + 1 :]])
