"""Which samples count as dropped, for what reason, and what is told of a sending: the record of progress alone."""

from __future__ import annotations

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.core import carry
from p2p_diloco.core.carry import Outcome
from p2p_diloco.core.leases import WEIGHT_MIN
from p2p_diloco.peer import progress
from p2p_diloco.peer.progress import Blend, LocalProgress
from p2p_diloco.tensors.layout import Layout, ParamSpec

ALL, SENT, NONE = Blend.ALL, Blend.SENT, Blend.NONE
COUNTED, KEPT = Outcome(counted=True), Outcome()
LEFT, PART, OLD = (Outcome(dropped=why) for why in (carry.LEFT, carry.PART, carry.OLD))
BOTH = Outcome(counted=True, dropped=carry.SINCE)
LOG = {outcome.dropped: outcome for outcome in (LEFT, BOTH, PART, OLD)}
"""The outcomes by which the log drops progress, by the reason."""
OWN = (progress.DAMAGED, progress.UNSOUND, progress.TORN, progress.WENT_ON, progress.DATA, progress.ENDED)
"""The trainer's own reasons."""
LAYOUT = Layout.build([ParamSpec(name, (2,), "float32") for name in "ab"], 2)


class Story:
    """The progress of a trainer whose model has two fragments of one size."""

    def __init__(self, weighting: str = "steps") -> None:
        self.record = LocalProgress(RunConfig(weighting=weighting, merge="rebase"), LAYOUT)
        self.steps = self.samples = 0
        self.sent = 0, 0
        self.gone, self.lost = set[int](), set[int]()

    def trains(self, steps: int = 1, samples: int = 0) -> None:
        self.steps, self.samples = self.steps + steps, self.samples + samples

    def merges(self, *outcomes: Outcome, landed: int | None = None, **happens: bool) -> list[Blend]:
        """A merge of the first fragments with these outcomes: what becomes of each that is loaded."""
        told, trained = dict(enumerate(outcomes)), (self.steps, self.samples)
        bases = {"gone": self.gone, "lost": self.lost}
        blends = self.record.merge(told, trained, landed=landed, due=None, **bases, **happens)
        self.gone, self.lost = self.gone - blends.keys(), self.lost - blends.keys()
        return [blend for _, blend in sorted(blends.items())]

    def sends(self, fragment: int = 0) -> tuple[float | None, int]:
        """The weight and the samples of a sending."""
        self.merges()
        weight, samples = self.record.weigh(fragment)
        self.record.send(fragment, samples)
        self.sent = fragment, samples
        return weight, samples

    def lands(self, *outcomes: Outcome) -> list[Blend]:
        """The exchange is over, and its result is merged."""
        return self.merges(*outcomes, landed=self.sent[0])

    def reasons(self) -> dict[str, float]:
        return {why: samples for why, samples in self.record.dropped.items() if samples}


def happens(story: Story, why: str) -> Blend:
    """What is loaded of the first fragment when its progress is dropped for this reason."""
    if why in LOG:
        return story.lands(LOG[why])[0]
    match why:
        case progress.DAMAGED:
            story.lost = {0}
        case progress.WENT_ON:
            story.gone = {0}
        case progress.TORN:
            story.record.torn = True
        case progress.DATA:
            story.lands(KEPT)
            return story.record.drop(why)[0]
        case progress.UNSOUND:
            return story.merges(KEPT, unsound=True)[0]
        case progress.ENDED:
            return story.merges(KEPT, ended=True)[0]
    return story.lands(KEPT)[0]


SAMPLES = dict.fromkeys(OWN, 4 + 2 + 6) | dict.fromkeys((*LOG, progress.DAMAGED), 4 + 2)
SAMPLES |= dict.fromkeys((carry.SINCE, progress.WENT_ON), 2)
"""How much is dropped, of one fragment or of both, if 4 steps were sent of the first one and 2 were made since."""


@pytest.mark.parametrize("why", [*LOG, *OWN])
def test_a_drop_says_why(why: str) -> None:
    """With the number of samples, once; what comes later is measured from there, and only it is sent. A state that
    counts what was dropped takes nothing away from local values, which no longer hold it."""
    story = Story()
    story.trains(4)
    story.sends(0)
    story.trains(2)
    assert happens(story, why) == (SENT if why == progress.WENT_ON else NONE)
    assert story.reasons() == {why: SAMPLES[why] / 2}
    assert story.record.dropped_samples == SAMPLES[why] // 2
    story.trains(3)
    if why not in (progress.WENT_ON, progress.ENDED):
        assert story.merges(COUNTED) == [ALL]
    assert story.sends(0) == (3.0, 3)
    assert story.reasons() == {why: SAMPLES[why] / 2}


@pytest.mark.parametrize(
    ("weighting", "first", "again"), [("steps", 4.0, 1.0), ("samples", 40.0, 40.0), ("uniform", 1.0, 1.0)]
)
def test_weights(weighting: str, first: float, again: float) -> None:
    """Of what was trained since the fragment's last sending; where nothing was, of what is sent again; else nothing."""
    story = Story(weighting)
    assert story.sends() == (WEIGHT_MIN, 0)
    story.trains(4, samples=40)
    assert story.sends() == (first, 40)
    assert story.lands(KEPT) == [ALL]
    assert story.sends() == (again, 0)


def test_steps_are_settled_once_every_fragment_has_counted_them() -> None:
    """Sent steps are settled by the state that counts them in the last fragment, not by the sending. Dropped steps are
    settled too."""
    story = Story()
    story.trains(4)
    story.sends(0)
    story.lands(COUNTED)
    assert story.record.settled == 0
    story.sends(1)
    story.lands(KEPT, KEPT)
    assert story.record.settled == 0
    story.merges(KEPT, COUNTED)
    assert story.record.settled == 4
    story.trains(2)
    story.merges(OLD, LEFT)
    assert story.record.settled == 6
