"""What became of a trainer's local progress: its steps and samples, and what a merge does with its values.

Law: pure. By fragment, because a contribution is counted whole or not at all. The core says what a state that is merged
counts (`core.carry`); here the samples are counted, and one `Blend` is computed for each fragment that is loaded, which
the trainer's processes carry out. Steps and samples are whole numbers; if no samples are reported, a step counts as one
sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from p2p_diloco.config import RunConfig
from p2p_diloco.core.carry import LEFT, Outcome
from p2p_diloco.core.leases import WEIGHT_MIN
from p2p_diloco.tensors.layout import Layout

DAMAGED = "the global values that it is measured from were corrupted in memory"
UNSOUND = "it is not finite or too large"
TORN = "a merge was broken off, so it isn't known what of the progress is counted"
WENT_ON = "training went on after a wait was broken off, and the global values before it are not kept"
DATA = "other peers have got the data that it was made from"
ENDED = "the run has ended"


class Blend(Enum):
    """What a merge does with local values. θ: the new global values. base: the global values that were loaded before.
    Δ: the pseudo-gradient that was last sent, which is base − local at sending. α: the run's `merge_alpha`."""

    ALL = "all"  # local ← θ + (local − base): all stays, because θ doesn't count what was sent
    SINCE = "since"  # local ← θ + (local − base) + Δ: what was trained since the sending stays
    SENT = "sent"  # local ← θ − Δ: the base is not kept, because nothing was trained since the sending
    MIX = "mix"  # local ← θ + α · (local − θ); buffers are never mixed, but as with SINCE
    NONE = "none"  # local ← θ, to the bit

    @property
    def reads_sent(self) -> bool:
        """Whether the new local value depends on Δ."""
        return self in (Blend.SINCE, Blend.SENT)


Made = tuple[int, int]
"""Steps and samples since the trainer's start."""


@dataclass(slots=True)
class Progress:
    """The record of one fragment.

    part: the fragment's part of the model's elements. sent: whether local values still hold what was last sent, so that
    a state that counts it takes it away. sent_at: what was trained until the last sending, or was dropped; before: the
    same before the last exchange. uncounted: samples sent that no merged state counts. counted: samples that were last
    sent, with what they carried, and that the base counts. settled: steps counted or dropped.
    """

    part: float
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

    def count(self) -> None:
        """Record that what was sent is counted."""
        self.counted, self.uncounted = self.uncounted or self.counted, 0
        self.sent, self.settled = False, self.sent_at[0]

    def since(self, trained: Made) -> int:
        """How many samples were trained on since the last sending."""
        steps, samples = self.sent_at
        return trained[1] - samples or trained[0] - steps

    def lose(self, trained: Made) -> float:
        """Drop what was trained since the last sending. Returns how many samples of the model that is."""
        lost, self.sent_at = self.since(trained), trained
        if not self.uncounted:
            self.settled = trained[0]
        return self.part * lost

    def drop(self, trained: Made, why: str) -> float:
        """Drop all that no state counts; with a lineage that has lost, also what it counted last. Returns how many
        samples of the model that is."""
        lost, self.uncounted, self.sent = self.uncounted, 0, False
        if why == LEFT:
            lost, self.counted = lost + self.counted, 0
        return self.part * lost + self.lose(trained)


