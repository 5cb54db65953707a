"""What became of a trainer's local progress: the one record of it, and what a merge does with it.

Law: pure. A state that is merged counts what was sent of a shard, or doesn't count it, or the progress is dropped; then
the record says why. From that, each merge computes one `Blend` for each shard that it loads, which the trainer's
processes carry out. Steps and samples are whole numbers; if no samples are reported, a step counts as one sample.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from p2p_diloco.core.carry import Carry
from p2p_diloco.core.leases import WEIGHT_MIN


class Anchor(Enum):
    """What the local progress that stays at a merge is measured from. θ: the new global values. base: the global values
    that were loaded before. Δ: the pseudo-gradient that was last sent, which is base − local at sending. Buffers are
    never mixed."""

    BASE = "base"  # local ← θ + (local − base): all stays, because θ doesn't count what was sent
    SENT = "sent"  # local ← θ + (local − base) + Δ: what was trained since the sending stays
    GONE = "gone"  # local ← θ − Δ: the base is not kept, because nothing was trained since the sending
    NEW = "new"  # local ← θ + keep · (local − θ)


class Blend(NamedTuple):
    """What a merge does with one shard. `keep`: the part of the progress that stays; less than 1 only for `NEW`."""

    anchor: Anchor
    keep: float = 1.0

    @property
    def reads_local(self) -> bool:
        """Whether the new local value depends on the present one."""
        return self.anchor is not Anchor.GONE and self.keep > 0

    @property
    def reads_sent(self) -> bool:
        """Whether the new local value depends on Δ."""
        return self.anchor in (Anchor.SENT, Anchor.GONE)


LOAD = Blend(Anchor.NEW, 0.0)
"""local ← θ, to the bit."""


class Drop(Enum):
    """Why progress is dropped, as text for the log. The log of commits finds the first four reasons (`core.carry`)."""

    LEFT = "its lineage has lost"
    SINCE = "its lineage has lost, though what was sent before is counted"
    PART = "only a part of what was sent is counted, and the rest can't be told from it"
    OLD = "it was sent or refused too often without being counted"
    DAMAGED = "the global values that it is measured from were corrupted in memory"
    UNSOUND = "it is not finite or too large"
    TORN = "a merge was broken off, so it isn't known what of the progress is counted"
    WENT_ON = "training went on after a wait was broken off, and the global values before it are not kept"
    DATA = "other peers have got the data that it was made from"
    ENDED = "the run has ended"


Outcome = bool | Drop
"""What a state that is merged says of what was sent: it is counted now, it isn't, or the progress is dropped."""


def outcome_of(carry: Carry) -> Outcome:
    """What the log says of a shard's progress, in the words of this record."""
    return carry is Carry.SUBTRACT if carry in (Carry.SUBTRACT, Carry.KEEP) else Drop[carry.name]


COUNTED = (True, Drop.SINCE)
"""The outcomes by which what was sent is counted."""
Made = tuple[int, int]
"""Steps and samples since the trainer's start."""


@dataclass(slots=True)
class Progress:
    """The record of one shard.

    part: the shard's part of the model's elements. mix: the share of local values that stays if the result of an
    exchange is counted; None: all that was trained since the sending stays. sent: whether local values still hold what
    was last sent, so that a state that counts it takes it away. sent_at: what was trained until the last sending, or
    was dropped; before: the same before the last exchange. uncounted: samples sent that no merged state counts.
    counted: samples that were last sent, with what they carried, and that the base counts. settled: steps counted or
    dropped.
    """

    part: float
    mix: float | None
    sent: bool = False
    sent_at: Made = (0, 0)
    before: Made = (0, 0)
    uncounted: int = 0
    counted: int = 0
    settled: int = 0

    def send(self, trained: Made, samples: int) -> None:
        """Record that all progress is sent."""
        self.before, self.sent_at, self.sent = self.sent_at, trained, True
        self.uncounted, self.counted = self.uncounted + samples, 0

    def settle(self, outcome: Outcome) -> int:
        """Record what becomes of what was sent. Returns how many of its samples are dropped."""
        if outcome is False:
            return 0
        lost, self.uncounted, self.sent, self.settled = self.uncounted, 0, False, self.sent_at[0]
        if outcome in COUNTED:
            lost, self.counted = 0, lost or self.counted
        elif outcome is Drop.LEFT:
            lost, self.counted = lost + self.counted, 0
        return lost

    def since(self, trained: Made) -> int:
        """How many samples were trained on since the last sending."""
        steps, samples = self.sent_at
        return trained[1] - samples or trained[0] - steps

    def lose(self, trained: Made) -> int:
        """Drop what was trained since the last sending. Returns how many samples that is."""
        lost, self.sent_at = self.since(trained), trained
        if not self.uncounted:
            self.settled = trained[0]
        return lost


