"""What becomes of local progress at a merge, and which samples count as dropped: rules alone, without a node."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.node.bases import Bases
from p2p_diloco.node.local_progress import LocalProgress, Take
from p2p_diloco.tensors.layout import Layout
from p2p_diloco.tensors.mean import WEIGHT_MIN
from tests.node.conftest import specs


class Story:
    """The progress of a trainer whose model has two shards of one size. `buffers`: of which the second one is."""

    def __init__(self, buffers: bool = False, **settings: Any) -> None:
        one, other = specs(2, 2)
        layout = Layout.build((one,), buffers=(other,)) if buffers else Layout.build((one, other), shard_elements=2)
        self.bases = Bases(layout, torch.zeros(4), torch.zeros(4))
        self.bases.loaded([0, 1])
        self.progress = LocalProgress(RunConfig(**settings), layout, self.bases)
        self.steps = self.samples = self.n = 0

    def trains(self, steps: int = 1, samples: int = 0) -> None:
        self.steps, self.samples = self.steps + steps, self.samples + samples

    def merges(
        self, *carries: Carry, due: tuple[int, ...] = (), afresh: bool = False, ended: bool = False
    ) -> list[Take]:
        """A merge of the first shards with these carries: what becomes of each that is loaded."""
        trained = self.steps, self.samples
        takes = self.progress.merge(dict(enumerate(carries)), due, trained, afresh=afresh, ended=ended)
        self.bases.loaded(takes)
        return [take for _, take in sorted(takes.items())]

    def sends(self, *shards: int) -> tuple[float | None, int]:
        """The weight and the samples of a sending."""
        self.merges()
        weight, samples = self.progress.weigh(shards)
        self.n += 1
        self.progress.send(self.n, shards, samples)
        return weight, samples

    def lands(self, *carries: Carry) -> list[Take]:
        """The exchange is over, and its result is merged."""
        self.progress.released(sent=True)
        return self.merges(*carries)

    @property
    def dropped(self) -> int:
        return self.progress.dropped_samples


@pytest.mark.parametrize("carry", Carry)
def test_what_was_trained_since_is_carried_as_the_log_says(carry: Carry) -> None:
    """Where the base is known and no rule of the run says otherwise."""
    story = Story(merge="rebase")
    story.trains(4)
    story.sends(0)
    story.trains(4)
    assert story.lands(carry) == [Take(carry.value)]
    assert story.dropped == (4 if carry is Carry.DROP else 0)  # all 8 steps, in half of the model


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_buffers_are_never_mixed(alpha: float) -> None:
    """They keep what was gained since the sending, whatever becomes of the parameters."""
    story = Story(buffers=True, overlap_steps=1, merge_alpha=alpha)
    story.trains(4)
    story.sends(0, 1)
    story.trains(1)
    assert story.lands(Carry.SUBTRACT, Carry.SUBTRACT) == [Take.MIX if alpha else Take.DROP, Take.SUBTRACT]


@pytest.mark.parametrize(
    ("carry", "take"), [(Carry.SUBTRACT, Take.DROP), (Carry.KEEP, Take.KEEP), (Carry.RESTORE, Take.RESTORE)]
)
def test_counted_progress_leaves_nothing_without_a_step_since_the_sending(carry: Carry, take: Take) -> None:
    """The global value is loaded to the bit; the two others are as ever."""
    story = Story(merge="rebase")
    story.trains(4)
    story.sends(0)
    assert story.lands(carry) == [take]
    assert story.dropped == 0


@pytest.mark.parametrize(("merge_alpha", "take", "dropped"), [(0.25, Take.MIX, 3), (0.0, Take.DROP, 4)])
def test_mix_applies_to_counted_exchanges(merge_alpha: float, take: Take, dropped: int) -> None:
    """The share of the local values that is not kept is dropped. What is not counted, or is counted by no exchange of
    this moment, is carried."""
    story = Story(merge="mix", merge_alpha=merge_alpha, overlap_steps=2, sync_every=4)
    story.trains(4)
    story.sends(0, 1)
    story.trains(4)
    assert story.lands(Carry.SUBTRACT, Carry.SUBTRACT) == [take, take]
    assert story.dropped == dropped
    story.sends(0, 1)
    story.trains(4)
    assert story.lands(Carry.KEEP, Carry.KEEP) == [Take.KEEP, Take.KEEP]
    assert story.merges(Carry.SUBTRACT) == [Take.SUBTRACT]
    assert story.dropped == dropped


@pytest.mark.parametrize(("carry", "take"), [(Carry.KEEP, Take.SENT), (Carry.SUBTRACT, Take.DROP)])
@pytest.mark.parametrize("since", [0, 3])
def test_without_a_base_only_sent_progress_is_known(carry: Carry, take: Take, since: int) -> None:
    """A trainer that stood still has no other progress; one that broke its wait off and went on loses the rest."""
    story = Story(merge="rebase")
    story.trains(4)
    story.sends(0, 1)
    story.bases.gone = {0, 1}
    story.trains(since)
    assert story.lands(carry, carry) == [take, take]
    assert story.dropped == since


def test_an_exchange_that_never_began_holds_all_there_is_without_a_base() -> None:
    """The trainer has stood still since: nothing is lost."""
    story = Story(merge="rebase")
    story.trains(4)
    story.sends(0, 1)
    story.progress.released(sent=False)
    story.bases.gone = {0, 1}
    assert story.merges(Carry.KEEP, Carry.KEEP) == [Take.SENT] * 2
    assert story.dropped == 0


@pytest.mark.parametrize(("merge", "overlap_steps"), [("rebase", 0), ("mix", 2)])
@pytest.mark.parametrize("carry", Carry)
def test_on_a_base_that_was_changed_in_memory_nothing_is_known(carry: Carry, merge: str, overlap_steps: int) -> None:
    """All since the sending is dropped, once, and what was sent if no commit counts it; nothing of it is taken away or
    put back later."""
    story = Story(merge=merge, overlap_steps=overlap_steps, sync_every=4)
    story.trains(4)
    story.sends(0, 1)
    story.trains(2)
    story.bases.lost = {0, 1}
    assert story.lands(carry, carry) == [Take.FORGET, Take.FORGET]
    assert story.dropped == (2 if carry is Carry.SUBTRACT else 6)


def test_what_was_given_up_is_lost_once_and_weighs_nothing() -> None:
    """The next sending holds what was trained after that."""
    story = Story(merge="rebase")
    story.trains(4)
    story.sends(0, 1)
    story.trains(2)
    story.lands(Carry.DROP, Carry.DROP)
    assert story.dropped == 6
    story.bases.lost = {0, 1}
    story.merges(Carry.KEEP, Carry.KEEP)
    assert story.dropped == 6
    story.trains(3)
    assert story.sends(0, 1) == (3.0, 3)


def test_a_lost_base_is_loaded_where_it_is_due() -> None:
    """Though the log has nothing new of it; other shards wait until there is something."""
    story = Story()
    story.bases.lost = {0, 1}
    assert story.merges(due=(1,)) == [Take.FORGET]
    assert story.bases.lost == {0}


@pytest.mark.parametrize("why", ["afresh", "ended", "torn"])
def test_all_is_given_up_at_once(why: str) -> None:
    """By a trainer whose values are no use, at the end of the run, after a merge that was broken off: what was sent and
    is not counted, and all since."""
    story = Story()
    story.trains(4)
    story.sends(0, 1)
    story.trains(2)
    story.progress.torn = why == "torn"
    takes = story.merges(Carry.SUBTRACT, afresh=why == "afresh", ended=why == "ended")
    assert takes == [Take.DROP if why == "ended" else Take.FORGET] * 2
    assert story.dropped == 2 + 4 // 2
    assert story.merges(ended=why == "ended") == ([Take.DROP] * 2 if why == "ended" else [])
    story.trains(3)
    assert story.sends(0, 1) == (3.0, 3)


def test_the_end_is_counted_once() -> None:
    """What is trained afterwards is the trainer's own affair."""
    story = Story()
    story.trains(4)
    story.merges(ended=True)
    story.trains(9)
    assert story.merges(Carry.KEEP, ended=True) == [Take.DROP] * 2
    assert story.dropped == 4


