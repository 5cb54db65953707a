"""A peer's own trainer: what it merges, what it contributes next, and under which id."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.events import Carry, Contribute, Load, Loaded, Merge, Release, Restore, Stepped
from p2p_diloco.core.lives import incarnation_after
from p2p_diloco.core.messages import Contribution, Counted, Plan, Promise, State, Want
from p2p_diloco.core.version import ContributionId, Version
from tests.core.conftest import TWO, computed, moves_on, running, to

# -- merging


def test_a_merge_loads_each_shard_that_has_changed(peer: Any) -> None:
    """Each version is merged once, and the Load names the shards that are due."""
    b = peer("b", group="ab", fragments=TWO)
    one, two = Loaded(0, b.version(1), Carry.KEEP), Loaded(1, b.version(1), Carry.KEEP)
    assert b.feed(Merge()) == [Load((one, two), due=(0,))]
    assert b.feed(Merge()) == [Load((), due=(0,))]
    moves_on(b, 0)
    assert b.feed(Merge()) == [Load((Loaded(0, b.version(2), Carry.KEEP),), due=(1,))]


def test_a_merge_loads_nothing_before_all_shards_are_held(peer: Any) -> None:
    b = peer("b", epoch=None, live="")
    assert b.feed(Merge()) == [Load((), ())]


def test_nothing_is_merged_during_an_exchange(peer: Any) -> None:
    """The trainer's base stays until the round is over; then everything newer is merged."""
    b = peer("b", group="ab", fragments=TWO)
    b.contribute(0)
    assert Release(sent=True) not in moves_on(b, 1)
    assert b.feed(Merge()) == [Load((), ())]
    assert moves_on(b, 0)[-1] == Release(sent=True)
    assert [loaded.shard for loaded in b.feed(Merge())[0].shards] == [0, 1]


def test_a_counted_contribution_is_subtracted_from_local_progress(peer: Any, life: int) -> None:
    b = peer("b", group="ab")
    b.contribute()
    mine = Counted("b", ContributionId(life, 1), 2.0, 5)
    assert moves_on(b, counted=(mine,))[-1] == Release(sent=True)
    assert b.feed(Merge()) == [Load((Loaded(0, b.version(2), Carry.SUBTRACT),), due=(0,))]


def test_an_uncounted_contribution_rides_in_the_next_one(peer: Any, life: int) -> None:
    """Its progress is kept, and the next contribution names it as the oldest one in it."""
    b = peer("b", group="ab", carry_rounds=1)
    b.contribute()
    moves_on(b)
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(2), Carry.KEEP),)
    send = b.contribute()[-1]
    assert (send.message.id, send.message.oldest) == (ContributionId(life, 2), ContributionId(life, 1))
    moves_on(b)
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(3), Carry.OLD),)


@pytest.mark.parametrize("group", ["a", "ab"])
def test_uncounted_progress_is_dropped_after_carry_rounds_more_sendings(peer: Any, group: str) -> None:
    """Whether the rounds waited for it or not: local parameters must not drift without a bound."""
    b = peer("b", group=group, live="a", carry_rounds=2)
    carries = []
    for _ in range(6):
        b.contribute()
        moves_on(b, plan=b.plan(group))
        carries.append(b.feed(Merge())[0].shards[0].carry)
    assert carries == [Carry.KEEP, Carry.KEEP, Carry.OLD] * 2


def test_many_epochs_missed_at_once_are_one_miss(peer: Any) -> None:
    """The progress was sent once, so the next contribution carries it."""
    b = peer("b", group="ab", carry_rounds=2)
    b.contribute()
    for _ in range(9):
        moves_on(b)
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(10), Carry.KEEP),)


# -- what is due


