"""What becomes of local progress at a merge, and which samples count as dropped, for what reason: the record alone."""

from __future__ import annotations

import pytest

from p2p_diloco.core.leases import WEIGHT_MIN
from p2p_diloco.peer.progress import COUNTED, LOAD, Anchor, Blend, Drop, LocalProgress, Outcome

ALL, SINCE, SENT = Blend(Anchor.BASE), Blend(Anchor.SENT), Blend(Anchor.GONE)
"""What stays: all progress; that since the sending; that which was sent."""
LOG = (Drop.LEFT, Drop.SINCE, Drop.PART, Drop.OLD)
"""The reasons for which the log drops progress."""


class Story:
    """The progress of a trainer whose model has two shards of one size."""

    def __init__(self, mix: float | None = None, buffers: bool = False, weighting: str = "steps") -> None:
        """`buffers`: of which the second shard is."""
        self.record = LocalProgress([0.5, 0.5], [mix, None if buffers else mix], weighting)
        self.steps = self.samples = 0
        self.sent: tuple[tuple[int, ...], int] = (), 0
        self.gone, self.lost = set[int](), set[int]()

    def trains(self, steps: int = 1, samples: int = 0) -> None:
        self.steps, self.samples = self.steps + steps, self.samples + samples

    def merges(
        self, *outcomes: Outcome, landed: tuple[int, ...] = (), due: tuple[int, ...] = (), **happens: bool
    ) -> list[Blend]:
        """A merge of the first shards with these outcomes: what becomes of each that is loaded."""
        told, trained = dict(enumerate(outcomes)), (self.steps, self.samples)
        bases = {"gone": self.gone, "lost": self.lost}
        blends = self.record.merge(told, trained, landed=landed, due=due, **bases, **happens)
        self.gone, self.lost = self.gone - blends.keys(), self.lost - blends.keys()
        return [blend for _, blend in sorted(blends.items())]

    def sends(self, *shards: int) -> tuple[float | None, int]:
        """The weight and the samples of a sending."""
        self.merges()
        weight, samples = self.record.weigh(shards)
        self.record.send(shards, samples)
        self.sent = shards, samples
        return weight, samples

    def lands(self, *outcomes: Outcome) -> list[Blend]:
        """The exchange is over, and its result is merged."""
        return self.merges(*outcomes, landed=self.sent[0])

    @property
    def dropped(self) -> int:
        return self.record.dropped_samples

    def reasons(self) -> dict[Drop, float]:
        return {why: samples for why, samples in self.record.dropped.items() if samples}


# -- each reason for a drop


def happens(story: Story, why: Drop) -> Blend:
    """What is loaded of the first shard when its progress is dropped for this reason."""
    match why:
        case Drop.DAMAGED:
            story.lost = {0}
        case Drop.WENT_ON:
            story.gone = {0}
        case Drop.TORN:
            story.record.torn = True
        case Drop.DATA:
            story.lands(False)
            return story.record.drop(why)[0]
        case Drop.UNSOUND:
            return story.merges(False, unsound=True)[0]
        case Drop.ENDED:
            return story.merges(False, ended=True)[0]
    return story.lands(why if why in LOG else False)[0]


SAMPLES = dict.fromkeys(Drop, 4 + 2 + 6) | dict.fromkeys((*LOG, Drop.DAMAGED), 4 + 2)
SAMPLES |= dict.fromkeys((Drop.SINCE, Drop.WENT_ON), 2)
"""How much is dropped, of one shard or of both, if 4 steps were sent of the first shard and 2 were made since."""


@pytest.mark.parametrize("why", Drop)
def test_a_drop_says_why(why: Drop) -> None:
    """With the number of samples, once; what comes later is measured from there, and only it is sent. A state that
    counts what was dropped takes nothing away from local values, which no longer hold it."""
    story = Story()
    story.trains(4)
    story.sends(0)
    story.trains(2)
    assert happens(story, why) == (SENT if why is Drop.WENT_ON else LOAD)
    assert story.reasons() == {why: SAMPLES[why] / 2}
    assert story.dropped == SAMPLES[why] // 2
    story.trains(3)
    if why not in (Drop.WENT_ON, Drop.ENDED):
        assert story.merges(True) == [ALL]
    assert story.sends(0) == (3.0, 3)
    assert story.reasons() == {why: SAMPLES[why] / 2}


# -- the two outcomes


@pytest.mark.parametrize(
    ("since", "counted", "blend"), [(4, True, SINCE), (4, False, ALL), (0, True, LOAD), (0, False, ALL)]
)
def test_what_was_trained_since_stays(since: int, *, counted: bool, blend: Blend) -> None:
    """And what was sent, if it isn't counted. If nothing stays, the global value is loaded to the bit."""
    story = Story()
    story.trains(4)
    story.sends(0)
    story.trains(since)
    assert story.lands(counted) == [blend]
    assert story.dropped == 0


@pytest.mark.parametrize("alpha", [0.5, 0.0])
def test_buffers_are_never_mixed(alpha: float) -> None:
    """They keep what was gained since the sending, whatever becomes of the parameters."""
    story = Story(alpha, buffers=True)
    story.trains(4)
    story.sends(0, 1)
    story.trains(1)
    assert story.lands(True, True) == [Blend(Anchor.NEW, alpha), SINCE]