class LocalProgress:
    """The record of all fragments since the trainer's start."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        elements = Counter[int]()
        for place in layout.slices:
            elements[place.fragment] += place.numel
        self._fragments = [Progress(count / layout.numel) for _, count in sorted(elements.items())]
        self._mix = config.local_share if config.merge == "mix" else None
        self._weighting = config.weighting
        self._trained: Made = 0, 0  # as of the last merge
        self._stood_at = 0  # steps at the last sending, even if that exchange never began
        self._mixed_away = 0.0
        self._ended = False
        self.dropped = defaultdict[str, float](float)
        """Dropped samples by the reason. If only a part of the model lost its progress, a sample counts by that
        part."""
        self.counted = 0
        """The number of exchanges that were counted."""
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
        every fragment, or it was dropped."""
        return min(one.settled for one in self._fragments)

    # -- what is sent

    def weigh(self, fragment: int) -> tuple[float | None, int]:
        """Compute the weight and the number of samples that a contribution to this fragment would have now. The weight
        is None if contributions are weighted by samples and the trainer has reported none."""
        record = self._fragments[fragment]
        steps, samples = (now - then for now, then in zip(self._trained, record.sent_at, strict=True))
        carried = record.uncounted  # progress that was sent before but not counted is sent again
        if not steps and not carried:
            weight: float | None = WEIGHT_MIN  # nothing was trained, which must not dilute the mean
        elif self._weighting == "samples":
            weight = float(samples or carried) if samples or not steps else None
        else:
            weight = float(max(1, steps)) if self._weighting == "steps" else 1.0
        return weight, samples or steps

    def send(self, fragment: int, samples: int) -> None:
        """Record that the progress of a fragment up to the last merge is sent. It was made on `samples` samples."""
        self._stood_at = self._trained[0]
        self._fragments[fragment].send(self._trained, samples)

    def unsend(self, fragment: int, samples: int) -> None:
        """Record that the last exchange, of this fragment and samples, never began: its progress is still to be
        sent."""
        record = self._fragments[fragment]
        record.sent_at, record.uncounted = record.before, record.uncounted - samples

    # -- what is merged

    def merge(
        self,
        outcomes: Mapping[int, Outcome],
        trained: Made,
        *,
        landed: int | None = None,
        due: int | None = None,
        gone: Collection[int] = (),
        lost: Collection[int] = (),
        again: bool = False,
        unsound: bool = False,
        ended: bool = False,
    ) -> dict[int, Blend]:
        """Compute what the merge does with each fragment of `outcomes`, and with the one that is `due` if its base is
        lost; with every fragment if all progress is dropped.

        `trained`: by this trainer, since its start. `landed`: the fragment of the exchange whose result this is;
        `again`: it was taken up again after further steps, all of which stay. `due`: the fragment that is sent next.
        `gone`: fragments without a base, because θ changed while training stood still after a sending; `lost`: because
        it failed its checksum. `unsound`: the model's values are unusable. `ended`: the run has ended, so no round
        counts further progress.
        """
        self._trained = trained
        blends: dict[int, Blend] = {}
        counts = set[int]()  # what was sent is counted, and local values still hold it
        for fragment, outcome in outcomes.items():
            record = self._fragments[fragment]
            if outcome.counted:
                self.counted += fragment == landed
                counts |= {fragment} if record.sent else set()
                record.count()
            if outcome.dropped:
                blends |= self._drop([fragment], outcome.dropped)
        torn, self.torn = self.torn, False
        over, self._ended = self._ended, ended
        if unsound or torn or (ended and not over):
            return self.drop(UNSOUND if unsound else TORN if torn else ENDED)
        if ended:
            return dict.fromkeys(range(len(self._fragments)), Blend.NONE)
        lost = {*lost} & {*outcomes, due}
        for fragment in outcomes.keys() - lost - blends.keys():
            record = self._fragments[fragment]
            if fragment in counts and fragment == landed and self._mix is not None and not again:
                self._mixed_away += record.part * (1 - self._mix) * record.since(trained)
                blends[fragment] = Blend.MIX
            elif fragment in gone:
                if self._stood_at != trained[0]:
                    self.dropped[WENT_ON] += record.lose(trained)
                blends[fragment] = Blend.NONE if fragment in counts else Blend.SENT
            elif fragment not in counts:
                blends[fragment] = Blend.ALL
            else:  # without a step since the sending exactly the global value is loaded
                blends[fragment] = Blend.NONE if record.sent_at[0] == trained[0] else Blend.SINCE
        return blends | self._drop(lost, DAMAGED)

    def drop(self, why: str) -> dict[int, Blend]:
        """Drop all progress that no commit has counted."""
        return self._drop(range(len(self._fragments)), why)

    def _drop(self, fragments: Iterable[int], why: str) -> dict[int, Blend]:
        blends = dict.fromkeys(fragments, Blend.NONE)
        for fragment in blends:
            self.dropped[why] += self._fragments[fragment].drop(self._trained, why)
        return blends