def test_the_shards_of_the_lowest_epoch_are_due(peer: Any) -> None:
    """Then those of the lowest fragment; none for which the run has ended."""

    def due(epochs: tuple[int, ...], **rules: Any) -> Any:
        a = peer("a", epoch=None, live="", fragments=((0, 1), (2, 3)), **rules)
        a.feed(Restore(tuple(a.state(s, e) for s, e in enumerate(epochs))))
        (load,) = (e for e in [*a.feed(Merge()), *a.pass_time(a.rules.settle + 1.0)] if isinstance(e, Load))
        return load.due

    assert due((4, 4, 4, 4)) == (0, 1)
    assert due((5, 5, 4, 4)) == (2, 3)
    assert due((5, 4, 4, 4)) == (1,)
    assert due((5, 5, 5, 4)) == (3,)
    assert due((5, 5, 5, 4), stop_after_epochs=5) == (3,)
    assert due((5, 4, 5, 5), stop_after_epochs=5) == (1,)


def test_a_fragment_that_has_ended_by_samples_is_not_due(peer: Any) -> None:
    """Though its epoch is the lowest."""
    a = peer("a", epoch=None, live="", fragments=TWO, stop_after_samples=100)
    a.feed(Restore((a.state(0, 3, version=a.version(3, samples=100)), a.state(1, 4))))
    assert a.feed(Merge())[0].due == (1,)


def test_a_shard_that_has_ended_by_samples_is_not_due(peer: Any) -> None:
    """Though its fragment is at one epoch."""
    a = peer("a", epoch=None, live="", fragments=((0, 1),), stop_after_samples=100)
    a.feed(Restore((a.state(0, 3, version=a.version(3, samples=100)), a.state(1, 3))))
    assert a.feed(Merge())[0].due == (1,)


def test_asynchronous_fragments_take_turns(peer: Any) -> None:
    """Epochs do not tell what a peer has contributed."""
    c = running(peer, "c", succession="c", successors=0, fragments=((0,), (1,)))
    for other in "ab":
        c.hear(other, Promise(1, c.held, 0))
    due = []
    for _ in range(4):
        [load] = c.feed(Merge())
        due.append(load.due)
        effects = c.contribute(*load.due)
        computed(c, effects, f"n{len(due)}")
    assert due == [(0,), (1,), (0,), (1,)]


def test_three_asynchronous_fragments_take_turns_in_order(peer: Any) -> None:
    c = running(peer, "c", succession="c", successors=0, fragments=((0,), (1,), (2,)))
    for shard in (1, 2):
        for other in "ab":
            c.hear(other, Promise(shard, c.held, 0))
    due = []
    for _ in range(4):
        [load] = c.feed(Merge())
        due.append(load.due)
        computed(c, c.contribute(*load.due), f"n{len(due)}")
    assert due == [(0,), (1,), (2,), (0,)]


# -- an exchange


def test_an_asynchronous_contribution_goes_out_for_each_shard_and_counts_one(peer: Any, life: int) -> None:
    """Whatever weight the trainer gives it: only synchronous ones are weighted."""
    a = running(peer, "a", fragments=((0, 1),))
    id = ContributionId(life, 1)
    sent = to(a.contribute(0, 1, samples=7), "c", Contribution)
    assert sent == [Contribution(shard, a.held, id, id, weight=1.0, samples=7) for shard in (0, 1)]
    assert [contribution.payload for contribution in sent] == ["Δ"] * 2


def test_an_asynchronous_contribution_of_a_left_lineage_is_not_sent(peer: Any) -> None:
    """The trainer is told to merge and try again."""
    a = running(peer, "a")
    a.feed(Merge())
    left(a)
    assert a.feed(Contribute((0,), 2.0, 5, ("Δ",)))[0] == Release(sent=False)


def left(one: Any) -> None:
    """The replica takes another lineage."""
    other = Version(0, 70, 6, "x6")
    state = State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"})
    one.replica.logs[0].adopt(state, one.now)


def test_a_lineage_is_left_behind_until_the_trainer_has_merged_another(peer: Any) -> None:
    """Before its first merge it leaves nothing."""
    a = running(peer, "a")
    own = a.replica.own
    assert not own.left_behind
    a.feed(Merge())
    assert not own.left_behind
    left(a)
    assert own.left_behind
    a.feed(Merge())
    assert not own.left_behind