@pytest.mark.parametrize(("alpha", "dropped"), [(0.25, 3), (0.0, 4)])
def test_mix_applies_to_counted_exchanges(alpha: float, dropped: int) -> None:
    """The share of the local values that is not kept counts as dropped. What is not counted, or is counted by no
    exchange of this moment, is carried."""
    story = Story(alpha)
    story.trains(4)
    story.sends(0, 1)
    story.trains(4)
    assert story.lands(True, True) == [Blend(Anchor.NEW, alpha)] * 2
    assert (story.dropped, story.reasons()) == (dropped, {})
    story.sends(0, 1)
    story.trains(4)
    assert story.lands(False, False) == [ALL, ALL]
    assert story.merges(True) == [SINCE]
    assert story.dropped == dropped


@pytest.mark.parametrize(("counted", "blend"), [(False, SENT), (True, LOAD)])
@pytest.mark.parametrize("since", [0, 3])
def test_without_a_base_only_sent_progress_is_known(since: int, *, counted: bool, blend: Blend) -> None:
    """A trainer that stood still has no other progress; one that broke its wait off and went on loses the rest."""
    story = Story()
    story.trains(4)
    story.sends(0, 1)
    story.gone = {0, 1}
    story.trains(since)
    assert story.lands(counted, counted) == [blend, blend]
    assert story.dropped == since


def test_an_exchange_that_never_began_holds_all_there_is_without_a_base() -> None:
    """The trainer has stood still since: nothing is lost."""
    story = Story()
    story.trains(4)
    story.sends(0, 1)
    story.record.unsend(*story.sent)
    story.gone = {0, 1}
    assert story.merges(False, False) == [SENT] * 2
    assert story.dropped == 0


@pytest.mark.parametrize("outcome", [True, False, *LOG])
def test_on_a_base_that_was_changed_in_memory_nothing_is_known(outcome: Outcome) -> None:
    """All since the sending is dropped, and what was sent if no state counts it; nothing is mixed."""
    story = Story(0.5)
    story.trains(4)
    story.sends(0, 1)
    story.trains(2)
    story.lost = {0, 1}
    assert story.lands(outcome, outcome) == [LOAD, LOAD]
    assert story.dropped == (2 if outcome in COUNTED else 6)


def test_a_lost_lineage_takes_only_what_it_counted_last() -> None:
    """What was sent and dropped on the way is not dropped twice."""
    story = Story()
    story.trains(4, samples=40)
    story.sends(0, 1)
    story.lands(True, True)
    story.trains(1, samples=10)
    story.merges(unsound=True)
    story.merges(Drop.LEFT, Drop.LEFT)
    assert story.reasons() == {Drop.UNSOUND: 10, Drop.LEFT: 40}


def test_what_both_lineages_count_is_not_dropped_but_with_the_second() -> None:
    """At a change of lineage only what was trained since is dropped, until a lineage wins that doesn't count it."""
    story = Story()
    story.trains(4)
    story.sends(0, 1)
    story.lands(True, True)
    story.trains(1)
    assert story.merges(Drop.SINCE, Drop.SINCE) == [LOAD, LOAD]
    story.trains(1)
    story.merges(Drop.LEFT, Drop.LEFT)
    assert story.reasons() == {Drop.SINCE: 1, Drop.LEFT: 4 + 1}


# -- counters


def test_an_exchange_counts_if_all_of_its_shards_do() -> None:
    """When its result is merged, and at no other merge."""
    story = Story()
    for outcomes in ([True] * 2, [True, False], [True]):
        story.sends(0, 1)
        story.lands(*outcomes)
    story.merges(True, True)
    assert story.record.counted == 1


def test_what_never_left_is_sent_again_with_its_weight() -> None:
    """An exchange that never began takes nothing away from the next one."""
    story = Story()
    story.trains(4, samples=40)
    assert story.sends(0, 1) == (4.0, 40)
    story.record.unsend(*story.sent)
    story.trains(1, samples=10)
    assert story.sends(0, 1) == (5.0, 50)
    story.lands(Drop.OLD, Drop.OLD)
    assert story.dropped == 50


@pytest.mark.parametrize(
    ("weighting", "first", "again"), [("steps", 4.0, 1.0), ("samples", 40.0, 40.0), ("uniform", 1.0, 1.0)]
)
def test_weights(weighting: str, first: float, again: float) -> None:
    """Of what was trained since the shard's last sending; where nothing was, of what is sent again; else nothing."""
    story = Story(weighting=weighting)
    assert story.sends(0, 1) == (WEIGHT_MIN, 0)
    story.trains(4, samples=40)
    assert story.sends(0, 1) == (first, 40)
    assert story.lands(False, False) == [ALL] * 2
    assert story.sends(0, 1) == (again, 0)


def test_steps_are_settled_once_every_shard_has_counted_them() -> None:
    """Sent steps are settled by the state that counts them in the last shard, not by the sending. Dropped steps are
    settled too."""
    story = Story()
    story.trains(4)
    story.sends(0)
    story.lands(True)
    assert story.record.settled == 0
    story.sends(1)
    story.lands(False, False)
    assert story.record.settled == 0
    story.merges(False, True)
    assert story.record.settled == 4
    story.trains(2)
    story.merges(Drop.OLD, Drop.LEFT)
    assert story.record.settled == 6
