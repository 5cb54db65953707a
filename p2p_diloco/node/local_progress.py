"""What becomes of a trainer's local progress at each merge, and how many samples of it were sent, counted and dropped.

Law: pure, and decided here alone. The log says what a newer value counts (`Carry`), `Bases` says what is known of the
base; with the run's settings that makes one `Take` for each shard, which the trainer's processes carry out. Whole
numbers of steps and samples; where no samples are reported, a step counts as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.node.bases import Bases
from p2p_diloco.tensors.layout import Layout
from p2p_diloco.tensors.mean import WEIGHT_MIN


class Take(Enum):
    """What a trainer's process makes of one shard when it merges.

    θ: the shard's new global values. base: those that were loaded before. Δ: the pseudo-gradient that was last sent.
    """

    KEEP = "keep"  # local ← θ + (local − base)
    SUBTRACT = "subtract"  # local ← θ + (local − base) + Δ
    RESTORE = "restore"  # local ← θ + (local − base) − Δ
    SENT = "sent"  # local ← θ − Δ: of the progress only what was sent is known
    MIX = "mix"  # local ← θ, and `local_share` of the difference between local and θ
    DROP = "drop"  # local ← θ
    FORGET = "forget"  # local ← θ, and Δ ← 0: what was sent is not to be taken away again, or put back


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange that the trainer made last. `n`: its request. `before`: what had been sent of each shard until then,
    as (steps, samples)."""

    n: int
    shards: tuple[int, ...]
    samples: int
    before: tuple[tuple[int, int], ...]


class LocalProgress:
    """One trainer's, since it started."""

    def __init__(self, config: RunConfig, layout: Layout, bases: Bases) -> None:
        self._weighting, self._mixes, self._share = config.weighting, config.merge == "mix", config.local_share
        self._bases = bases
        self._parts = [shard.numel / layout.numel for shard in layout.shards]
        self._trained = 0, 0  # steps and samples since the start, as of the last merge
        self._sent_at = 0  # steps when something was sent last, also if that exchange never began
        self._sent = [(0, 0)] * len(layout.shards)  # by shard: of these the progress was sent, or given up
        self._uncounted = [0] * len(layout.shards)  # samples whose progress was sent, and is counted by no commit yet
        self._dropped = 0.0
        self._landing: tuple[int, ...] = ()
        self._ended = False
        self.exchange = Exchange(0, (), 0, ())
        self.counted = 0
        """Exchanges that were counted in every shard."""
        self.torn = False
        """Whether a merge was broken off: half of the model may have been merged, so all is loaded anew."""

    @property
    def dropped_samples(self) -> int:
        """Samples whose progress was given up, by the share of the model that lost it."""
        return round(self._dropped)

    # -- what is sent

    def weigh(self, shards: Collection[int]) -> tuple[float | None, int]:
        """The weight and the samples of what these shards would send now. The weight is None if it goes by samples, and
        none were reported."""
        steps = min((self._trained[0] - self._sent[shard][0] for shard in shards), default=0)
        samples = min((self._trained[1] - self._sent[shard][1] for shard in shards), default=0)
        # what was sent before and is counted nowhere is sent again
        carried = min((self._uncounted[shard] for shard in shards), default=0)
        if not steps and not carried:
            weight: float | None = WEIGHT_MIN  # nothing was trained: that is not to dilute the mean
        elif self._weighting == "samples":
            weight = float(samples or carried) if samples or not steps else None
        else:
            weight = float(max(1, steps)) if self._weighting == "steps" else 1.0
        return weight, samples or steps

    def send(self, n: int, shards: tuple[int, ...], samples: int) -> None:
        """Request `n` sends what these shards had at the last merge: so many samples."""
        self.exchange = Exchange(n, shards, samples, tuple(self._sent[shard] for shard in shards))
        self._sent_at = self._trained[0]
        for shard in shards:
            self._sent[shard] = self._trained
            self._uncounted[shard] += samples

    def released(self, *, sent: bool) -> None:
        """The exchange is over, and the next merge is that of its result; or it never began."""
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
        """What the trainer makes of the shards that the log offers, and of all others that it can't go on with.

        `trained`: its steps and samples, all since the start. `due`: the shards that are sent next. `afresh`: the
        trainer can't use what is in its model. `ended`: the run has, so no round is left to count its progress.
        """
        self._trained, landing, self._landing = trained, self._landing, ()
        self.counted += bool(landing) and all(carries.get(shard) is Carry.SUBTRACT for shard in landing)
        for shard, carry in carries.items():
            self._settle(shard, carry)
        everything = range(len(self._parts))
        afresh, self.torn = afresh or self.torn, False
        over, self._ended = self._ended, ended
        if afresh or (ended and not over):  # what is trained after the end is in nobody's count
            self._give_up(everything)
        if afresh or ended:
            return dict.fromkeys(everything, Take.FORGET if afresh else Take.DROP)
        lost = self._bases.lost & {*carries, *due}
        known = ((shard, carry) for shard, carry in carries.items() if shard not in lost)
        takes = {shard: self._take(shard, carry, landed=shard in landing) for shard, carry in known}
        self._give_up(lost)
        return takes | dict.fromkeys(lost, Take.FORGET)

    def _take(self, shard: int, carry: Carry, *, landed: bool) -> Take:
        """What becomes of one shard's progress, by the carry that the log gives it."""
        if carry is Carry.SUBTRACT and landed and self._mixes:
            self._lose(shard, 1 - self._share)
            return Take.MIX if self._share else Take.DROP
        if carry is Carry.DROP:
            self._lose_all(shard)
        elif shard in self._bases.gone:
            if self._sent_at != self._trained[0]:
                self._lose_all(shard)  # a wait was broken off, and training went on: what was trained since is unknown
            return Take.SENT if carry is Carry.KEEP else Take.DROP
        elif carry is Carry.SUBTRACT and self._sent[shard][0] == self._trained[0]:
            return Take.DROP  # nothing was trained since the sending: so the global value is loaded to the bit
        return Take(carry.value)

    # -- samples

    def _settle(self, shard: int, carry: Carry) -> None:
        """What was sent of the shard is counted, or dropped, or neither yet."""
        if carry is Carry.DROP:
            self._dropped += self._parts[shard] * self._uncounted[shard]
        if carry in (Carry.DROP, Carry.SUBTRACT):
            self._uncounted[shard] = 0

    def _lose(self, shard: int, share: float) -> None:
        """That share of the progress since the shard's last sending is lost."""
        steps, samples = self._sent[shard]
        self._dropped += self._parts[shard] * share * (self._trained[1] - samples or self._trained[0] - steps)

    def _lose_all(self, shard: int) -> None:
        """All progress since the shard's last sending is lost."""
        self._lose(shard, 1.0)
        self._sent[shard] = self._trained

    def _give_up(self, shards: Iterable[int]) -> None:
        """All progress of these shards that no commit counts is lost."""
        for shard in shards:
            self._settle(shard, Carry.DROP)
            self._lose_all(shard)