def test_an_exchange_is_over_when_another_fragment_is_due(peer: Any) -> None:
    """After a change of lineage a fragment may be behind the one that is exchanged, whose base is the same."""
    b = peer("b", group="ab", epoch=4, fragments=TWO)
    b.contribute(0)
    log = b.replica.logs[1]
    effects = log.adopt(b.state(1, 2, version=Version(0, 99, 2, "x"), history=((1, "x1"), (2, "x"))), b.now)
    assert [*effects, *b.feed(Stepped(0.5))][-1] == Release(sent=True)


def test_an_exchange_is_over_when_all_its_shards_have_moved(peer: Any) -> None:
    b = peer("b", group="ab", fragments=((0, 1),))
    b.contribute(0, 1)
    assert Release(sent=True) not in moves_on(b, 0)
    assert moves_on(b, 1)[-1] == Release(sent=True)


def test_an_exchange_is_over_when_a_shard_that_it_lacks_is_asked_for(peer: Any) -> None:
    """One of its shards has joined another lineage of the same epoch. There its aggregator waits for this peer, and may
    itself be what the other shard waits for. A request for what is under way, or was made on what is left, ends
    nothing."""
    b = peer("b", group="ab", epoch=4, fragments=((0, 1),))
    left = b.held
    b.contribute(0, 1)
    other = Version(0, 99, 4, "x")
    b.replica.logs[0].adopt(b.state(0, 4, version=other, history=((3, "x3"), (4, "x"))), b.now)
    b.feed(Stepped(0.5))
    for want in (Want(1, left), Want(0, left)):
        assert Release(sent=True) not in b.hear("a", want)
    assert b.hear("a", Want(0, other))[0] == Release(sent=True)
    assert b.feed(Merge())[0].due == (0, 1)


def test_a_contribution_whose_base_has_changed_is_not_sent(peer: Any, life: int) -> None:
    """The trainer is told to merge and try again; the next contribution carries the progress."""
    b = peer("b", group="ab")
    b.feed(Merge())
    moves_on(b)
    assert b.feed(Contribute((0,), 2.0, 5, ("Δ",))) == [Release(sent=False)]
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(2), Carry.KEEP),)
    (send,) = b.contribute()
    assert (send.message.id, send.message.oldest) == (ContributionId(life, 2), ContributionId(life, 1))


def test_the_shards_whose_base_has_not_changed_are_sent(peer: Any) -> None:
    b = peer("b", group="ab", fragments=((0, 1),))
    b.feed(Merge())
    moves_on(b, 0)
    effects = b.feed(Contribute((0, 1), 2.0, 5, ("Δ0", "Δ1")))
    assert [(e.to, e.message.shard, e.message.payload) for e in effects] == [("a", 1, "Δ1")]
    assert moves_on(b, 1)[-1] == Release(sent=True)


# -- numbers


def test_each_contribution_has_its_own_number(peer: Any, life: int) -> None:
    """All shards of one exchange share the id."""
    b = peer("b", group="ab", fragments=((0, 1), (2,)))
    first = [e.message.id.sequence for e in b.contribute(0, 1)]
    moves_on(b, 0)
    moves_on(b, 1)
    second = [e.message.id.sequence for e in b.contribute(2)]
    assert (first, second) == ([1, 1], [2])


def test_an_incarnation_rises_above_a_greater_one_that_is_counted(peer: Any, life: int) -> None:
    """Otherwise, after its clock went back, a restarted peer's contributions would count as old ones."""
    earlier = ContributionId(life + (7 << 20), 12)
    b = peer("b", group="ab", counted=(("b", earlier),))
    risen = incarnation_after(earlier.incarnation, life)
    (send,) = b.contribute()
    assert send.message.id == ContributionId(risen, 1) > earlier
    assert b.replica.roster.mine.incarnation == risen


def test_an_incarnation_above_the_counted_one_stays(peer: Any, life: int) -> None:
    b = peer("b", group="ab", counted=(("b", ContributionId(life - 1, 99)),))
    (send,) = b.contribute()
    assert send.message.id == ContributionId(life, 1)


def test_an_incarnation_does_not_rise_above_its_own_count(peer: Any, life: int) -> None:
    b = peer("b", group="ab")
    b.contribute()
    moves_on(b, counted=(Counted("b", ContributionId(life, 1), 2.0, 5),))
    assert (b.replica.own.incarnation, b.replica.own.sequence) == (life, 1)
