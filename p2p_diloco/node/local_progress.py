"""Decides how a trainer's local progress is carried over at each merge, and counts the samples that were sent, counted
or dropped.

Law: does no I/O; only this module makes the decision. The decision is one `Take` for each shard, made from the log's
`Carry`, the condition of the shard's base (`Bases`) and the run's settings; the trainer's processes carry it out. Steps
and samples are whole numbers; if no samples are reported, a step counts as one sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.node.bases import Bases
from p2p_diloco.tensors.layout import PARAMETER, Layout
from p2p_diloco.tensors.mean import WEIGHT_MIN


class Take(Enum):
    """What a trainer's process does with one shard when it merges.

    θ: the shard's new global values. base: the global values that were loaded before them. Δ: the pseudo-gradient that
    was last sent. Buffers are never mixed: they keep what they gained since the sending.
    """

    KEEP = "keep"  # local ← θ + (local − base)
    SUBTRACT = "subtract"  # local ← θ + (local − base) + Δ
    RESTORE = "restore"  # local ← θ + (local − base) − Δ
    SENT = "sent"  # local ← θ − Δ: only the sent progress is known
    MIX = "mix"  # local ← θ + local_share · (local − θ)
    DROP = "drop"  # local ← θ
    FORGET = "forget"  # local ← θ, and Δ ← 0: later takes must not add or subtract what was sent


@dataclass(frozen=True, slots=True)
class Exchange:
    """The trainer's latest exchange. `n`: the number of the trainer's request. `samples`: how many were trained on for
    the sent progress. `before`: for each of `shards`, the (steps, samples) that had been sent or given up before."""

    n: int
    shards: tuple[int, ...]
    samples: int
    before: tuple[tuple[int, int], ...]


class LocalProgress:
    """Keeps count of one trainer's local progress since its start, and decides its merges."""

    def __init__(self, config: RunConfig, layout: Layout, bases: Bases) -> None:
        self._weighting, self._mixes, self._share = config.weighting, config.merge == "mix", config.local_share
        self._bases = bases
        self._buffers = {shard.index for shard in layout.shards if shard.kind != PARAMETER}
        self._parts = [shard.numel / layout.numel for shard in layout.shards]
        self._trained = 0, 0  # steps and samples since the start, as of the last merge
        self._sent_at = 0  # steps at the last sending, even if that exchange never began
        self._sent = [(0, 0)] * len(layout.shards)  # by shard: steps and samples whose progress was sent or given up
        self._uncounted = [0] * len(layout.shards)  # by shard: samples sent, but not counted by any commit yet
        self._settled = [(0, 0)] * len(layout.shards)  # by shard: steps settled, now and before the last change
        self._dropped = 0.0
        self._landing: tuple[int, ...] = ()
        self._ended = False
        self.exchange = Exchange(0, (), 0, ())
        self.counted = 0
        """The number of exchanges that were counted in every shard."""
        self.torn = False
        """Whether a merge was broken off. Then only a part of the model may have been merged, so all of it is loaded
        again."""

    @property
    def dropped_samples(self) -> int:
        """The number of samples whose progress was dropped. If only a part of the model lost that progress, a sample
        counts by that part's share of the model."""
        return round(self._dropped)

    @property
    def settled(self) -> int:
        """The number of steps since the start whose progress will not be sent again, because commits have counted it in
        every shard, or it was given up."""
        return min(steps for steps, _ in self._settled)

    # -- what is sent

    def weigh(self, shards: Collection[int]) -> tuple[float | None, int]:
        """Compute the weight and the number of samples that a contribution of these shards would have now. The weight
        is None if contributions are weighted by samples and the trainer has reported none."""
        steps = min((self._trained[0] - self._sent[shard][0] for shard in shards), default=0)
        samples = min((self._trained[1] - self._sent[shard][1] for shard in shards), default=0)
        # progress that was sent before but not counted is sent again
        carried = min((self._uncounted[shard] for shard in shards), default=0)
        if not steps and not carried:
            weight: float | None = WEIGHT_MIN  # nothing was trained, which must not dilute the mean
        elif self._weighting == "samples":
            weight = float(samples or carried) if samples or not steps else None
        else:
            weight = float(max(1, steps)) if self._weighting == "steps" else 1.0
        return weight, samples or steps

    def send(self, n: int, shards: tuple[int, ...], samples: int) -> None:
        """Record that the request with the number `n` sends the progress of these shards up to the last merge. That
        progress was made on `samples` samples."""
        self.exchange = Exchange(n, shards, samples, tuple(self._sent[shard] for shard in shards))
        self._sent_at = self._trained[0]
        for shard in shards:
            self._sent[shard] = self._trained
            self._uncounted[shard] += samples

    def released(self, *, sent: bool) -> None:
        """Record that the exchange is over. If `sent` is true, the next merge brings its result. Otherwise the exchange
        never began, and its progress is still to be sent."""
        exchange = self.exchange
        if sent:
            self._landing = exchange.shards
            return
        for shard, before in zip(exchange.shards, exchange.before, strict=True):
            self._sent[shard] = before
            self._uncounted[shard] -= exchange.samples

    # -- what is merged

    def merge(
        self, carries: Mapping[int, Carry], due: Collection[int], trained: tuple[int, int], *, afresh: bool, ended: bool
    ) -> dict[int, Take]:
        """Choose what the trainer does (`Take`) with each shard that the log offers in `carries`, and with each shard
        of `due` whose base was corrupted; with every shard if `afresh` or `ended`.

        `trained`: the trainer's steps and samples since the start. `due`: the shards that are sent next. `afresh`: the
        model's values are unusable. `ended`: the run has ended, so no round will count further progress.
        """
        self._trained, landing, self._landing = trained, self._landing, ()
        self.counted += bool(landing) and all(carries.get(shard) is Carry.SUBTRACT for shard in landing)
        for shard, carry in carries.items():
            self._settle(shard, carry)
        everything = range(len(self._parts))
        afresh, self.torn = afresh or self.torn, False
        over, self._ended = self._ended, ended
        if afresh or (ended and not over):  # no round counts progress after the end
            self._give_up(everything)
        if afresh or ended:
            return dict.fromkeys(everything, Take.FORGET if afresh else Take.DROP)
        lost = self._bases.lost & {*carries, *due}
        known = ((shard, carry) for shard, carry in carries.items() if shard not in lost)
        takes = {shard: self._take(shard, carry, landed=shard in landing) for shard, carry in known}
        self._give_up(lost)
        return takes | dict.fromkeys(lost, Take.FORGET)

    def _take(self, shard: int, carry: Carry, *, landed: bool) -> Take:
        """Choose the `Take` of one shard from the log's `carry`. `landed`: whether this merge brings the result of the
        shard's exchange."""
        if carry is Carry.SUBTRACT and landed and self._mixes and shard not in self._buffers:
            self._lose(shard, 1 - self._share)
            return Take.MIX if self._share else Take.DROP
        if carry is Carry.DROP:
            self._lose_all(shard)
        elif shard in self._bases.gone:
            if self._sent_at != self._trained[0]:
                self._lose_all(shard)  # training went on after a wait was broken off: that progress is unknown
            return Take.SENT if carry is Carry.KEEP else Take.DROP
        elif carry is Carry.SUBTRACT and self._sent[shard][0] == self._trained[0]:
            return Take.DROP  # nothing was trained since the sending, so load exactly the global value
        return Take(carry.value)

    # -- samples

    def _settle(self, shard: int, carry: Carry) -> None:
        """If the carry says that a shard's sent samples were counted or dropped, stop listing them as uncounted. Add
        dropped ones to `dropped_samples`."""
        if carry is Carry.DROP:
            self._dropped += self._parts[shard] * self._uncounted[shard]
        if carry in (Carry.DROP, Carry.SUBTRACT):
            self._uncounted[shard] = 0
            self._settled[shard] = self._sent[shard][0], self._settled[shard][0]
        if carry is Carry.RESTORE:  # the commit that counted the progress is of a lineage that lost
            self._settled[shard] = self._settled[shard][1], self._settled[shard][1]

    def _lose(self, shard: int, share: float) -> None:
        """Add to `dropped_samples` the fraction `share` of a shard's progress since its last sending."""
        steps, samples = self._sent[shard]
        self._dropped += self._parts[shard] * share * (self._trained[1] - samples or self._trained[0] - steps)

    def _lose_all(self, shard: int) -> None:
        """Add to `dropped_samples` all of a shard's progress since its last sending."""
        self._lose(shard, 1.0)
        self._sent[shard] = self._trained
        if not self._uncounted[shard]:
            self._settled[shard] = self._trained[0], self._settled[shard][0]

    def _give_up(self, shards: Iterable[int]) -> None:
        """Add to `dropped_samples` all progress of these shards that no commit has counted."""
        for shard in shards:
            self._settle(shard, Carry.DROP)
            self._lose_all(shard)