def test_an_exchange_counts_if_all_of_its_shards_do() -> None:
    """When its result is merged, and at no other merge."""
    story = Story()
    for carries in ([Carry.SUBTRACT] * 2, [Carry.SUBTRACT, Carry.KEEP], [Carry.SUBTRACT]):
        story.sends(0, 1)
        story.lands(*carries)
    story.merges(Carry.SUBTRACT, Carry.SUBTRACT)
    assert story.progress.counted == 1


def test_what_never_left_is_sent_again_with_its_weight() -> None:
    """An exchange that never began takes nothing away from the next one."""
    story = Story()
    story.trains(4, samples=40)
    assert story.sends(0, 1) == (4.0, 40)
    story.progress.released(sent=False)
    story.trains(1, samples=10)
    assert story.sends(0, 1) == (5.0, 50)
    story.lands(Carry.DROP, Carry.DROP)
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
    assert story.lands(Carry.KEEP, Carry.KEEP) == [Take.KEEP] * 2
    assert story.sends(0, 1) == (again, 0)


def test_a_weight_by_samples_needs_samples() -> None:
    """Steps without any have none."""
    story = Story(weighting="samples")
    story.trains(4)
    story.merges()
    assert story.progress.weigh((0, 1)) == (None, 4)


def test_steps_are_settled_once_every_shard_has_counted_them() -> None:
    """Sent steps are settled by the commit that counts them in the last shard, not by the sending. Given-up steps are
    settled too. If the commit's lineage loses, its steps are unsettled again."""
    story = Story(merge="rebase")
    story.trains(4)
    story.sends(0)
    story.lands(Carry.SUBTRACT)
    assert story.progress.settled == 0
    story.sends(1)
    story.lands(Carry.KEEP, Carry.KEEP)
    assert story.progress.settled == 0
    story.merges(Carry.KEEP, Carry.SUBTRACT)
    assert story.progress.settled == 4
    story.merges(Carry.KEEP, Carry.RESTORE)
    assert story.progress.settled == 0
    story.trains(2)
    story.merges(Carry.DROP, Carry.DROP)
    assert story.progress.settled == 6
