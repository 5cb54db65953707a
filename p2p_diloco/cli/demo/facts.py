"""What the demo has measured: formulas over the rows that peers write, and the outcome as one value.

Law: pure. Times are seconds since 1970 by this machine's clock, which all peers of the demo share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

SCHEMA_VERSION = 1
BYTES_OF_A_PARAMETER = {"bf16": 2, "fp16": 2, "fp32": 4}
"""On the wire, by codec."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What a peer's log has of one inner step, or of one evaluation."""

    time: float
    step: int
    """The peer's own."""
    global_step: int
    epoch: int
    loss: float | None
    val_loss: float | None


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """What became of a peer. Of one that was killed, what it last said of itself."""

    name: str
    fate: str
    """finished, killed or late (it never got in)."""
    steps: int
    rounds: int | None
    """Exchanges that it contributed to."""
    waiting_s: float | None
    start_wait_s: float
    """How much of that was for the first ones to come."""
    bytes_sent: int | None
    bytes_received: int | None
    data_parallel_bytes: int
    """What it would have sent with an all-reduce in each of its steps."""
    digest: str


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """What the death of a peer did to the others."""

    peer: str
    epoch: int
    """Outer steps at that moment."""
    elected: bool
    """Whether it was known to be the one to average the next round."""
    next_commit_s: float
    """From the kill until the last of the survivors had the next commit."""
    usual_round_s: float | None
    """Median time between two commits before."""


@dataclass(frozen=True, slots=True)
class NewcomerOutcome:
    """How a late peer got in."""

    peer: str
    epoch: int | None
    """Outer steps when it came in; None if the run was over before."""
    joined_s: float | None
    """From the start of its process, imports included, until its first inner step in the run."""
    rounds: int
    """Exchanges that it contributed to."""


@dataclass(frozen=True, slots=True)
class JoinCost:
    """What a join did to the held-out loss, nats a byte."""

    before: float
    """The last one before."""
    highest: float
    """The highest one after."""
    rise: float
    """By how much that is more; 0 if it isn't."""
    back_after: int | None
    """Rounds from the join until one at or below the last one before, counted from the highest on; 0 if none was above;
    None if none came by the end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that the demo shows in the end."""

    schema_version: int
    seconds: float
    cores: int | None
    sync_every: int
    epochs: int
    parameters: int
    bytes_per_parameter: int
    data_parallel_bytes_per_step: int
    """Of one peer."""
    peers: tuple[PeerOutcome, ...]
    digest: str
    """Empty if they differ."""
    digests_equal: bool
    kill: KillOutcome
    newcomer: NewcomerOutcome
    join_cost: JoinCost | None
    """None if nobody joined, or nothing was judged afterwards."""
    steps: int
    """Inner steps of one peer from the run's beginning to its end, and of the peer alone."""
    warm_start: int
    """Steps that both began with."""
    swarm_loss: float
    """Held-out loss in the end, nats a byte: the global parameters'."""
    alone_loss: float
    swarm_curve: Points
    """(inner steps of one peer, held-out loss)"""
    alone_curve: Points
    folder: str
    plot: str | None
    """The PNG; None without matplotlib."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def row(entry: Mapping[str, Any]) -> Row:
    """A line of a peer's log."""
    return Row(**{name: entry[name] for name in Row.__slots__})


def ring_bytes(parameters: int, bytes_each: int, peers: int) -> int:
    """Bytes that each peer sends in one all-reduce of all parameters, as a ring: 2·P·b·(K−1)/K.

    It is the optimum for any all-reduce: a reduce-scatter and an all-gather, (K−1)/K of the parameters each
    (Patarasuk and Yuan 2009).
    """
    return round(2 * parameters * bytes_each * (peers - 1) / peers)


def commit_times(rows: Iterable[Row]) -> dict[int, float]:
    """When a peer first saw each epoch, but for the one that it came in with."""
    first: dict[int, float] = {}
    for entry in rows:
        first.setdefault(entry.epoch, entry.time)
    return dict(list(first.items())[1:])


def next_commit_s(rows_of: Iterable[Sequence[Row]], epoch: int, since: float) -> float | None:
    """Seconds from `since` until the last of these peers was past `epoch`; None while one isn't."""
    times = [next((when for e, when in commit_times(rows).items() if e > epoch), None) for rows in rows_of]
    return None if None in times else round(max(when - since for when in times if when is not None), 2)


def usual_round_s(rows: Iterable[Row], until: float) -> float | None:
    """Median seconds between a peer's commits before `until`."""
    times = [when for when in commit_times(rows).values() if when < until]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return round(median(gaps), 2) if gaps else None


def start_wait_s(rows: Sequence[Row], sync_every: int) -> float:
    """Seconds that a peer's first exchange took, which waits for those that a run starts with; 0 if it came later."""
    for earlier, later in pairwise(rows):
        if earlier.epoch == 0 and later.epoch == 1 and later.step == sync_every:
            return round(later.time - earlier.time, 2)
    return 0.0


def held_out(rows_of: Iterable[Iterable[Row]]) -> dict[int, float]:
    """The held-out loss by outer step of the run: peers hold the same global parameters, so their values agree."""
    found: dict[int, list[float]] = {}
    for rows in rows_of:
        for entry in rows:
            if entry.val_loss is not None:
                found.setdefault(entry.epoch, []).append(entry.val_loss)
    return {epoch: fmean(losses) for epoch, losses in sorted(found.items())}


def curve(losses: Mapping[int, float], sync_every: int) -> Points:
    """The same by inner steps that lead there, of one peer: whoever has judged it may have made some more since."""
    return tuple((float(sync_every * epoch), loss) for epoch, loss in losses.items())


def join_cost(losses: Mapping[int, float], joined: int) -> JoinCost | None:
    """What a join at this outer step did to the held-out loss (by outer step, rising); None if that was not judged
    both before and after."""
    before = [loss for epoch, loss in losses.items() if epoch <= joined]
    after = {epoch: loss for epoch, loss in losses.items() if epoch > joined}
    if not before or not after:
        return None
    last, worst = before[-1], max(after, key=lambda epoch: after[epoch])
    rise = max(0.0, after[worst] - last)
    back = next((epoch - joined for epoch, loss in after.items() if epoch >= worst and loss <= last), None)
    return JoinCost(last, after[worst], rise, back if rise else 0)
