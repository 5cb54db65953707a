"""The demo's measurements: the outcome as one value, and formulas over the rows that peers write.

Law: pure. Times are seconds since 1970 by this machine's clock, which all peers of the demo share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

SCHEMA_VERSION = 1

Points = tuple[tuple[float, float], ...]
"""(inner steps of one peer, held-out loss)"""


class Row(NamedTuple):
    """One row of a peer's log. It describes one inner step or one evaluation."""

    time: float
    step: int
    """The number of the peer's own inner steps."""
    global_step: int
    epoch: int
    loss: float | None
    val_loss: float | None


# -- the outcome; docs/cli.md describes every field


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """The outcome of one peer. For a killed peer, the figures that it published last."""

    name: str
    fate: str
    steps: int
    rounds: int | None
    waiting_s: float | None
    start_wait_s: float
    bytes_sent: int | None
    bytes_received: int | None
    data_parallel_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """The effect of one peer's death on the other peers."""

    peer: str
    epoch: int
    elected: bool
    next_commit_s: float
    usual_round_s: float | None


@dataclass(frozen=True, slots=True)
class NewcomerOutcome:
    """How a peer that was started late joined the run."""

    peer: str
    epoch: int | None
    joined_s: float | None
    rounds: int


@dataclass(frozen=True, slots=True)
class JoinCost:
    """The effect of a join on the held-out loss, in nats a byte."""

    before: float
    highest: float
    rise: float
    back_after: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results that the demo shows at its end."""

    schema_version: int
    seconds: float
    cores: int | None
    sync_every: int
    epochs: int
    parameters: int
    bytes_per_parameter: int
    data_parallel_bytes_per_step: int
    peers: tuple[PeerOutcome, ...]
    digest: str
    digests_equal: bool
    kill: KillOutcome
    newcomer: NewcomerOutcome
    join_cost: JoinCost | None
    steps: int
    warm_start: int
    swarm_loss: float
    alone_loss: float
    swarm_curve: Points
    alone_curve: Points
    folder: str
    plot: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


# -- formulas


def ring_bytes(parameters: int, bytes_each: int, peers: int) -> int:
    """Bytes that each peer sends in one all-reduce of all parameters, as a ring: 2·P·b·(K−1)/K.

    This is the optimum for any all-reduce: a reduce-scatter and an all-gather, (K−1)/K of the parameters each
    (Patarasuk and Yuan 2009).
    """
    return round(2 * parameters * bytes_each * (peers - 1) / peers)


def commit_times(rows: Iterable[Row]) -> dict[int, float]:
    """The time at which a peer first saw each epoch. The epoch in which it entered the run is left out."""
    first: dict[int, float] = {}
    for entry in rows:
        first.setdefault(entry.epoch, entry.time)
    return dict(list(first.items())[1:])


def next_commit_s(rows_of: Iterable[Sequence[Row]], epoch: int, since: float) -> float | None:
    """Seconds from `since` until each of these peers had seen an epoch above `epoch`. None while one of them has
    not."""
    times = []
    for rows in rows_of:
        later = [when for seen, when in commit_times(rows).items() if seen > epoch]
        if not later:
            return None
        times.append(later[0])
    return round(max(times) - since, 2)


def usual_round_s(rows: Iterable[Row], until: float) -> float | None:
    """The median time between two commits of a peer, in seconds. Only commits before `until` count. None if there are
    fewer than two."""
    times = [when for when in commit_times(rows).values() if when < until]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return round(median(gaps), 2) if gaps else None


def start_wait_s(rows: Sequence[Row], sync_every: int) -> float:
    """Seconds that the founder's first exchange took, in which the founder waits for `start_peers`. 0 for a peer that
    joined later."""
    for earlier, later in pairwise(rows):
        if earlier.epoch == 0 and later.epoch == 1 and later.step == sync_every:
            return round(later.time - earlier.time, 2)
    return 0.0


def held_out(rows_of: Iterable[Iterable[Row]]) -> dict[int, float]:
    """The held-out loss after each outer step: the mean of what the peers measured. They hold the same global
    parameters, so their values agree."""
    found: dict[int, list[float]] = {}
    for rows in rows_of:
        for entry in rows:
            if entry.val_loss is not None:
                found.setdefault(entry.epoch, []).append(entry.val_loss)
    return {epoch: fmean(losses) for epoch, losses in sorted(found.items())}


def curve(losses: Mapping[int, float], sync_every: int) -> Points:
    """Held-out losses as points. x is the number of inner steps that one peer makes up to the outer step."""
    return tuple((float(sync_every * epoch), loss) for epoch, loss in losses.items())


def join_cost(losses: Mapping[int, float], joined: int) -> JoinCost | None:
    """How much the held-out loss rose after a peer joined at outer step `joined`. None if the loss was not evaluated
    both before and after the join. `losses`: the loss by outer step, in the order of the steps."""
    before = [loss for epoch, loss in losses.items() if epoch <= joined]
    after = {epoch: loss for epoch, loss in losses.items() if epoch > joined}
    if not before or not after:
        return None
    last, worst = before[-1], max(after, key=lambda epoch: after[epoch])
    rise = max(0.0, after[worst] - last)
    back = next((epoch - joined for epoch, loss in after.items() if epoch >= worst and loss <= last), None)
    return JoinCost(last, after[worst], rise, back if rise else 0)