class LocalProgress:
    """The record of all shards since the trainer's start."""

    def __init__(self, parts: Sequence[float], mixes: Sequence[float | None], weighting: str) -> None:
        """`parts`, `mixes`: `part` and `mix` of each shard. `weighting`: what a contribution's weight is measured
        in."""
        self._shards = [Progress(part, mix) for part, mix in zip(parts, mixes, strict=True)]
        self._weighting = weighting
        self._trained: Made = 0, 0  # as of the last merge
        self._stood_at = 0  # steps at the last sending, even if that exchange never began
        self._mixed_away = 0.0
        self._ended = False
        self.dropped = dict.fromkeys(Drop, 0.0)
        """Dropped samples by the reason. If only a part of the model lost its progress, a sample counts by that
        part."""
        self.counted = 0
        """The number of exchanges that were counted in every shard."""
        self.torn = False
        """Whether a merge was broken off. Then only a part of the model may have been merged, so all of it is loaded
        again."""

    @property
    def dropped_samples(self) -> int:
        """The number of samples whose progress was dropped, or mixed away."""
        return round(sum(self.dropped.values()) + self._mixed_away)

    @property
    def settled(self) -> int:
        """The number of steps since the start whose progress will not be sent again, because commits have counted it in
        every shard, or it was dropped."""
        return min(one.settled for one in self._shards)

    # -- what is sent

    def weigh(self, shards: Collection[int]) -> tuple[float | None, int]:
        """Compute the weight and the number of samples that a contribution of these shards would have now. The weight
        is None if contributions are weighted by samples and the trainer has reported none."""
        records = [self._shards[shard] for shard in shards]
        steps = min((self._trained[0] - one.sent_at[0] for one in records), default=0)
        samples = min((self._trained[1] - one.sent_at[1] for one in records), default=0)
        # progress that was sent before but not counted is sent again
        carried = min((one.uncounted for one in records), default=0)
        if not steps and not carried:
            weight: float | None = WEIGHT_MIN  # nothing was trained, which must not dilute the mean
        elif self._weighting == "samples":
            weight = float(samples or carried) if samples or not steps else None
        else:
            weight = float(max(1, steps)) if self._weighting == "steps" else 1.0
        return weight, samples or steps

    def send(self, shards: Iterable[int], samples: int) -> None:
        """Record that the progress of these shards up to the last merge is sent. It was made on `samples` samples."""
        self._stood_at = self._trained[0]
        for shard in shards:
            self._shards[shard].send(self._trained, samples)

    def unsend(self, shards: Iterable[int], samples: int) -> None:
        """Record that the last exchange, of these shards and samples, never began: its progress is still to be sent."""
        for record in (self._shards[shard] for shard in shards):
            record.sent_at, record.uncounted = record.before, record.uncounted - samples

    # -- what is merged

    def merge(
        self,
        outcomes: Mapping[int, Outcome],
        trained: Made,
        *,
        landed: Collection[int] = (),
        due: Collection[int] = (),
        gone: Collection[int] = (),
        lost: Collection[int] = (),
        again: bool = False,
        unsound: bool = False,
        ended: bool = False,
    ) -> dict[int, Blend]:
        """Compute what the merge does with each shard of `outcomes`, and with each of `due` whose base is lost; with
        every shard if all progress is dropped.

        `trained`: by this trainer, since its start. `landed`: the shards of the exchange whose result this is; `again`:
        it was taken up again after further steps, all of which stay. `due`: the shards that are sent next. `gone`:
        shards without a base, because θ changed while training stood still after a sending; `lost`: because it failed
        its checksum. `unsound`: the model's values are unusable. `ended`: the run has ended, so no round counts further
        progress.
        """
        self._trained = trained
        self.counted += bool(landed) and all(outcomes.get(shard) in COUNTED for shard in landed)
        counts = {shard for shard, outcome in outcomes.items() if outcome is True and self._shards[shard].sent}
        blends: dict[int, Blend] = {}
        for shard, outcome in outcomes.items():
            if isinstance(outcome, Drop):
                blends |= self._drop((shard,), outcome)
            else:
                self._shards[shard].settle(outcome)
        torn, self.torn = self.torn, False
        over, self._ended = self._ended, ended
        if unsound or torn or (ended and not over):
            return self.drop(Drop.UNSOUND if unsound else Drop.TORN if torn else Drop.ENDED)
        if ended:
            return dict.fromkeys(range(len(self._shards)), LOAD)
        lost = {*lost} & {*outcomes, *due}
        for shard in outcomes.keys() - lost - blends.keys():
            record = self._shards[shard]
            if shard in counts and shard in landed and record.mix is not None and not again:
                self._mixed_away += record.part * (1 - record.mix) * record.since(trained)
                blends[shard] = Blend(Anchor.NEW, record.mix)
            elif shard in gone:
                if self._stood_at != trained[0]:
                    self.dropped[Drop.WENT_ON] += record.part * record.lose(trained)
                blends[shard] = LOAD if shard in counts else Blend(Anchor.GONE)
            elif shard not in counts:
                blends[shard] = Blend(Anchor.BASE)
            else:  # without a step since the sending exactly the global value is loaded
                blends[shard] = LOAD if record.sent_at[0] == trained[0] else Blend(Anchor.SENT)
        return blends | self._drop(lost, Drop.DAMAGED)

    def drop(self, why: Drop) -> dict[int, Blend]:
        """Drop all progress that no commit has counted."""
        return self._drop(range(len(self._shards)), why)

    def _drop(self, shards: Iterable[int], why: Drop) -> dict[int, Blend]:
        for record in (self._shards[shard] for shard in shards):
            self.dropped[why] += record.part * (record.settle(why) + record.lose(self._trained))
        return dict.fromkeys(shards, LOAD)
